"""Agent loops and small helpers for the tests of `osmosis_ai.rollout`."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from osmosis_ai.rollout import (
    RolloutAgentLoop,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
    create_app,
    create_tool_result,
    execute_tool_calls,
    get_tool_call_info,
    serialize_tool_result,
)
from osmosis_ai.rollout.testing import TrainerDouble, serve_app

KEY = "server-key-0123456789"
TRAINER_KEY = "trainer-key-0123456789"
PATIENCE = 30.0
"""Seconds after which a condition that should come true never will."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"$ref": "#/$defs/whole"}},
            "required": ["a", "b"],
            "$defs": {"whole": {"type": "integer"}},
        },
    },
}


class Adding(RolloutAgentLoop):
    """A loop that adds until the model makes no more calls; it counts the calls of `get_tools`."""

    name = "adding"

    def __init__(self) -> None:
        self.asked_for_tools = 0
        self.lock = threading.Lock()

    def get_tools(self, request: RolloutRequest) -> list[Any]:
        with self.lock:
            self.asked_for_tools += 1
        return [ADD]

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        for _ in range(ctx.request.max_turns):
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(result.message)
            if not result.has_tool_calls:
                return ctx.complete(messages, finish_reason=result.finish_reason, reward=1.0)
            messages.extend(await execute_tool_calls(result.tool_calls, self.add))
            ctx.record_tool_call(latency_ms=2.0)
        return ctx.complete(messages, finish_reason="max_turns")

    async def add(self, call: dict[str, Any]) -> dict[str, Any]:
        call_id, _, arguments = get_tool_call_info(call)
        return create_tool_result(call_id, serialize_tool_result(arguments["a"] + arguments["b"]))


def loop_that(run: Callable[[RolloutContext], Any], tools: Any = ()) -> RolloutAgentLoop:
    """An agent loop whose `run` awaits this function's result if it can be awaited, and returns it."""

    class Made(RolloutAgentLoop):
        name = "made"

        def get_tools(self, request: RolloutRequest) -> Any:
            return tools() if callable(tools) else list(tools)

        async def run(self, ctx: RolloutContext) -> Any:
            result = run(ctx)
            return await result if hasattr(result, "__await__") else result

    return Made()


class Answer(NamedTuple):
    """A server's answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(
    url: str,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    key: str | None = KEY,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Make one request over its own connection; a body other than bytes is sent as JSON."""
    headers = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key is not None else {})}
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers)
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def init(url: str, request: RolloutRequest | dict[str, Any], **options: Any) -> Answer:
    """Request a rollout from a server."""
    body = request.model_dump() if isinstance(request, RolloutRequest) else request
    return call(url, "/v1/rollout/init", body, **options)


def health(url: str) -> dict[str, Any]:
    """The server's figures."""
    return call(url, "/health", key=None).json


def until(found: Callable[[], Any], what: str) -> Any:
    """Poll until there is a value, and return it."""
    deadline = monotonic() + PATIENCE
    while monotonic() < deadline:
        if value := found():
            return value
    raise AssertionError(f"never came true: {what}")


@contextmanager
def serving(loop: RolloutAgentLoop, trainer: TrainerDouble, **options: Any) -> Iterator[tuple[str, TrainerDouble]]:
    """Run a server for a loop and a trainer, each in its own thread; undelivered results are discarded."""
    with tempfile.TemporaryDirectory() as folder, trainer.run_in_thread():
        options = {"api_key": KEY, "undelivered_dir": folder, **options}
        with serve_app(create_app(loop, **options)) as url:
            yield url, trainer
