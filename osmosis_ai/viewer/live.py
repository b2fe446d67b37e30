"""Tell open pages that a store has changed, by server-sent events.

An event holds the stores' version and nothing else: a page reads again what it shows. So a page that was away for a
while misses nothing: it reconnects with the version that it knows, and hears at once if that is no longer the version.
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
"""After so many polls without a change a comment is sent, by which the server notices who has gone."""


async def changes(stores: Stores, since: str, stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield an event whenever a store has changed since this version, at most every `POLL_SECONDS`."""

    def read() -> str:
        try:
            return stores.version()
        except StoreError:
            # The file is locked or damaged; the pages say so.
            return "unreadable"

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
