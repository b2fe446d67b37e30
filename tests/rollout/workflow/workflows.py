"""Workflows, graders and the controller's side, for the tests of workflow rollouts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ExecutionBackend,
    ExecutionRequest,
    Grader,
    LocalBackend,
    RolloutSample,
    SampleSource,
    create_rollout_server,
)
from osmosis_ai.rollout.testing import serve_app
from osmosis_ai.testing.endpoint import Reply, Request, Script, ScriptedEndpoint, raw_json
from waiting import eventually

PROMPT = [{"role": "user", "content": "2 + 2"}]
ANSWER = [*PROMPT, {"role": "assistant", "content": "4"}]
MODEL_KEY = "model-key-0123456789"
CONTROLLER_KEY = "controller-key-0123456789"


def workflow_that(run: Callable[[Any], Any]) -> type[AgentWorkflow[AgentWorkflowConfig]]:
    """A workflow whose `run` awaits this function's result if it can be awaited, and returns it."""

    class Made(AgentWorkflow[AgentWorkflowConfig]):
        async def run(self, ctx: Any) -> Any:
            result = run(ctx)
            return await result if isinstance(result, Awaitable) else result

    return Made


def grader_that(grade: Callable[[Any], Any]) -> type[Grader]:
    """A grader whose `grade` awaits this function's result if it can be awaited."""

    class Made(Grader):
        async def grade(self, ctx: Any) -> Any:
            result = grade(ctx)
            return await result if isinstance(result, Awaitable) else result

    return Made


def raising(error: BaseException) -> Callable[[Any], Any]:
    """A function that raises an exception."""

    def function(_: Any) -> Any:
        raise error

    return function


Answering = workflow_that(lambda ctx: [*ctx.prompt, {"role": "assistant", "content": "4"}])
Exact = grader_that(lambda ctx: ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label)))


class Held(SampleSource):
    """A source that takes no name, as in SDK 0.3."""

    def __init__(self, messages: Sequence[Any] = ()) -> None:
        self.messages = messages

    async def get_sample(self) -> RolloutSample:  # type: ignore[override]
        return RolloutSample(messages=self.messages)


class Named(SampleSource):
    """A source that takes the name it was registered with, as in SDK 0.2."""

    async def get_sample(self, name: str) -> RolloutSample:  # type: ignore[override]
        return RolloutSample(id=name, messages=[{"role": "assistant", "content": name}])


def local(run: Any = None, grade: Any = Exact, **config: Any) -> LocalBackend:
    """A backend for a workflow and a grader, which may be given as functions."""
    workflow = Answering if run is None else run if isinstance(run, type) else workflow_that(run)
    grader = grade if grade is None or isinstance(grade, type) else grader_that(grade)
    return LocalBackend(workflow=workflow, grader=grader, **config)


def execution(**fields: Any) -> ExecutionRequest:
    return ExecutionRequest(**{"id": "r1", "prompt": PROMPT, "label": "4", **fields})


class Controller(ScriptedEndpoint):
    """The controller: it takes callbacks, and is the model at any address ending in `/chat/completions`.

    Args:
        script: The model's replies.
        answers: What callbacks are answered with, in order; then `{}`.
    """

    def __init__(self, script: Script | Sequence[Reply] = (), answers: Sequence[Reply] = ()) -> None:
        super().__init__(script)
        self.callbacks: list[Request] = []
        self._answers = list(answers)

    def reply_to(self, request: Request) -> Reply:
        if request.path.endswith("/chat/completions"):
            self.requests.append(request)
            return self._script(request)
        answer = self._answers.pop(0) if self._answers else raw_json({})
        self.callbacks.append(request)
        return answer

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def request(self, rollout_id: str = "r1", **fields: Any) -> dict[str, Any]:
        """The request of a controller that polls."""
        return {
            "rollout_id": rollout_id,
            "initial_messages": PROMPT,
            "label": "4",
            "chat_completions_url": f"{self.root}/v1/rollouts/{rollout_id}",
            "llm_api_key": MODEL_KEY,
            **fields,
        }

    def called_back(self, rollout_id: str = "r1", **fields: Any) -> dict[str, Any]:
        """The request of a controller that is called back, each rollout at addresses of its own."""
        urls = f"{self.root}/v1/rollouts/{rollout_id}"
        routes = {"completion_callback_url": f"{urls}/completion", "grader_callback_url": f"{urls}/grader"}
        return {**self.request(rollout_id), **routes, "controller_api_key": CONTROLLER_KEY, **fields}

    def called_back_by_id(self, rollout_id: str = "r1", **fields: Any) -> dict[str, Any]:
        """The request of a controller of SDK 0.2, which is called back at the same addresses for all rollouts."""
        request = self.request(rollout_id, chat_completions_url=self.root)
        del request["llm_api_key"]
        routes = {
            "completion_callback_url": f"{self.root}/v1/rollout/completed",
            "grader_callback_url": f"{self.root}/v1/grader/completed",
        }
        return {**request, **routes, "controller_api_key": CONTROLLER_KEY, **fields}

    def wait_for_callbacks(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many callbacks and return their bodies."""
        eventually(lambda: len(self.callbacks) >= count, lambda: f"{len(self.callbacks)} of {count} callbacks")
        return [request.body for request in self.callbacks]


class Streaming(Controller):
    """A controller whose model streams, as one chunk."""

    def reply_to(self, request: Request) -> Reply:
        reply = super().reply_to(request)
        if not (request.path.endswith("/chat/completions") and request.body.get("stream")):
            return reply
        whole = json.loads(reply.body)
        choice = whole["choices"][0]
        calls = [{**call, "index": n} for n, call in enumerate(choice["message"].get("tool_calls") or ())]
        delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        choices = [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]
        chunk = {**whole, "object": "chat.completion.chunk", "choices": choices}
        body = f": ping\n\ndata: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
        return Reply(body=body, content_type="text/event-stream")


@contextmanager
def serving(backend: ExecutionBackend, **options: Any) -> Iterator[httpx.Client]:
    """A rollout server on loopback, and a client for it."""
    app = create_rollout_server(backend=backend, configure_logging=False, **options)
    with serve_app(app) as url, httpx.Client(base_url=url, timeout=30.0) as client:
        yield client


def poll(client: httpx.Client, admission: dict[str, Any]) -> dict[str, Any]:
    """Poll once for a rollout."""
    headers = {"X-Osmosis-Rollout-Lease": admission["polling_lease_token"]}
    answer = client.get(f"/rollout/{admission['rollout_id']}/result", headers=headers)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def finished(client: httpx.Client, admission: dict[str, Any]) -> dict[str, Any]:
    """Poll until the rollout has ended."""
    while (body := poll(client, admission))["status"] in ("queued", "running", "grading"):
        pass
    return body


def run(client: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    """Start a rollout and poll until it has ended."""
    answer = client.post("/rollout", json=request)
    assert answer.status_code == 202, answer.text
    return finished(client, answer.json())
