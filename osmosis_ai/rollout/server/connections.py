"""Limit a server's connections: their number, and how long one may stay open without a request."""

from __future__ import annotations

import asyncio
import resource
from operator import itemgetter

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BoundedProtocol", "connection_limit", "raise_descriptor_limit"]

MAX_CONNECTIONS = 4096
MAX_DESCRIPTORS = 65_536
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
"""Written without uvicorn, which can answer only a request that has arrived."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit on file descriptors, usually 1,024, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit(most: int = MAX_CONNECTIONS) -> int:
    """Return the maximum number of connections; half of the file descriptors stay free for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(soft // 2, most)


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol for one connection, with limits.

    At the limit, a new connection replaces the one that has been idle longest, so idle clients can't lock others out.

    Attributes:
        max_connections: Maximum number of connections; fewer if there are few descriptors.
        header_timeout: Seconds that a client has to send a request's headers.
        waiting_since: The event loop's time at which the connection became idle; None during a request.
    """

    max_connections = MAX_CONNECTIONS
    header_timeout = 20.0
    waiting_since: float | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > connection_limit(self.max_connections):
            others = [other for other in self.connections if isinstance(other, BoundedProtocol)]
            waiting = [(other.waiting_since, other) for other in others if other.waiting_since is not None]
            if not waiting:
                transport.write(BUSY)
                transport.close()
                return
            min(waiting, key=itemgetter(0))[1].end()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # The headers are still incomplete. The timer runs on, so a client can't stay by sending a byte at a time.
        if self.cycle is None or self.cycle.response_complete:
            self._await_request()
        else:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            # An answer has begun, or even ended.
            self.transport.close()
        if self.cycle is not None:
            # The application's own answer has nowhere to go.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def end(self) -> None:
        """End the connection, even if its client doesn't read."""
        self._stop_waiting()
        # It is lost only in the event loop's next turn.
        self.connections.discard(self)
        self.transport.abort()

    def _await_request(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self.waiting_since = self.loop.time()
            self._timer = self.loop.call_later(self.header_timeout, self.end)

    def _stop_waiting(self) -> None:
        self.waiting_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
