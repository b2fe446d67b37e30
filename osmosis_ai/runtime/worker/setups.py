"""Run a repository's setup functions before a rollout."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread

from osmosis_ai import tracebacks
from osmosis_ai.mcp_tools.setups import Setup
from osmosis_ai.records import Failure

__all__ = ["SetupRun"]


class SetupRun:
    """One run of all setup functions, in order. Sync ones run in a thread, which a timeout abandons.

    `holds_thread` is True while a sync function runs.
    """

    def __init__(self, setups: Sequence[Setup], root: Path) -> None:
        self._setups = setups
        self._root = root
        self.holds_thread = False

    async def run(self) -> Failure | None:
        """Run the functions; return the failure of the first that raises."""
        for setup in self._setups:
            try:
                if inspect.iscoroutinefunction(setup.function):
                    await setup.function()
                    continue
                self.holds_thread = True
                result = await anyio.to_thread.run_sync(setup.function, abandon_on_cancel=True)
                self.holds_thread = False
                if inspect.isawaitable(result):
                    await result
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - it is this rollout's failure
                return self._failure(setup, error)
        return None

    def _failure(self, setup: Setup, error: BaseException) -> Failure:
        place = tracebacks.locate(error, self._root)
        name = getattr(setup.function, "__name__", "setup")
        return Failure(
            "setup",
            f"{name} raised {tracebacks.describe(error)}",
            kind="exception",
            file=setup.file if place is None else place.file,
            line=setup.line if place is None else place.line,
            detail=tracebacks.short_traceback(error, self._root),
        )
