"""Notify open pages of changes to a store, by server-sent events.

An event holds only the stores' version; on each event, a page reloads its content. A page that was disconnected misses
nothing: it reconnects with the last version it knows, and gets an event at once if there is a newer one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import anyio
import anyio.to_thread

from osmosis_ai.errors import StoreError
from osmosis_ai.viewer.stores import Stores

__all__ = ["changes"]

POLL_SECONDS = 0.5
SILENT_POLLS = 30
"""Polls without a change after which to send a comment, which shows the server if the client is gone."""


async def changes(stores: Stores, since: str, stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield an event for each change of a store after version `since`, at most one every `POLL_SECONDS`."""

    def read() -> str:
        try:
            return stores.version()
        except StoreError:
            # The database is locked or damaged, which the pages report.
            return "unreadable"

    # Milliseconds after which a browser reconnects.
    yield "retry: 1000\n\n"
    silent = 0
    while not stopping():
        version = await anyio.to_thread.run_sync(read)
        if version != since:
            since, silent = version, 0
            yield f"id: {version}\nevent: change\ndata: {version}\n\n"
        elif silent >= SILENT_POLLS:
            silent = 0
            yield ": still here\n\n"
        silent += 1
        await anyio.sleep(POLL_SECONDS)
