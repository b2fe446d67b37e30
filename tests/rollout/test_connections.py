"""The limits of a server's connections, and requests that aren't HTTP, over raw sockets."""

from __future__ import annotations

import random
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from loops import PATIENCE, Adding

from osmosis_ai.rollout import create_app
from osmosis_ai.rollout.server.connections import BoundedProtocol
from osmosis_ai.rollout.server.serve import make_server, open_socket

HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Impatient(BoundedProtocol):
    header_timeout = 0.2


class Small(BoundedProtocol):
    max_connections = 3


@contextmanager
def served(protocol: type[BoundedProtocol] = BoundedProtocol) -> Iterator[tuple[str, int]]:
    """Serve an application as `serve_agent_loop` does; the address."""
    with open_socket("127.0.0.1", 0) as listener:
        server = make_server(create_app(Adding()), "info", log_config=None)
        server.config.http_protocol_class = protocol
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def connected(address: tuple[str, int], sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        connection.sendall(sent)
        yield connection


def read(connection: socket.socket) -> bytes:
    """Return what the server sends until it ends the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: 127", HEALTH + b"GET /hea"],
    ids=["silence", "half of the headers", "half of a second request"],
)
def test_a_connection_without_a_request_ends_in_time(sent: bytes) -> None:
    with served(Impatient) as address, connected(address, sent) as connection:
        assert read(connection).startswith(b"HTTP/1.1 200" if sent.startswith(HEALTH) else b"")


def test_a_body_that_drips_after_the_answer_doesnt_hold_its_connection() -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
    with served(Impatient) as address, connected(address, head) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 404")
        with pytest.raises(ConnectionError):
            drip(connection)


def test_at_the_limit_the_longest_waiting_connection_makes_place() -> None:
    with served(Small) as address, ExitStack() as stack:
        first, second, _ = (stack.enter_context(connected(address)) for _ in range(3))
        late = stack.enter_context(connected(address, HEALTH))
        assert late.recv(4096).startswith(b"HTTP/1.1 200")
        assert read(first) == b""
        second.sendall(HEALTH)
        assert second.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_server_opens_as_many_files_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    try:
        make_server(create_app(Adding()), "info", log_config=None)
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised == hard or raised >= 65_536


BROKEN = [
    b"POST /v1/rollout/init HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nnot a length\r\n",
    b"POST /nowhere HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n\r\n",
    HEALTH + b"\x00\x01\x02\r\n\r\n" + HEALTH,
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET " + b"a" * 70_000,
]


def mutated(number: int) -> bytes:
    """A request with some bytes replaced, removed or doubled; the same one every time."""
    chance = random.Random(number)
    data = bytearray(BROKEN[number % 2] if number % 3 else HEALTH * 2)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data))
        data[place : place + chance.randint(0, 3)] = chance.choice(
            [b"", b"\r\n", b"\x00", b"\xff", b": ", b"9999999", data[place : place + 20] * 2, b"chunked", b"HTTP/2"]
        )
    return bytes(data)


def test_what_isnt_http_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with served() as address:
        for sent in [*BROKEN, *(mutated(number) for number in range(600))]:
            with connected(address) as connection:
                half = len(sent) // 2
                try:
                    connection.sendall(sent[:half])
                    connection.sendall(sent[half:])
                    connection.shutdown(socket.SHUT_WR)
                except OSError:
                    continue
                read(connection)
    assert [record for record in caplog.records if record.exc_info] == []
