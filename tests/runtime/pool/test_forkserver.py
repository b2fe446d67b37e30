"""The fork server: real processes, started from every kind of environment."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import psutil
import pytest

from commands import command_line
from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.code import LoadedCode
from osmosis_ai.runtime.forks import ForkLine
from osmosis_ai.runtime.pool.forkserver import open_line
from osmosis_ai.runtime.pool.local import ForkServerSpawner, LocalChannel, TemplateSpawner
from waiting import eventually

PATIENCE = 60.0
AGENT = """
import os

from osmosis_ai.rollout import RolloutAgentLoop, RolloutResult


class Agent(RolloutAgentLoop):
    name = "listed"

    def get_tools(self, request):
        if request.metadata.get("exit"):
            os._exit(7)
        return []

    async def run(self, ctx):
        return ctx.complete([])


agent = Agent()
"""


def write_agent(root: Path, text: str = AGENT) -> protocol.Boot:
    """Write an agent loop that lists its tools, or exits when a request says so."""
    (root / "listing.py").write_text(text, encoding="utf-8")
    source = AgentSource("listing", "agent", str(root), "listing.py")
    return protocol.Boot(*protocol.detach(protocol.WorkerSpec(str(root), protocol.LimitsConfig(), agent=source)))


class Heard:
    """The events of one worker that is being read."""

    def __init__(self, channel: LocalChannel) -> None:
        self.channel = channel
        self._events: asyncio.Queue[protocol.Event] = asyncio.Queue()

    def take(self, event: protocol.Event) -> None:
        self._events.put_nowait(event)

    async def next(self, kind: Any) -> Any:
        """The next event of a kind."""
        while not isinstance(event := await self._events.get(), kind):
            assert isinstance(event, (protocol.Beat, protocol.Acting)), event
        return event

    def list_tools(self, **metadata: bool) -> None:
        request = {"rollout_id": "a", "server_url": "http://localhost", "messages": [], "metadata": metadata}
        self.channel.send(protocol.ToolsJob("job", request))


@asynccontextmanager
async def worker(spawner: ForkServerSpawner | TemplateSpawner) -> AsyncIterator[Heard]:
    """Start a worker, and make sure that it has ended after the block."""
    channel = await spawner.spawn()
    heard = Heard(channel)
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(channel.read, heard.take)
            yield heard


async def works(boot: protocol.Boot, kind: type[ForkServerSpawner | TemplateSpawner] = ForkServerSpawner) -> bool:
    """Return True if a worker does its job; then end it."""
    spawner = kind(boot, LoadedCode(Path()))
    async with worker(spawner) as heard:
        ready = await heard.next(protocol.Ready)
        assert ready.agent == "listed"
        heard.list_tools()
        done = await heard.next(protocol.ToolsDone)
        heard.channel.send(protocol.Stop())
    # It ends with its whole group.
    assert heard.channel.ending == "killed by SIGKILL"
    await spawner.aclose()
    return done.error is None


@pytest.mark.parametrize("kind", [ForkServerSpawner, TemplateSpawner])
def test_a_worker_does_its_jobs_and_ends(kind: type[ForkServerSpawner | TemplateSpawner], tmp_path: Path) -> None:
    assert asyncio.run(works(write_agent(tmp_path), kind))


def test_a_worker_is_watched_without_a_descriptor_left(tmp_path: Path) -> None:
    async def test() -> None:
        spawner = ForkServerSpawner(write_agent(tmp_path), LoadedCode(Path()))
        async with worker(spawner) as watched:
            await watched.next(protocol.Ready)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                held = watched.channel.memory()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            watched.channel.kill()
        assert held == 0
        await spawner.aclose()

    asyncio.run(test())


@pytest.mark.parametrize("kind", [ForkServerSpawner, TemplateSpawner])
def test_how_a_worker_ended_is_known(kind: type[ForkServerSpawner | TemplateSpawner], tmp_path: Path) -> None:
    async def test() -> None:
        spawner = kind(write_agent(tmp_path), LoadedCode(Path()))
        async with worker(spawner) as exits:
            await exits.next(protocol.Ready)
            exits.list_tools(exit=True)
        assert exits.channel.ending == "exited with code 7"
        async with worker(spawner) as killed:
            await killed.next(protocol.Ready)
            assert killed.channel.memory() > 1 << 20
            killed.channel.kill()
        assert killed.channel.ending == "killed by SIGKILL"
        assert killed.channel.memory() == 0
        await spawner.aclose()

    asyncio.run(test())


@pytest.mark.parametrize("kind", [ForkServerSpawner, TemplateSpawner])
def test_a_worker_that_cannot_load_says_so(kind: type[ForkServerSpawner | TemplateSpawner], tmp_path: Path) -> None:
    async def test() -> None:
        spawner = kind(write_agent(tmp_path, "import nowhere_to_be_found"), LoadedCode(Path()))
        async with worker(spawner) as heard:
            failed = await heard.next(protocol.NotReady)
            assert "nowhere_to_be_found" in failed.message
        assert heard.channel.ending == "exited with code 0"
        await spawner.aclose()

    asyncio.run(test())


def test_many_start_while_others_end(tmp_path: Path) -> None:
    boot = write_agent(tmp_path, "raise SystemExit")

    async def one(spawner: ForkServerSpawner) -> str:
        async with worker(spawner) as heard:
            await heard.next(protocol.NotReady)
        return heard.channel.ending

    async def several() -> list[str]:
        spawner = ForkServerSpawner(boot, LoadedCode(Path()))
        ended = [await one(spawner) for _ in range(5)]
        await spawner.aclose()
        return ended

    async def test() -> None:
        assert await asyncio.gather(*(several() for _ in range(6))) == [["exited with code 0"] * 5] * 6

    asyncio.run(test())


def test_runs_in_several_threads_at_once(tmp_path: Path) -> None:
    boot = write_agent(tmp_path)
    worked = []
    threads = [Thread(target=lambda: worked.append(asyncio.run(works(boot)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert worked == [True] * 3


def test_a_fork_server_that_was_killed_is_started_again(tmp_path: Path) -> None:
    boot = write_agent(tmp_path)

    async def test() -> None:
        lost = ForkServerSpawner(boot, LoadedCode(Path()))
        async with worker(lost) as heard:
            await heard.next(protocol.Ready)
            (server,) = fork_servers(psutil.Process())
            server.kill()
        assert heard.channel.ending == "lost with its parent process"
        with pytest.raises(OSError, match="the fork server was lost"):
            await lost.spawn()
        await lost.aclose()
        assert await works(boot)

    asyncio.run(test())


def test_children_of_a_line_end_with_it(tmp_path: Path) -> None:
    boot = write_agent(tmp_path)

    async def test() -> None:
        line = ForkLine(*open_line(), "lost")
        channel = await LocalChannel.fork(line, boot)
        kept = ForkServerSpawner(boot, LoadedCode(Path()))
        async with worker(kept) as other:
            await other.next(protocol.Ready)
            await line.aclose()
            heard = Heard(channel)
            await channel.read(heard.take)
            other.list_tools()
            await other.next(protocol.ToolsDone)
            other.channel.kill()
        await kept.aclose()

    asyncio.run(test())


def test_what_a_worker_left_behind_ends_with_the_last_line(tmp_path: Path) -> None:
    leaves = f"""
