"""Rollouts as workspaces write them: raw HTTP to a streaming model, an exact-match grader; for SDK 0.3 and for 0.2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from workflows import CONTROLLER_KEY, MODEL_KEY, Streaming, finished, run, serving

from osmosis_ai.testing.endpoint import Request, text
from waiting import eventually

MAIN = """
import asyncio
import json
import os

import httpx
import uvicorn

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    ConcurrencyConfig,
    Grader,
    GraderContext,
    LocalBackend,
    get_rollout_context,
)
from osmosis_ai.rollout.server import create_rollout_server


class MultiplyConfig(AgentWorkflowConfig):
    temperature: float = 1.0


class MultiplyWorkflow(AgentWorkflow[MultiplyConfig]):
    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]):
        behaviour = (ctx.metadata or {}).get("behaviour")
        if behaviour == "crash":
            raise RuntimeError("the workflow crashed")
        if behaviour == "sleep":
            await asyncio.sleep(3600)
        if behaviour == "artifact":
            (ctx.artifacts_dir / "notes.txt").write_text("kept")
        rollout = get_rollout_context()
        content = ""
        async with httpx.AsyncClient(timeout=30) as client:
            request = {
                "model": "osmosis-rollout",
                "messages": ctx.prompt,
                "stream": True,
                "temperature": ctx.config.temperature,
            }
            headers = {"Authorization": f"Bearer {rollout.api_key}"}
            url = f"{rollout.chat_completions_url}/chat/completions"
            async with client.stream("POST", url, json=request, headers=headers) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                        content += delta.get("content") or ""
        return [*ctx.prompt, {"role": "assistant", "content": content}]


class ExactMatch(Grader):
    async def grade(self, ctx: GraderContext):
        if (ctx.metadata or {}).get("behaviour") == "remove":
            ctx.sample.remove_sample = True
            return
        ctx.set_reward(1.0 if ctx.sample.messages[-1]["content"] == ctx.label else 0.0)


config = MultiplyConfig(name="multiply", temperature=0.5, concurrency=ConcurrencyConfig(max_concurrent=8))
backend = LocalBackend(workflow=MultiplyWorkflow, workflow_config=config, grader=ExactMatch)
app = create_rollout_server(backend=backend)

if __name__ == "__main__":
    uvicorn.run(app, host="0.0.0.0", port=int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000")), log_level="warning")
"""

OLDER = """
import httpx

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    Grader,
    LocalBackend,
    RolloutSample,
    create_rollout_server,
    get_rollout_context,
)
from osmosis_ai.rollout.context import SampleSource


class Conversation(SampleSource):
    def __init__(self, messages):
        self.messages = messages

    async def get_sample(self, name):
        return RolloutSample(id=name, messages=self.messages)


class TwoTries(AgentWorkflow):
    async def run(self, ctx):
        rollout = get_rollout_context()
        for name in ("first", "second"):
            messages = list(ctx.prompt)
            rollout.register_sample_source(name, Conversation(messages))
            headers = {
                "Authorization": f"Bearer {rollout.api_key}",
                "x-rollout-id": rollout.rollout_id,
                "x-sample-id": name,
            }
            url = f"{rollout.chat_completions_url}/chat/completions"
            async with httpx.AsyncClient() as client:
                reply = await client.post(url, json={"model": "any", "messages": messages}, headers=headers)
            messages.append(reply.json()["choices"][0]["message"])
        return "done"


