"""Call a user's own endpoint (vLLM, SGLang, Ollama, …) directly with `POST /chat/completions`."""

from __future__ import annotations

import msgspec
from yarl import URL

from osmosis_ai.errors import ModelError
from osmosis_ai.failures import FailureKind
from osmosis_ai.http import MAX_REPLY_BYTES, Answer, HttpClient, HttpError, HttpProblem, retry_after
from osmosis_ai.models.base import Listen, error_kind, parse_reply
from osmosis_ai.models.host import RemoteEngine
from osmosis_ai.models.streaming import StreamedReply, data_of
from osmosis_ai.records import Completion, JsonObject, JsonValue, Message, ModelSpec, Tool
from osmosis_ai.wire_json import encode_json

__all__ = ["ENGINE", "EndpointClient", "OpenAICompatibleModel"]

MODELS_TIMEOUT = 5.0
"""Seconds for the list of models, which only improves an error message."""
LISTED_MODELS = 10

_KINDS: dict[HttpProblem, FailureKind] = {
    "timeout": "timeout",
    "refused": "refused",
    "dropped": "dropped",
    "unsendable": "bad_request",
}


class EndpointClient:
    """The client of one address of an OpenAI-compatible endpoint."""

    path: str

    def __init__(self, spec: ModelSpec, *, max_reply_bytes: int = MAX_REPLY_BYTES) -> None:
        if spec.base_url is None:
            raise ValueError("an OpenAI-compatible model needs a base_url")
        self.spec = spec
        self._base_url = spec.base_url
        self.url = f"{self._base_url}{self.path}"
        self._target = URL(self.url)
        # The limiter, not the client, bounds the number of concurrent requests.
        self._http = HttpClient(spec.request_timeout, key=spec.api_key, max_reply_bytes=max_reply_bytes)

    async def ask(self, body: JsonObject) -> JsonValue:
        """Make one request, and return the decoded answer.

        Raises:
            ModelError: It failed. The message gives the URL, the status and the endpoint's error, without the key.
        """
        try:
            answer = await self._http.post(self._target, self._encoded(body))
            if answer.status != 200:
                raise self._refused(answer)
            return answer.json()
        except HttpError as error:
            raise _failed(error) from error

    async def aclose(self) -> None:
        await self._http.aclose()

    def _encoded(self, body: JsonObject) -> bytes:
        try:
            return encode_json(body)
        except ValueError as error:
            message = f"the request to {self.url} can't be written as JSON: {error}"
            raise ModelError(message, kind="bad_request") from error

    def _refused(self, answer: Answer) -> ModelError:
        message, code = answer.describe(self.spec.api_key)
        kind = error_kind(answer.status)
        # A success without the reply that was asked for, such as 202 or 204.
        if answer.status < 300:
            kind = "bad_reply"
        elif code == "insufficient_quota":
            # The status is 429, but the account is out of credit: waiting doesn't help.
            kind = "quota"
        return ModelError(message, kind=kind, status=answer.status, retry_after=retry_after(answer.headers))


class OpenAICompatibleModel(EndpointClient):
    """A model behind an OpenAI-compatible endpoint."""

    path = "/chat/completions"

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Make one request; raise ModelError."""
        reply = await self.ask(self._body(messages, tools, params))
        return parse_reply(reply, source=self.url, position=len(messages), key=self.spec.api_key)

    async def stream(
        self, messages: list[Message], tools: list[Tool], params: JsonObject, listen: Listen
    ) -> Completion:
        """Make one request as `complete` does, and pass on the reply's parts if the endpoint streams."""
        # Without this option, a streamed reply reports no tokens.
        asked = {**params, "stream": True, "stream_options": {"include_usage": True}}
        encoded = self._encoded(self._body(messages, tools, asked))
        parts = StreamedReply()

        async def take(line: bytes) -> None:
            if data := data_of(line):
                try:
                    chunk = msgspec.json.decode(data)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise HttpError("bad_json", f"{self.url} streamed broken JSON ({error})", 200) from error
                for choice in parts.add(chunk):
                    await listen(choice)

        try:
            answer = await self._http.lines(self._target, encoded, take)
            if answer.status != 200:
                raise self._refused(answer)
            # An endpoint that can't stream answers as a whole.
            reply = answer.json() if answer.body else parts.error or parts.reply()
            if not answer.body and parts.error is None and not parts.finished:
                raise HttpError("dropped", f"{self.url} dropped the connection: the stream has no end", 200)
        except HttpError as error:
            raise _failed(error) from error
        return parse_reply(reply, source=self.url, position=len(messages), key=self.spec.api_key)

    async def served_models(self) -> list[str]:
        """Return the model names that the endpoint lists at `/models`, for an error message; empty if it lists none."""
        try:
            reply = (await self._http.get(f"{self._base_url}/models", seconds=MODELS_TIMEOUT)).json()
        except HttpError:
            return []
        items = reply.get("data") if isinstance(reply, dict) else None
        names = [item.get("id") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
        return [name for name in names if isinstance(name, str)]

    def _body(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> JsonObject:
        body = {**self.spec.params, **params, "model": self.spec.model, "messages": messages}
        if tools:
            body["tools"] = tools
        # A None removes a parameter. Usually there is none, and the body is sent without another copy.
        if None in body.values():
            body = {name: value for name, value in body.items() if value is not None}
        return body


def _failed(error: HttpError) -> ModelError:
    return ModelError(str(error), kind=_KINDS.get(error.problem, "bad_reply"), status=error.status)


class _Engine(RemoteEngine):
    def client(self, spec: ModelSpec) -> OpenAICompatibleModel:
        return OpenAICompatibleModel(spec)

    def price_known(self, spec: ModelSpec) -> bool:
        return False

    async def hint(self, spec: ModelSpec, kind: FailureKind) -> str:
        if kind == "auth":
            if spec.api_key:
                return "Pass another key with --api-key or OSMOSIS_API_KEY."
            return "Pass a key with --api-key or OSMOSIS_API_KEY (OPENAI_API_KEY is sent to OpenAI only)."
        if kind in ("not_found", "unknown_model"):
            # A separate client, because the host's retries.
            client = OpenAICompatibleModel(spec)
            try:
                names = await client.served_models()
            finally:
                await client.aclose()
            if spec.model in names:
                return f"Check --base-url: {spec.model!r} is listed at {spec.base_url}/models."
            if names:
                more = ", …" if len(names) > LISTED_MODELS else ""
                return f"Pass one of its models with --model: {', '.join(names[:LISTED_MODELS])}{more}."
            return f"Check --base-url (usually it ends in /v1) and --model {spec.model}."
        return {
            "refused": "Start the endpoint, or check --base-url.",
            "timeout": "Check that the endpoint is up, or raise --request-timeout.",
            "bad_reply": "Check --base-url (usually it ends in /v1).",
            "quota": "Check the account behind the key.",
        }.get(kind, "Check the endpoint's own log, or try again later.")


ENGINE = _Engine()
