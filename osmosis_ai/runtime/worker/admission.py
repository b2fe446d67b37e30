"""Admit the built-in loop's rollouts to a worker's event loop one after the other, first come, first served.

Rollouts that call a model at the same moment get their replies at the same moment. If they then shared the loop, each
would finish only when all do, their next requests would leave together, and the loop would idle in between. Admitted
one by one, the first sends its next request while the last still waits, and the replies arrive spread out.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Admission"]

AT_ONCE = 2
"""How many rollouts are admitted at once. With one, the loop would idle while a tool's thread works."""
PATIENCE_SECONDS = 0.008
"""How long an admitted rollout holds up the others. Most need less; a slower tool usually waits for something itself.
From the second such case in a row, the room doubles each time, until a rollout leaves in time."""


class Admission:
    """The admitted rollouts and the queue of waiting ones, each under a unique name."""

    def __init__(self) -> None:
        self._room = AT_ONCE
        self._one_is_done = True
        self._inside: dict[str, float] = {}
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, name: str) -> None:
        """Wait until a rollout is admitted."""
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
            # It may have been admitted at the same moment.
            self.leave(name)
            raise

    def leave(self, name: str) -> None:
        """Leave, and admit the next rollout; has no effect if the rollout isn't admitted any more."""
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
            # Dicts keep insertion order, so the first entry has been inside the longest.
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
