"""Every backend opens a pool with the same behaviour."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.errors import StartError
from osmosis_ai.records import ModelSpec, Row
from osmosis_ai.runtime.pool.backends import BACKENDS, open_pool
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.protocol import LimitsConfig, WorkerSpec

pytestmark = pytest.mark.anyio

AGENT = """
import os

from osmosis_ai.rollout import RolloutAgentLoop


class Agent(RolloutAgentLoop):
    name = os.environ.get("NAME_OF_THE_AGENT", "unnamed")

    def get_tools(self, request):
        return []

    async def run(self, ctx):
        print("running")
        result = await ctx.chat(ctx.request.messages)
        return ctx.complete([*ctx.request.messages, result.message])


agent = Agent()
"""


def write_agent(root: Path, text: str = AGENT) -> WorkerSpec:
    root.mkdir(exist_ok=True)
    (root / "naming.py").write_text(text, encoding="utf-8")
    policies = {"policy": ModelSpec("offline/oracle", "offline", "offline/oracle")}
    source = AgentSource("naming", "agent", str(root), "naming.py")
    return WorkerSpec(str(root), LimitsConfig(), agent=source, policies=policies, batch_size=2)


async def test_workers_have_the_environment_of_now(tmp_path: Path) -> None:
    spec = write_agent(tmp_path)
    names = []
    with anyio.fail_after(60):
        for name in ("first", "second", None):
            if name is None:
                del os.environ["NAME_OF_THE_AGENT"]
            else:
                os.environ["NAME_OF_THE_AGENT"] = name
            async with open_pool(spec, PoolOptions()) as pool:
                names.append(pool.loaded.agent)
        async with open_pool(spec, PoolOptions(environ={"NAME_OF_THE_AGENT": "given"})) as pool:
            names.append(pool.loaded.agent)
    assert names == ["first", "second", "unnamed", "given"]


PROGRAM = """
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, {tests!r})
from test_backends import ROW, write_agent

from osmosis_ai.runtime.pool.backends import open_pool
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.protocol import RolloutJob


async def main() -> None:
    spec = write_agent(Path({root!r}))
    async with open_pool(spec, PoolOptions(workers={workers})) as pool:
        await pool.probe("policy", price=False)
        heard = []
        job = RolloutJob("a", ROW, 0, "policy")
        rollout = await pool.rollout(job, lambda event: heard.append(type(event).__name__))
        inspected = await pool.inspect()
        tools = await pool.tools({{"rollout_id": "a", "server_url": "http://localhost", "messages": []}})
    print(rollout.messages[-1]["content"], rollout.failure, heard, inspected.name, tools.tools, pool.mixed)


asyncio.run(main())
"""

ROW = Row(0, "row", "Be good.", "6 * 7?", "42")


@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - {"ray"}))  # which has `make test-ray`
def test_a_backend_runs_rollouts(backend: str, tmp_path: Path) -> None:
    workers = {"inline": 0, "local": 1}[backend]
    assert PoolOptions(workers=workers).backend == backend
    # In a process of its own: an inline worker changes the process that it is in.
    program = PROGRAM.format(tests=str(Path(__file__).parent), root=str(tmp_path / "repo"), workers=workers)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=60)
    heard = ["Acting", "Asked", "TurnDone", "Acting"]
    assert done.stdout == f"42 None {heard} unnamed [] False\n", done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_cannot_be_loaded_is_an_error_with_its_place(backend: str, tmp_path: Path) -> None:
    spec = write_agent(tmp_path, "raise ValueError('not today')")
    here = Path.cwd()
    try:
        with anyio.fail_after(60), pytest.raises(StartError, match=r"naming\.py:1: .*not today"):
            async with open_pool(spec, PoolOptions(workers=0 if backend == "inline" else 1)):
                raise AssertionError
    finally:
        os.chdir(here)
