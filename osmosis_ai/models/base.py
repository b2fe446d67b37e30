"""The interface of models to the agent loop, and the parser of chat-completion replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from osmosis_ai.bounds import MAX_COUNT, MAX_DEPTH, count_of, too_deep
from osmosis_ai.errors import ModelError
from osmosis_ai.failures import FailureKind
from osmosis_ai.records import Completion, JsonObject, Message, Tool, Usage
from osmosis_ai.token_data import token_data

__all__ = ["ChatModel", "Listen", "StreamingModel", "error_kind", "parse_reply", "streamed"]


class ChatModel(Protocol):
    """A policy that continues a conversation and may call tools."""

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Request the next assistant message.

        Args:
            messages: The conversation so far, in the OpenAI chat format. Not modified.
            tools: The tools the model may call; may be empty.
            params: Sampling parameters of this call, which override the model's own; None removes one.

        Raises:
            ModelError: The request failed.
        """
        ...

    async def aclose(self) -> None:
        """Release connections. The model can't be used afterwards."""
        ...


Listen: TypeAlias = Callable[[JsonObject], Awaitable[None]]
"""Takes a choice of each chunk of a reply, as the endpoint sends it: `{"delta": …, "finish_reason": …}`."""


@runtime_checkable
class StreamingModel(ChatModel, Protocol):
    """A model whose replies can be heard while they come."""

    async def stream(
        self, messages: list[Message], tools: list[Tool], params: JsonObject, listen: Listen
    ) -> Completion:
        """Request the next assistant message as `complete` does, and pass on its parts, unless it comes as a whole.

        Once a part has been passed on, the request isn't repeated.
        """
        ...


async def streamed(
    model: ChatModel, messages: list[Message], tools: list[Tool], params: JsonObject, listen: Listen
) -> Completion:
    """Request the next assistant message; a model that can't stream passes nothing on."""
    if isinstance(model, StreamingModel):
        return await model.stream(messages, tools, params, listen)
    return await model.complete(messages, tools, params)


_KINDS: dict[int, FailureKind] = {
    **dict.fromkeys((401, 403), "auth"),
    # A POST to an address without this API often gives 405.
    **dict.fromkeys((404, 405), "not_found"),
    408: "timeout",
    429: "rate_limit",
}


def error_kind(status: int) -> FailureKind:
    """Return the `ModelError` kind for an HTTP status."""
    if status in _KINDS:
        return _KINDS[status]
    # Redirects aren't followed, so one means that the address is wrong.
    return "not_found" if 300 <= status < 400 else "overloaded" if status >= 500 else "bad_request"


def parse_reply(reply: Any, *, source: str, position: int, key: str | None = None) -> Completion:
    """Convert a decoded chat-completion reply to a `Completion`.

    Tool calls are normalized so that the conversation can continue: every call gets a unique id, and its arguments are
    text. Unknown fields are kept; null fields are dropped.

    Args:
        reply: The decoded JSON.
        source: The endpoint or model, for error messages.
        position: The number of messages in the request, used in ids for calls that have none.
        key: The API key, masked in errors.

    Raises:
        ModelError: The reply isn't a chat completion.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not choices and isinstance(reply, dict) and reply.get("error"):
        # Some gateways report the model's errors with status 200. Imported here because the command's own process never
        # calls a model.
        from osmosis_ai.http import describe_error

        text, _ = describe_error(msgspec.json.encode(reply), key)
        code = reply["error"].get("code") if isinstance(reply["error"], dict) else None
        if isinstance(code, int) and 400 <= code < 600:
            raise ModelError(f"{source} answered with error {code}: {text}", kind=error_kind(code), status=code)
        raise ModelError(f"{source} answered with an error: {text}", kind="bad_reply")
    if not isinstance(choices, list) or not choices:
        raise _bad_reply(source, "has an empty `choices`" if choices == [] else "has no `choices`")
    choice = choices[0]
    given = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(given, dict):
        raise _bad_reply(source, "has a choice without a `message`")
    if too_deep(given):
        raise _bad_reply(source, f"has a message nested more than {MAX_DEPTH} levels deep")

    message: Message = {name: value for name, value in given.items() if value is not None}
    message["role"] = "assistant"
    calls = message.pop("tool_calls", None)
    # The format that OpenAI had before tool calls; some gateways still answer in it.
    legacy = message.pop("function_call", None)
    if not calls and legacy:
        calls = [{"function": legacy}]
    if calls:
        message["tool_calls"] = _parse_calls(calls, source, position)
    # The format allows null content only beside tool calls; otherwise providers refuse it when sent back.
    message.setdefault("content", None if calls else "")

    finish_reason = choice.get("finish_reason")
    # A gateway may leave the reason out; the loop only needs to know whether tools are to be called.
    if finish_reason == "function_call" or not isinstance(finish_reason, str):
        finish_reason = "tool_calls" if calls else "stop"
    model = reply.get("model")
    # vLLM reports the ids of the reply in the choice, and those of the prompt beside the choices.
    ids = {name: choice.get(name, reply.get(name)) for name in ("prompt_token_ids", "token_ids")}
    tokens = token_data({"logprobs": choice.get("logprobs"), **ids})
    return Completion(
        message=message,
        finish_reason=finish_reason,
        usage=_parse_usage(reply.get("usage")),
        model=model if isinstance(model, str) else None,
        logprobs=tokens.logprobs,
        token_ids=tokens.token_ids,
        left_out=tokens.left_out,
    )


def _parse_calls(calls: object, source: str, position: int) -> list[JsonObject]:
    if not isinstance(calls, list):
        raise _bad_reply(source, "has `tool_calls` that aren't a list")
    used: set[str] = set()
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad_reply(source, "has a tool call without a function name")
        # Tool results are matched by id, so two calls must never share one.
        given = call.get("id")
        name = f"call_{position}_{index}" if given is None or given == "" else str(given)
        call_id, number = name, 2
        while call_id in used:
            call_id, number = f"{name}_{number}", number + 1
        used.add(call_id)
        arguments = function.get("arguments")
        # A call without arguments may come with null or empty text, which isn't JSON when sent back.
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = "{}"
        elif not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        parsed.append({**call, "id": call_id, "type": "function", "function": {**function, "arguments": arguments}})
    return parsed


def _parse_usage(usage: object) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    prompt, completion, total = (
        count_of(usage.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    return Usage(prompt, completion, total or min(prompt + completion, MAX_COUNT))


def _bad_reply(source: str, what: str) -> ModelError:
    return ModelError(f"{source} answered with a reply that {what}: not a chat completion", kind="bad_reply")
