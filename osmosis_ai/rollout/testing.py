"""Test doubles for agent loops: a trainer that plays a script, and a server for the application under test.

Both are real servers on loopback:

    async with TrainerDouble([tool_call("add", a=1, b=2), text("3")]) as trainer:
        response = await trainer.run(loop, "What is 1 + 2?")
    assert response.status == "COMPLETED"

Replies and faults are those of `osmosis_ai.testing`.
"""

from __future__ import annotations

import contextlib
import random
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import anyio.to_thread

from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.records import JsonObject, Message
from osmosis_ai.rollout.client import TrainerPool
from osmosis_ai.rollout.core.base import RolloutAgentLoop
from osmosis_ai.rollout.core.schemas import InitResponse, RolloutRequest, RolloutResponse
from osmosis_ai.rollout.runner import as_instance, run_loop
from osmosis_ai.rollout.settings import ClientSettings
from osmosis_ai.testing.endpoint import (
    Gate,
    Reply,
    Request,
    Script,
    ScriptedEndpoint,
    as_script,
    broken_json,
    by_turn,
    drop,
    hang,
    raw_json,
    status,
    text,
    tool_call,
    tool_calls,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp

__all__ = [
    "Gate",
    "Reply",
    "Request",
    "TrainerDouble",
    "broken_json",
    "by_turn",
    "drop",
    "hang",
    "raw_json",
    "serve_app",
    "status",
    "text",
    "tool_call",
    "tool_calls",
    "with_faults",
]

COMPLETED_PATH = "/v1/rollout/completed"

_ACCEPTED = raw_json({"status": "ok"})


def with_faults(script: Script | Sequence[Reply], rate: float, seed: int = 0) -> Script:
    """Make some of a script's requests fail: half with status 503, half with a dropped connection.

    A failing request consumes no reply of the script, so a client that retries gets the same reply.

    Args:
        script: As for `TrainerDouble`; a sequence answers 400 after its end.
        rate: The share of requests that fail, from 0 to 1.
        seed: Makes the choice repeatable for the same order of requests.
    """
    rng = random.Random(seed)  # noqa: S311  a repeatable choice, not a secret
    play = as_script(script, lambda: status(400, body={"error": {"message": "the script has no reply left"}}))

    def answer(request: Request) -> Reply:
        if rng.random() < rate:
            return status(503) if rng.random() < 0.5 else drop()
        return play(request)

    return answer


class TrainerDouble(ScriptedEndpoint):
    """A trainer on 127.0.0.1 that plays scripted replies to model calls and records the delivered results.

    Args:
        script: The replies to model calls: consumed in order, or a function of the request. `by_turn` gives every
            rollout the same replies, as concurrent rollouts need.
        completed: Replies to deliveries of results: consumed in order and then 200, or a function of the request. A
            delivery counts as accepted only if it is answered 200 in full.
        api_key: The key that the server must send; requests without it get a 401.

    Attributes:
        requests: Every model call, in order of arrival.
        deliveries: Every attempt to deliver a result, accepted or not.
        completions: The accepted results.
    """

    def __init__(
        self,
        script: Sequence[Reply] | Script = (),
        *,
        completed: Sequence[Reply] | Script = (),
        api_key: str | None = None,
        record: bool = True,
    ) -> None:
        # Nothing probes a trainer, so a "ping" is a model call like any other.
        super().__init__(script, api_key=api_key, probe=None, record=record)
        self.deliveries: list[Request] = []
        self.completions: list[RolloutResponse] = []
        self._acknowledge = as_script(completed, lambda: _ACCEPTED)

    @property
    def server_url(self) -> str:
        """The `server_url` for a RolloutRequest."""
        return f"http://127.0.0.1:{self.port}"

    def request(self, messages: str | list[Message], **fields: Any) -> RolloutRequest:
        """Create a request for a rollout against this trainer.

        Args:
            messages: The initial conversation, or only the user's message.
            fields: Any other field of RolloutRequest; `rollout_id` defaults to a new one.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        given = {"rollout_id": uuid.uuid4().hex, "server_url": self.server_url, "api_key": self._api_key, **fields}
        return RolloutRequest(messages=messages, **given)

    async def run(
        self,
        loop: RolloutAgentLoop | type[RolloutAgentLoop],
        request: RolloutRequest | str | list[JsonObject],
        *,
        seconds: float | None = 60.0,
        debug_dir: Path | None = None,
        allow_rewrites: bool = False,
        **fields: Any,
    ) -> RolloutResponse:
        """Run an agent loop once against this trainer, without a server between them.

        Args:
            loop: The agent loop, or its class.
            request: The rollout, or the messages for `request`.
            seconds: Time limit, None for none.
            debug_dir: The folder for the file of `ctx.log_event`.
            allow_rewrites: True to let the loop change messages it has sent.
            fields: As for `request`.

        Returns:
            The response that the server would deliver; a loop that fails gives one with status ERROR.
        """
        if not isinstance(request, RolloutRequest):
            request = self.request(request, **fields)
        async with TrainerPool(ClientSettings(retry_base_delay=0.01)) as pool:
            llm, instance = pool.client(request), as_instance(loop)
            options: dict[str, Any] = {"debug_dir": debug_dir, "allow_rewrites": allow_rewrites}
            return await run_loop(instance, request, llm, timeout=seconds, **options)

    async def start_rollout(self, url: str, request: RolloutRequest, *, api_key: str | None = None) -> InitResponse:
        """Ask a rollout server for a rollout.

        Args:
            url: The server's address.
            request: The rollout.
            api_key: The server's key.

        Raises:
            OsmosisRolloutError: The server didn't answer 202.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/rollout/init", json=request.model_dump(), headers=headers) as response,
        ):
            raw = await response.read()
            if response.status != 202:
                raise OsmosisRolloutError(f"{url} answered {response.status}: {raw.decode('utf-8', 'replace')}")
        return InitResponse.model_validate_json(raw)

    async def result(self, rollout_id: str, *, seconds: float = 30.0) -> RolloutResponse:
        """Wait for a rollout's result; raises TimeoutError if it doesn't arrive in time."""
        return await anyio.to_thread.run_sync(self.wait_for_completion, rollout_id, seconds)

    def wait_for_completion(self, rollout_id: str, timeout: float = 30.0) -> RolloutResponse:
        """Block the calling thread until a rollout's result is accepted; TimeoutError after `timeout` seconds."""

        def found() -> RolloutResponse | None:
            return next((done for done in self.completions if done.rollout_id == rollout_id), None)

        with self._arrived:
            result = self._arrived.wait_for(found, timeout)
        if result is None:
            raise TimeoutError(f"no result of rollout {rollout_id} arrived within {timeout:g} s")
        return result

    def wait_for_completions(self, count: int, timeout: float = 30.0) -> None:
        """Block the calling thread until `count` results are accepted; TimeoutError after `timeout` seconds."""
        self._wait_for(self.completions, count, "results", timeout)

    def wait_for_deliveries(self, count: int, timeout: float = 30.0) -> None:
        """Do the same as `wait_for_completions` for attempts to deliver a result, accepted or not."""
        self._wait_for(self.deliveries, count, "deliveries", timeout)

    def reply_to(self, request: Request) -> Reply:
        """Return the reply to a request: deliveries are handled here, all others by the script."""
        if request.path.rstrip("/") != COMPLETED_PATH:
            return super().reply_to(request)
        if request.method != "POST":
            return status(405)
        reply = self.refusal(request) or self._acknowledge(request)
        with self._arrived:
            self.deliveries.append(request)
            if reply.status == 200 and reply.action == "send":
                self.completions.append(RolloutResponse.model_validate_json(request.raw))
            self._arrived.notify_all()
        return reply


@contextlib.contextmanager
def serve_app(app: ASGIApp) -> Iterator[str]:
    """Serve an ASGI application on a free port of 127.0.0.1 from its own thread, and stop it gracefully.

    Args:
        app: The application, for example from `create_app`.

    Yields:
        Its address, `http://127.0.0.1:PORT`.

    Raises:
        OSError: It could not start; the log says why.
    """
    import uvicorn

    from osmosis_ai.rollout.server.serve import address_of, open_socket

    listener = open_socket("127.0.0.1", 0)
    url = address_of(listener)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],), name="served-app", daemon=True)
    thread.start()
    try:
        # The socket already listens, so this blocks until the application answers; any answer will do.
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/health", timeout=30.0).close()  # noqa: S310  our own address
        yield url
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
