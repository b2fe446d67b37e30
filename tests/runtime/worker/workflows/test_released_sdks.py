"""Workflows on the released SDKs themselves, in the environments they declare; agent frameworks also on our own SDK.

`make test-released` runs them. The environments are kept in the user's cache folder. Without Python 3.12 or a package
index, the tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from osmosis_ai.errors import RepositoryError
from osmosis_ai.models.base import Listen
from osmosis_ai.records import Completion, JsonObject, Usage
from osmosis_ai.runtime.worker.workflows.bridge import Bridge, ChatCall
from osmosis_ai.runtime.worker.workflows.callbacks import Ending
from osmosis_ai.runtime.worker.workflows.environments import prepare_environment
from osmosis_ai.runtime.worker.workflows.figures import CallFigures
from osmosis_ai.runtime.worker.workflows.listener import Listener
from osmosis_ai.runtime.worker.workflows.server_process import ServerCommand, ServerProcess
from osmosis_ai.runtime.worker.workflows.wire import Asked

pytestmark = [pytest.mark.anyio, pytest.mark.released]

VERSIONS = ("0.2.25", "0.3.2", "0.3.7")
"""One of each form of the protocol."""
NEWEST = VERSIONS[-1]
OWN = Path(__file__).parents[4]

# The newest has the agent frameworks, too, so that one environment serves all tests of it.
FRAMEWORKS = "server,strands,openai-agents"
DECLARATION = """
[project]
name = "rollout"
version = "0.1.0"
requires-python = ">=3.12,<3.13"
dependencies = ["osmosis-ai[{extras}]{version}", "httpx"]
"""
OF_CHECKOUT = f"""
[tool.uv.sources]
osmosis-ai = {{ path = "{OWN}", editable = true }}
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def declared(folder: Path, script: str, version: str) -> ServerCommand:
    """Return the command of a rollout server in the environment of a released version, or of this checkout (`own`)."""
    folder.mkdir()
    extras = FRAMEWORKS if version in ("own", NEWEST) else "server"
    bound, source = ("", OF_CHECKOUT) if version == "own" else (f"=={version}", "")
    declaration = DECLARATION.format(extras=extras, version=bound) + source
    (folder / "pyproject.toml").write_text(declaration, encoding="utf-8")
    shutil.copy(Path(__file__).with_name(script), folder / "main.py")
    try:
        # Compiling all of a framework's packages takes longer than importing those that are used.
        python = prepare_environment(
            folder, environ={**os.environ, "UV_PYTHON_DOWNLOADS": "never", "UV_COMPILE_BYTECODE": "0"}
        )
    except RepositoryError as error:
        pytest.skip(str(error))
    return ServerCommand(str(python), str(folder / "main.py"), str(folder.parent / "artifacts"))


class Driven(NamedTuple):
    """A running rollout server, what it printed and the model calls it made."""

    running: ServerProcess
    listener: Listener
    lines: list[str]
    calls: list[ChatCall]
    figures: CallFigures

    async def run(self, name: str, task: str, label: str | None = "42", seconds: float = 60.0) -> Ending:
        """Run a rollout. The model answers 42, after a call of the tool that it is given."""

        async def complete(call: ChatCall, listen: Listen | None) -> Completion:
            self.calls.append(call)
            message = {"role": "assistant", "content": "42"}
            if call.tools and call.messages[-1]["role"] == "user":
                function = {"name": call.tools[0]["function"]["name"], "arguments": '{"a": 20, "b": 22}'}
                message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
            completion = Completion(message, usage=Usage(7, 3, 10))
            self.figures.add(call.sample, completion)
            return completion

        answer = Bridge(complete).answer
        with self.listener.host(name, answer, None, self.figures.acknowledgement) as hosted:
            messages = [{"role": "user", "content": task}]
            asked = Asked(name, messages, hosted.url, hosted.key, seconds, 30.0, label)
            return await self.running.server.run(asked, hosted.callbacks)


@asynccontextmanager
async def driving(command: ServerCommand) -> AsyncIterator[Driven]:
    lines: list[str] = []
    listener = Listener()
    await listener.start()
    async with ServerProcess.open(command, lines.append, grace=1.0) as running:
        yield Driven(running, listener, lines, [], CallFigures("right"))
    await listener.aclose()


def trajectory(command: ServerCommand, rollout: str) -> JsonObject:
    written: JsonObject = json.loads(Path(command.artifacts, rollout, "trajectory.json").read_bytes())
    return written


def rewards(ending: Ending) -> list[float | None]:
    assert ending.trouble is None, ending.message
    return [sample.reward for sample in ending.samples.values()]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_workflow_runs_on_every_released_form(version: str, tmp_path: Path) -> None:
    command = declared(tmp_path / "raw", "raw_rollout.py", version)
    async with driving(command) as driven:
        assert rewards(await driven.run("right", "6 × 7?")) == [1.0]
        assert [len(call.messages) for call in driven.calls] == [1, 3]
        assert rewards(await driven.run("wrong", "6 × 7?", "43")) == [0.0]
        assert (await driven.run("ungraded", "6 × 7?", None)).trouble == "not_graded"
        raised = await driven.run("raised", "raise")
        assert (raised.trouble, raised.message) == ("workflow_failed", "the workflow broke")
        slow = await driven.run("slow", "sleep", seconds=0.2)
        assert slow.category == "timeout"
        assert slow.trouble in ("workflow_failed", "callback_timeout")
        assert driven.running.ended is None
    assert driven.running.ended is not None
    assert any("the workflow broke" in line for line in driven.lines)
    if version == "0.3.2":
        # It reads the figures of the model calls from the answers to its callbacks.
        assert trajectory(command, "right")["final_metrics"]["total_prompt_tokens"] == 14


@pytest.mark.parametrize("version", ["own", NEWEST])
async def test_agent_frameworks_run(version: str, tmp_path: Path) -> None:
    command = declared(tmp_path / "agents", "framework_rollout.py", version)
    async with driving(command) as driven:
        for framework in ("strands", "agents"):
            driven.calls.clear()
            assert rewards(await driven.run(framework, framework)) == [1.0], driven.lines
            asked, answered = driven.calls
            assert [tool["function"]["name"] for tool in asked.tools] == ["add"]
            result = answered.messages[-1]
            assert (result["role"], result["tool_call_id"]) == ("tool", "1")
            assert "42" in str(result["content"])
