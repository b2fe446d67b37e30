"""Pages hear of every change of a store, also of one that they missed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from viewed import made, viewer, write_run

from osmosis_ai.store.live import RunningRollout
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.viewer.live import changes
from osmosis_ai.viewer.stores import Stores

pytestmark = pytest.mark.anyio


async def next_version(events: AsyncIterator[str]) -> str:
    """Return the version of the next event, whatever comes before it."""
    with anyio.fail_after(30):
        async for event in events:
            if found := re.fullmatch(r"id: (\S+)\nevent: change\ndata: \1\n\n", event):
                return found[1]
    raise AssertionError("the events have ended")


async def test_a_page_hears_of_each_change_and_of_what_it_missed(tmp_path: Path) -> None:
    stores = Stores([(tmp_path, tmp_path / ".osmosis")])
    before = stores.version()
    events = changes(stores, before, lambda: False)
    await to_thread.run_sync(write_run, tmp_path, [made(0)])
    first = await next_version(events)
    assert first != before
    await to_thread.run_sync(write_run, tmp_path, [made(1)])
    second = await next_version(events)
    # Another connection, which knows the first version, hears at once that it isn't the last one.
    assert await next_version(changes(stores, first, lambda: False)) == second
    # Versions of another server mean nothing here.
    assert await next_version(changes(Stores([(tmp_path, tmp_path / ".osmosis")]), second, lambda: False)) != second
    stores.close()


async def test_the_end_of_a_run_s_process_is_a_change(tmp_path: Path) -> None:
    stores = Stores([(tmp_path, tmp_path / ".osmosis")])
    with RunStore.open(tmp_path) as store:
        await store.create_run("eval", identity={}, config={})
        running = stores.version()
    # It ended without a word, as a killed one does.
    assert await next_version(changes(stores, running, lambda: False)) != running
    stores.close()


async def test_events_end_when_the_server_stops(tmp_path: Path) -> None:
    stores = Stores([(tmp_path, tmp_path / ".osmosis")])
    assert [event async for event in changes(stores, stores.version(), lambda: True)] == ["retry: 1000\n\n"]


@pytest.mark.parametrize(("nodes", "shown"), [(["", ""], []), (["gpu-1", ""], ["gpu-1", "this machine"])])
async def test_rollouts_in_flight_show_their_nodes_if_there_are_any(
    tmp_path: Path, nodes: list[str], shown: list[str]
) -> None:
    with RunStore.open(tmp_path) as store:
        run_id = await store.create_run("eval", identity={}, config={})
        flying = [RunningRollout(row, 0, 1000.0, "the model (turn 1)", node) for row, node in enumerate(nodes)]
        store.live_file(run_id).show(flying)
        with viewer(tmp_path) as client:
            text = client.get(f"/runs/{tmp_path.name}/{run_id}").text
    part = text[text.index("In flight") : text.index("</table>", text.index("In flight"))]
    assert part.count("the model (turn 1)") == 2
    assert re.findall(r"<td>(gpu-1|this machine)</td>", part) == shown
