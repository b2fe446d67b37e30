"""A workflow on the released SDKs themselves, one of each form of the protocol, in the environments they declare.

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

import pytest

from osmosis_ai.errors import RepositoryError
from osmosis_ai.models.base import Listen
from osmosis_ai.records import Completion, Usage
from osmosis_ai.runtime.worker.workflows.bridge import Bridge, ChatCall
from osmosis_ai.runtime.worker.workflows.callbacks import Ending
from osmosis_ai.runtime.worker.workflows.environments import prepare_environment
from osmosis_ai.runtime.worker.workflows.figures import CallFigures
from osmosis_ai.runtime.worker.workflows.listener import Listener
from osmosis_ai.runtime.worker.workflows.server_process import ServerCommand, ServerProcess
from osmosis_ai.runtime.worker.workflows.wire import Asked

VERSIONS = ("0.2.25", "0.3.2", "0.3.7")
pytestmark = [pytest.mark.anyio, pytest.mark.released]

DECLARATION = """
[project]
name = "raw"
version = "0.1.0"
requires-python = ">=3.12,<3.13"
dependencies = ["osmosis-ai[server]=={version}", "httpx"]
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=VERSIONS)
def command(request: pytest.FixtureRequest, tmp_path: Path) -> ServerCommand:
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(DECLARATION.format(version=request.param), encoding="utf-8")
    shutil.copy(Path(__file__).with_name("raw_rollout.py"), folder / "main.py")
    try:
        python = prepare_environment(folder, environ={**os.environ, "UV_PYTHON_DOWNLOADS": "never"})
    except RepositoryError as error:
        pytest.skip(str(error))
    return ServerCommand(str(python), str(folder / "main.py"), str(tmp_path / "artifacts"))


def check_trajectory(command: ServerCommand, rollout: str) -> None:
    """Check that SDK 0.3.2, which reads the figures from the answers to its callbacks, wrote them into a file."""
    if "==0.3.2" in (command.folder / "pyproject.toml").read_text(encoding="utf-8"):
        trajectory = json.loads(Path(command.artifacts, rollout, "trajectory.json").read_bytes())
        assert trajectory["final_metrics"]["total_prompt_tokens"] == 14


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    await listener.start()
    yield listener
    await listener.aclose()


async def test_a_workflow_runs_on_every_released_form(command: ServerCommand) -> None:
    calls: list[ChatCall] = []
    lines: list[str] = []
    figures = CallFigures("right")

    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        calls.append(call)
        completion = Completion({"role": "assistant", "content": "42"}, usage=Usage(7, 3, 10))
        figures.add(call.sample, completion)
        return completion

    async def run(name: str, task: str, label: str | None = "42", seconds: float = 60.0) -> Ending:
        with listener.host(name, Bridge(complete).answer, None, figures.acknowledgement) as hosted:
            messages = [{"role": "user", "content": task}]
            asked = Asked(name, messages, hosted.url, hosted.key, seconds, 30.0, label)
            return await running.server.run(asked, hosted.callbacks)

    async with listening() as listener, ServerProcess.open(command, lines.append, grace=1.0) as running:
        right = await run("right", "6 × 7?")
        assert right.trouble is None
        assert [sample.reward for sample in right.samples.values()] == [1.0]
        assert [len(call.messages) for call in calls] == [1, 3]
        assert [sample.reward for sample in (await run("wrong", "6 × 7?", "43")).samples.values()] == [0.0]
        assert (await run("ungraded", "6 × 7?", None)).trouble == "not_graded"
        raised = await run("raised", "raise")
        assert (raised.trouble, raised.message) == ("workflow_failed", "the workflow broke")
        slow = await run("slow", "sleep", seconds=0.2)
        assert slow.category == "timeout"
        assert slow.trouble in ("workflow_failed", "callback_timeout")
        assert running.ended is None
    assert running.ended is not None
    check_trajectory(command, "right")
    assert any("the workflow broke" in line for line in lines)
