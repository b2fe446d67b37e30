"""Lets the built-in loop's rollouts use a worker's event loop one after the other, first come, first served.

Rollouts that ask a model at the same moment are answered at the same moment, and would then share the loop: each is
done only when all are, their next requests leave together, and in between the loop has nothing to do. One after the
other, the first is on its way again while the last still waits, and the replies come back spread out.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Admission"]

AT_ONCE = 2
"""How many may be inside: with one, the loop would stand idle while a tool's thread works."""
PATIENCE_SECONDS = 0.008
"""How long one that is inside holds up others. That is longer than most need; a tool that takes longer most often waits
for something itself. So from the second time on there is room for twice as many each time, until one is done in
less."""


class Admission:
    """Who may use the loop now, and who comes next. Whoever is in or waits has a name that no other has."""

    def __init__(self) -> None:
        self._room = AT_ONCE
        self._one_is_done = True
        self._inside: dict[str, float] = {}
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, name: str) -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        if len(self._inside) < self._room:
            self._inside[name] = loop.time()
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append((name, place))
        self._watch(loop)
        try:
            await place
        except asyncio.CancelledError:
            # It may have been let in at the same moment.
            self.leave(name)
            raise

    def leave(self, name: str) -> None:
        """Let the next one in; may be called by one that isn't inside any more."""
        if self._inside.pop(name, None) is not None:
            self._room = AT_ONCE
            self._one_is_done = True
            self._admit()

    def _admit(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._inside) < self._room:
            name, place = self._waiting.popleft()
            if not place.done():
                self._inside[name] = loop.time()
                place.set_result(None)
        self._watch(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and self._timer is None:
            # Dicts keep the order of insertion, so the first one has been inside for the longest time.
            self._timer = loop.call_at(next(iter(self._inside.values())) + PATIENCE_SECONDS, self._lose_patience)

    def _lose_patience(self) -> None:
        self._timer = None
        late = asyncio.get_running_loop().time() - PATIENCE_SECONDS
        for name in [name for name, since in self._inside.items() if since <= late]:
            del self._inside[name]
        if not self._one_is_done:
            self._room *= 2
        self._one_is_done = False
        self._admit()
