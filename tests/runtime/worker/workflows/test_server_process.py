"""A rollout server as a child process: what it is started with, how it is identified, and that it always ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import anyio
import msgspec
import psutil
import pytest

from osmosis_ai.errors import RepositoryError
from osmosis_ai.runtime.worker.workflows.server_process import ServerCommand, ServerProcess
from waiting import eventually

pytestmark = pytest.mark.anyio

SERVER = """
import json, os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({health}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

print("at", os.getcwd(), os.environ["_OSMOSIS_ROLLOUT_NAME"], flush=True)
{before}
HTTPServer(("127.0.0.1", int(os.environ["_OSMOSIS_ROLLOUT_PORT"])), Handler).serve_forever()
"""
NAMED = '{"instance_id": os.environ["_OSMOSIS_ROLLOUT_INSTANCE_ID"]}'

Write = Callable[..., ServerCommand]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(before: str = "", health: str = NAMED) -> ServerCommand:
        folder = tmp_path / "raw"
        folder.mkdir()
        source = SERVER.replace("{before}", before).replace("{health}", health)
        (folder / "main.py").write_text(source, encoding="utf-8")
        return ServerCommand(sys.executable, str(folder / "main.py"), str(tmp_path / "artifacts"))

    return written


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("health", [NAMED, "{}"])
async def test_it_starts_in_its_folder_with_its_variables_and_ends_with_the_block(write: Write, health: str) -> None:
    command = write("print(os.getpid(), flush=True)", health)
    lines: list[str] = []
    async with ServerProcess.open(command, lines.append) as running:
        assert await running.server.health(5.0) is not None
        pid = int(lines[1])
        assert os.getpgid(pid) == pid
    assert lines[0] == f"at {command.folder} raw"
    assert running.ended == 128 + signal.SIGTERM
    assert ended(pid)


async def test_an_early_end_is_reported_with_the_end_of_the_output(write: Write) -> None:
    command = write("raise RuntimeError('no such setting')")
    with pytest.raises(RepositoryError, match="ended with code 1 before it was healthy") as raised:
        async with ServerProcess.open(command, lambda line: None):
            pass
    assert "RuntimeError: no such setting" in str(raised.value)


async def test_a_script_that_serves_nothing_is_told_to(write: Write) -> None:
    command = write("raise SystemExit")
    with pytest.raises(RepositoryError, match=r"ended with code 0 .*: it must serve on port \$_OSMOSIS_ROLLOUT_PORT"):
        async with ServerProcess.open(command, lambda line: None):
            pass


async def test_a_server_that_never_becomes_healthy_is_ended(write: Write) -> None:
    lines: list[str] = []
    command = write("print(os.getpid(), flush=True)\nimport time; time.sleep(3600)")
    with pytest.raises(RepositoryError, match=r"not healthy within 1 s: nothing answers at .*; it must serve on port"):
        async with ServerProcess.open(command, lines.append, seconds=1.0):
            pass
    assert ended(int(lines[1]))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("time.sleep(3600)", "gave no answer"),
        ("self.send_error(500)", "answered 500"),
        ("self.wfile.write(b'HTTP/1.0 200 OK\\r\\n\\r\\n<html>')", "an HTML page"),
        ("self.wfile.write(b'HTTP/1.0 200 OK\\r\\n\\r\\n[]')", "something else than a JSON object"),
        ("None", "dropped the connection"),
    ],
)
async def test_a_server_that_takes_the_port_and_never_becomes_healthy_is_ended(
    write: Write, answer: str, problem: str
) -> None:
    lines: list[str] = []
    command = write(f"import time\nHandler.do_GET = lambda self: {answer}\nprint(os.getpid(), flush=True)")
    with pytest.raises(RepositoryError, match="not healthy within 1 s: ") as raised:
        async with ServerProcess.open(command, lines.append, seconds=1.0):
            pass
    assert problem in str(raised.value)
    assert ended(int(lines[1]))


@pytest.mark.parametrize("health", ["{}", '{"instance_id": "another"}'])
async def test_another_process_on_the_port_is_not_taken_for_it(write: Write, health: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(health)))
            self.end_headers()
            self.wfile.write(health.encode())

        def log_message(self, *arguments: object) -> None:
            return

    other = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    Thread(target=other.serve_forever, daemon=True).start()
    # This server doesn't get as far as the port.
    command = write("import time; time.sleep(3600)")
    port = other.server_address[1]
    try:
        with pytest.raises(RepositoryError, match=f"another process answers on port {port}"):
            async with ServerProcess.open(command, lambda line: None, seconds=1.0, port=port):
                pass
    finally:
        other.shutdown()
        other.server_close()


async def test_a_server_that_ignores_sigterm_is_killed_with_its_children(write: Write) -> None:
    lines: list[str] = []
    command = write(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        "print(os.getpid(), child.pid, flush=True)"
    )
    async with ServerProcess.open(command, lines.append, grace=0.2) as running:
        pass
    assert running.ended == 128 + signal.SIGKILL
    assert all(eventually(lambda pid=pid: ended(int(pid))) for pid in lines[1].split())


async def test_the_end_of_a_server_is_seen(write: Write) -> None:
    lines: list[str] = []
    command = write("print(os.getpid(), flush=True)")
    async with ServerProcess.open(command, lines.append) as running:
        os.kill(int(lines[1]), signal.SIGKILL)
        with anyio.fail_after(30):
            assert await running.wait() == 128 + signal.SIGKILL


HOLDER = """
import asyncio, sys
from osmosis_ai.runtime.worker.workflows.server_process import ServerCommand, ServerProcess

async def main():
    command = ServerCommand(sys.executable, sys.argv[1], ".")
    async with ServerProcess.open(command, lambda line: print(line, flush=True)):
        print("healthy", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_it_ends_when_its_owner_is_killed(write: Write) -> None:
    command = write("print(os.getpid(), flush=True)")
    arguments = [sys.executable, "-c", HOLDER, command.entrypoint]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        shown = [owner.stdout.readline().strip() for _ in range(3)]
        assert shown[2] == "healthy"
        owner.kill()
    assert eventually(lambda: ended(int(shown[1])))


def test_its_variables_are_ours_and_no_proxy_comes_between(write: Write) -> None:
    given = {"VIRTUAL_ENV": "/venv", "PYTHONPATH": "/ours", "no_proxy": "internal", "_OSMOSIS_ROLLOUT_PORT": "1"}
    command = write()
    variables = command.environment(8123, "instance", given)
    assert variables["_OSMOSIS_ROLLOUT_PORT"] == variables["ROLLOUT_PORT"] == "8123"
    assert variables["_OSMOSIS_ROLLOUT_INSTANCE_ID"] == "instance"
    assert (variables["NO_PROXY"], variables["no_proxy"]) == ("127.0.0.1", "internal,127.0.0.1")
    # On our own interpreter, the server imports what we do.
    assert (variables["VIRTUAL_ENV"], variables["PYTHONPATH"]) == ("/venv", "/ours")
    declared = msgspec.structs.replace(command, python="/cache/environment/bin/python")
    assert not {"VIRTUAL_ENV", "PYTHONPATH"} & declared.environment(8123, "instance", given).keys()