import os
import time
from pathlib import Path

if os.fork() == 0:
    os.setsid()
    Path({str(tmp_path / "left")!r}).write_text(str(os.getpid()))
    time.sleep(3600)
{AGENT}"""
    boot = write_agent(tmp_path, leaves)

    async def test() -> None:
        spawner = ForkServerSpawner(boot, LoadedCode(Path()))
        async with worker(spawner) as heard:
            await heard.next(protocol.Ready)
            noted = tmp_path / "left"
            await anyio.to_thread.run_sync(eventually, lambda: noted.is_file() and noted.read_text(encoding="utf-8"))
            heard.list_tools(exit=True)
        left = psutil.Process(int(noted.read_text(encoding="utf-8")))
        await spawner.aclose()
        await anyio.to_thread.run_sync(left.wait, PATIENCE)

    asyncio.run(test())


PROGRAM = """
import asyncio
import multiprocessing
import sys
from pathlib import Path

from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.code import LoadedCode
from osmosis_ai.runtime.pool.local import ForkServerSpawner

boot = protocol.decode_boot(Path(sys.argv[1]).read_bytes())


async def main():
    spawner = ForkServerSpawner(boot, LoadedCode(Path()))
    channel = await spawner.spawn()

    def take(event):
        if isinstance(event, protocol.Ready):
            print(event.agent, flush=True)
            sys.stdin.read() if "wait" in sys.argv else channel.kill()

    await channel.read(take)
    await spawner.aclose()


