"""The client of a trainer: make model calls and deliver results."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from osmosis_ai.errors import (
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisTimeoutError,
    OsmosisTransportError,
    OsmosisValidationError,
)
from osmosis_ai.http import Answer, HttpClient, HttpError
from osmosis_ai.masking import mask
from osmosis_ai.records import JsonValue, Message
from osmosis_ai.retry import RetryPolicy, with_retries
from osmosis_ai.rollout.core.base import CompletionsResult, refuse_bytes
from osmosis_ai.rollout.core.schemas import CompletionsRequest, RolloutRequest, RolloutResponse
from osmosis_ai.rollout.settings import ClientSettings, client_settings
from osmosis_ai.wire_json import encode_json

__all__ = ["TrainerClient", "TrainerPool", "encode", "encode_messages"]

logger = logging.getLogger(__name__)

_DEFAULTS = {
    name: field.default
    for name, field in CompletionsRequest.model_fields.items()
    if not field.is_required() and field.default is not None
}


def encode(value: object) -> bytes:
    """Encode a value as JSON for the wire; raises OsmosisRolloutError."""
    try:
        return encode_json(value)
    except ValueError as error:
        raise OsmosisRolloutError(f"it can't be written as JSON: {error}") from error


def encode_messages(messages: Sequence[object], start: int = 0) -> bytes:
    """Encode messages as JSON; `start` is the first one's index. Raises OsmosisRolloutError, also if one has bytes."""
    refuse_bytes(messages, start)
    return encode(messages)


class TrainerPool:
    """One process's connections to trainers. Settings default to the environment's."""

    def __init__(self, settings: ClientSettings | None = None) -> None:
        self.settings = settings or client_settings()
        # Per read, so that the wait for a free connection doesn't count as the trainer's time.
        self.http = HttpClient(self.settings.timeout_seconds, per_read=True, connections=self.settings.max_connections)

    def client(self, request: RolloutRequest) -> TrainerClient:
        return TrainerClient(self, request.server_url, request.rollout_id, request.api_key)

    async def aclose(self) -> None:
        await self.http.aclose()

    async def __aenter__(self) -> TrainerPool:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class TrainerClient:
    """A client of the trainer for one rollout.

    Retries 5xx answers, timeouts and transport errors with exponential backoff and full jitter, but not 4xx answers.
    Never shows the bearer key.
    """

    def __init__(self, pool: TrainerPool, server_url: str, rollout_id: str, api_key: str | None = None) -> None:
        self._pool = pool
        self._base = server_url.rstrip("/")
        self._rollout_id = rollout_id
        self._api_key = api_key

    def __repr__(self) -> str:
        return f"TrainerClient(server_url={self._base!r}, rollout_id={self._rollout_id!r})"

    async def chat_completions(self, messages: list[Message], **params: JsonValue) -> CompletionsResult:
        """Ask the trainer for the next message.

        Args:
            messages: The whole conversation so far.
            params: Sampling parameters, which override the protocol's defaults; None removes one.

        Raises:
            OsmosisValidationError: The trainer refused (4xx).
            OsmosisServerError: It failed (5xx), or its answer isn't a completion.
            OsmosisTimeoutError: It didn't answer in time.
            OsmosisTransportError: It can't be reached, or dropped the connection.
            OsmosisRolloutError: The messages or parameters can't be written as JSON.
        """
        refuse_bytes(messages)
        chosen = {name: value for name, value in {**_DEFAULTS, **params}.items() if value is not None}
        try:
            body = encode({**chosen, "messages": messages, "rollout_id": self._rollout_id})
        except OsmosisRolloutError as error:
            raise OsmosisRolloutError(f"the model call can't be sent: {error}") from error
        return _result(await self._post(f"{self._base}/v1/chat/completions", body, self._pool.settings.max_retries))

    async def complete_rollout(self, response: RolloutResponse) -> None:
        """Deliver a finished rollout.

        Raises:
            OsmosisRolloutError: The trainer didn't accept it within the number of attempts in the settings.
        """
        retries = self._pool.settings.complete_rollout_retries
        await self._post(f"{self._base}/v1/rollout/completed", encode(response.model_dump()), retries)

    async def _post(self, url: str, body: bytes, retries: int) -> Answer:
        settings = self._pool.settings

        async def attempt(_: int) -> Answer:
            try:
                answer = await self._pool.http.post(url, body, key=self._api_key)
            except HttpError as error:
                raise self._translated(error) from error
            if 200 <= answer.status < 300:
                return answer
            kind = OsmosisServerError if answer.status >= 500 else OsmosisValidationError
            raise kind(answer.describe(self._api_key)[0], answer.status)

        def announce(error: OsmosisRolloutError, seconds: float) -> None:
            logger.info("rollout %r: %s; trying again in %.1f s", self._rollout_id, error, seconds)

        # Limit the number of attempts but not the total time: a result that isn't delivered is a lost rollout.
        policy = RetryPolicy(retries + 1, math.inf, settings.retry_base_delay, settings.retry_max_delay)
        return await with_retries(attempt, OsmosisRolloutError, policy, on_wait=announce)

    def _translated(self, error: HttpError) -> OsmosisRolloutError:
        text = mask(str(error), self._api_key)
        if error.problem in ("unsendable", "too_long"):
            # A retry would fail in the same way.
            return OsmosisValidationError(text, error.status or 400)
        return OsmosisTimeoutError(text) if error.problem == "timeout" else OsmosisTransportError(text)


def _result(answer: Answer) -> CompletionsResult:
    try:
        reply = answer.json()
    except HttpError as error:
        raise OsmosisServerError(str(error), 200) from error
    url = answer.url
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(reply, dict) or not isinstance(choice, dict) or not isinstance(message, dict):
        raise OsmosisServerError(f"{url} answered with a reply that has no `choices[0].message`", 200)
    message.setdefault("role", "assistant")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise OsmosisServerError(f"{url} answered with `tool_calls` that aren't a list of objects", 200)
    usage = reply.get("usage")
    finish_reason = choice.get("finish_reason")
    return CompletionsResult(
        message=message,
        # Trainers put them into the choice or beside the choices.
        token_ids=choice.get("token_ids", reply.get("token_ids")),
        logprobs=choice.get("logprobs", reply.get("logprobs")),
        usage=usage if isinstance(usage, dict) else {},
        finish_reason=finish_reason if isinstance(finish_reason, str) else "tool_calls" if calls else "stop",
    )