class ExactMatch(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.get_samples().items():
            ctx.set_sample_reward(name, float(sample.messages[-1]["content"] == ctx.label))


backend = LocalBackend(workflow=TwoTries, workflow_config=AgentWorkflowConfig(name="two"), grader=ExactMatch)
"""


def product(request: Request) -> Any:
    """Multiply the two numbers of the prompt."""
    left, right = request.messages[-1]["content"].split(" * ")
    return text(str(int(left) * int(right)))


@pytest.fixture(scope="module")
def model() -> Iterator[Streaming]:
    """A model that multiplies."""
    with Streaming(product).run_in_thread() as model:
        yield model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """The script's server, and the folder of its files."""
    folder = tmp_path_factory.mktemp("multiply")
    (folder / "main.py").write_text(MAIN, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "_OSMOSIS_ROLLOUT_PORT": str(port),
        "_OSMOSIS_ROLLOUT_ARTIFACT_ROOT": str(folder / "artifacts"),
        "_OSMOSIS_ROLLOUT_INSTANCE_ID": "this-one",
    }
    with subprocess.Popen([sys.executable, "main.py"], cwd=folder, env=environment) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
                eventually(lambda: is_up(client), lambda: f"the server ended with {process.poll()}")
                yield client, folder / "artifacts"
        finally:
            process.terminate()
    assert process.returncode in (0, -15)


def is_up(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/health").json()["instance_id"] == "this-one")
    except httpx.TransportError:
        return False


def row(model: Streaming, left: int, right: int, label: int, **fields: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Multiply."}, {"role": "user", "content": f"{left} * {right}"}]
    name = f"row-{left}-{right}-{label}-{fields.get('metadata', {}).get('behaviour', '')}"
    return {**model.request(name, initial_messages=prompt, label=str(label)), **fields}


def test_rows_are_graded(server: tuple[httpx.Client, Path], model: Streaming) -> None:
    client, artifacts = server
    right = run(client, row(model, 6, 7, 42))
    wrong = run(client, row(model, 6, 7, 41))
    assert [(body["status"], body["sample"]["reward"]) for body in (right, wrong)] == [
        ("success", 1.0),
        ("success", 0.0),
    ]
    assert right["sample"]["messages"][-1] == {"role": "assistant", "content": "42"}
    request = model.requests[-1]
    assert request.path == "/v1/rollouts/row-6-7-41-/chat/completions"
    assert request.headers["authorization"] == f"Bearer {MODEL_KEY}"
    assert request.body["temperature"] == 0.5
    trajectory = json.loads((artifacts / "row-6-7-42-" / "trajectory.json").read_bytes())
    assert [step["source"] for step in trajectory["steps"]] == ["system", "user", "agent"]


def test_rows_that_go_wrong(server: tuple[httpx.Client, Path], model: Streaming) -> None:
    client, artifacts = server
    crashed = run(client, row(model, 1, 1, 1, metadata={"behaviour": "crash"}))
    assert (crashed["status"], crashed["err_message"]) == ("failure", "the workflow crashed")
    line = 1 + MAIN.splitlines().index('            raise RuntimeError("the workflow crashed")')
    assert crashed["err_location"] == f"main.py:{line}"
    late = run(client, row(model, 1, 1, 1, metadata={"behaviour": "sleep"}, agent_timeout_sec=0.2))
    assert (late["err_category"], late["err_message"]) == ("timeout", "workflow exceeded its 0.2s deadline")
    removed = run(client, row(model, 1, 1, 1, metadata={"behaviour": "remove"}))
    assert (removed["status"], removed["sample"]["remove_sample"]) == ("success", True)
    kept = run(client, row(model, 1, 1, 1, metadata={"behaviour": "artifact"}))
    assert kept["sample"]["reward"] == 1.0
    assert (artifacts / kept["rollout_id"] / "artifacts" / "notes.txt").read_text(encoding="utf-8") == "kept"


def test_a_row_is_cancelled_while_others_go_on(server: tuple[httpx.Client, Path], model: Streaming) -> None:
    client, _ = server
    request = row(model, 2, 2, 4, metadata={"behaviour": "sleep"})
    admission = client.post("/rollout", json=request).json()
    assert run(client, row(model, 2, 2, 4))["sample"]["reward"] == 1.0
    client.post("/rollout/cancel", json={"ids": [request["rollout_id"]]})
    assert finished(client, admission)["status"] == "cancelled"


def test_a_rollout_for_the_older_sdk(model: Streaming) -> None:
    names: dict[str, Any] = {}
    exec(OLDER, names)
    sent = len(model.requests)
    with serving(names["backend"]) as client:
        request = row(model, 3, 4, 12)
        for key in ("llm_api_key", "chat_completions_url"):
            del request[key]
        base = {"chat_completions_url": model.root, "controller_api_key": CONTROLLER_KEY}
        urls = {f"{what}_callback_url": f"{model.root}/v1/{what}" for what in ("completion", "grader")}
        client.post("/rollout", json={**request, **base, **urls})
        completed, graded = model.wait_for_callbacks(2)
    assert (completed["status"], graded["status"]) == ("success", "success")
    assert {name: sample["reward"] for name, sample in graded["samples"].items()} == {"first": 1.0, "second": 1.0}
    calls = model.requests[sent:]
    assert [call.path for call in calls] == ["/chat/completions"] * 2
    assert [call.headers["x-sample-id"] for call in calls] == ["first", "second"]
    # That generation has one key for callbacks and the model.
    assert {call.headers["authorization"] for call in (*calls, *model.callbacks)} == {f"Bearer {CONTROLLER_KEY}"}