# Unguarded, as in a notebook: whatever imported this module again would do it all again.
asyncio.run(main())
"""

SHADOWS = ["types", "random", "json", "logging", "typing", "asyncio", "anyio", "msgspec", "mcp", "osmosis_ai", "psutil"]


def program(tmp_path: Path) -> tuple[Path, list[str]]:
    """An unguarded script, in a folder where modules have the names of libraries."""
    root = tmp_path / "repo"
    work = tmp_path / "work"
    root.mkdir()
    work.mkdir()
    for name in SHADOWS:
        (work / f"{name}.py").write_text(f"raise SystemExit('{name} of the working directory')", encoding="utf-8")
    (tmp_path / "boot.json").write_bytes(protocol.encode(write_agent(root)))
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return work, [str(tmp_path / "program.py"), str(tmp_path / "boot.json")]


def test_modules_of_the_working_directory_are_left_alone(tmp_path: Path) -> None:
    work, arguments = program(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", *arguments],
        cwd=work,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("listed\n", "", 0)


OPTIONS = f"""
import sys
import helper
from pathlib import Path

found = f"{{sys.flags.optimize}} {{sys.warnoptions}} {{sys._xoptions}} {{helper.NAME}}"
Path(__file__).with_name("options").write_text(found)
{AGENT}"""


def test_the_interpreters_options_are_passed_on(tmp_path: Path) -> None:
    work, arguments = program(tmp_path)
    root = tmp_path / "repo"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "helper.py").write_text("NAME = 'helper'", encoding="utf-8")
    write_agent(root, OPTIONS)
    options = ["-O", "-W", "ignore::UserWarning", "-X", "utf8", "-X", "faulthandler"]
    done = subprocess.run(
        [sys.executable, *options, *arguments],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(hooks)},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("listed\n", "", 0)
    seen = (root / "options").read_text(encoding="utf-8")
    assert seen == "1 ['ignore::UserWarning'] {'utf8': True, 'faulthandler': True} helper"


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_left_of_a_program_that_was_killed(stopped: bool, tmp_path: Path) -> None:
    """This holds even if user code has stopped the fork server."""
    work, arguments = program(tmp_path)
    killed = subprocess.Popen(
        [sys.executable, *arguments, "wait"], cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"listed\n"
        below = psutil.Process(killed.pid).children(recursive=True)
        assert len(below) == 2
        if stopped:
            below[0].suspend()
        killed.kill()
    _, alive = psutil.wait_procs(below, PATIENCE)
    assert alive == []


def test_a_fork_of_this_process_has_a_fork_server_of_its_own(tmp_path: Path) -> None:
    boot = write_agent(tmp_path)
    assert asyncio.run(works(boot))
    (ours,) = fork_servers(psutil.Process())
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_work_in_child, (boot,)) == (True, 1)
    assert asyncio.run(works(boot))
    assert fork_servers(psutil.Process()) == [ours]


def _work_in_child(boot: protocol.Boot) -> tuple[bool, int]:
    return asyncio.run(works(boot)), len(fork_servers(psutil.Process()))


def fork_servers(process: psutil.Process) -> list[psutil.Process]:
    """List the fork servers of a process, but for that of sandboxes, which alone isn't in the working directory."""
    started = [child for child in process.children() if "worker.fork_server" in command_line(child)]
    return [child for child in started if child.cwd() != "/"]
