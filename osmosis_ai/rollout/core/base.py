"""The base class of agent loops, `RolloutAgentLoop`, and their `RolloutContext`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import time
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from osmosis_ai.bounds import MAX_DEPTH, count_of, too_deep
from osmosis_ai.errors import MessagesRewrittenError, OsmosisRolloutError
from osmosis_ai.folders import private_file
from osmosis_ai.masking import Masker
from osmosis_ai.records import JsonObject, JsonValue, Message
from osmosis_ai.rollout import context
from osmosis_ai.rollout.core.schemas import OpenAIFunctionToolSchema, RolloutMetrics, RolloutRequest

__all__ = [
    "ChatClient",
    "CompletionsResult",
    "RolloutAgentLoop",
    "RolloutContext",
    "RolloutMetrics",
    "RolloutResult",
    "file_stem",
    "refuse_bytes",
]

logger = logging.getLogger(__name__)

MAX_FILE_NAME = 150
"""Characters of an id in a file name. With a digest and a suffix, the name stays below the usual limit of 255 bytes."""


@dataclasses.dataclass(frozen=True)
class CompletionsResult:
    """One model reply, as returned by `ctx.chat`.

    Attributes:
        message: The assistant message; append it to the conversation unchanged.
        token_ids: The reply's token ids, if the endpoint returned them.
        logprobs: The reply's log-probabilities, if the endpoint returned them.
        usage: `prompt_tokens`, `completion_tokens` and `total_tokens`, as far as known.
        finish_reason: `stop`, `length`, `tool_calls`, ….
    """

    message: JsonObject
    token_ids: Any = None
    logprobs: Any = None
    usage: JsonObject = dataclasses.field(default_factory=dict)
    finish_reason: str = "stop"

    @property
    def tool_calls(self) -> list[JsonObject]:
        """The tool calls of the message; empty if it has none."""
        return self.message.get("tool_calls") or []

    @property
    def has_tool_calls(self) -> bool:
        """True if the model calls tools."""
        return bool(self.tool_calls)

    @property
    def content(self) -> str:
        """The text of the message; empty if it has none."""
        return self.message.get("content") or ""


class ChatClient(Protocol):
    """The model behind a context: a trainer, or the model of a local run."""

    async def chat_completions(self, messages: list[Message], **params: JsonValue) -> CompletionsResult:
        """Request the next assistant message.

        Args:
            messages: The conversation so far. Not modified.
            params: Sampling parameters.
        """
        ...


@dataclasses.dataclass
class RolloutResult:
    """The result of a loop's `run`, created by `ctx.complete` and `ctx.error`."""

    status: Literal["COMPLETED", "ERROR"]
    final_messages: list[Message] = dataclasses.field(default_factory=list)
    finish_reason: str = "stop"
    error_message: str | None = None
    metrics: RolloutMetrics | None = None
    reward: float | None = None


if TYPE_CHECKING:
    _EitherKind = type
else:

    class _EitherKind(ABCMeta):
        """Lets `osmosis_ai.rollout.RolloutContext` also create a workflow's context, depending on the arguments."""

        def __call__(cls, *args, **kwargs):
            if cls is RolloutContext:
                # A workflow's context begins with its URL, an agent loop's with the request; without positional
                # arguments, the names tell which one is meant.
                fields = {field.name for field in dataclasses.fields(context.RolloutContext)}
                if isinstance(args[0], str) if args else kwargs.keys() <= fields:
                    return context.RolloutContext(*args, **kwargs)
            return super().__call__(*args, **kwargs)

        # Code that imports the name from the package must recognise contexts of both kinds.
        def __instancecheck__(cls, instance):
            is_workflows = cls is RolloutContext and isinstance(instance, context.RolloutContext)
            return is_workflows or super().__instancecheck__(instance)


class RolloutContext(metaclass=_EitherKind):
    """One rollout, as its loop sees it.

    Args:
        request: The trainer's request: initial messages, limits, metadata.
        tools: The tools the model may call, as returned by `get_tools`.
        llm: The model. Loops call it through `chat`, which also records metrics.
        debug_dir: The folder for `log_event`'s file; None for no file.
        allow_rewrites: True if `chat` accepts messages that differ from those sent before.

    Attributes:
        metrics: The rollout's metrics so far.
        conversation: The messages of the last model call, and its reply if there was one: the record of a rollout whose
            loop doesn't finish.
    """

    def __init__(
        self,
        request: RolloutRequest,
        tools: Sequence[OpenAIFunctionToolSchema | JsonObject],
        llm: ChatClient,
        *,
        debug_dir: Path | str | None = None,
        allow_rewrites: bool = False,
    ) -> None:
        self.request = request
        self.tools = list(tools)
        self.llm = llm
        self.metrics = RolloutMetrics()
        self.conversation: list[Message] = list(request.messages)
        self._debug_file = None if debug_dir is None else Path(debug_dir) / f"{file_stem(request.rollout_id)}.jsonl"
        self._sent: list[bytes] | None = None if allow_rewrites else []
        self._started = time.monotonic()

    async def chat(self, messages: list[Message], **params: JsonValue) -> CompletionsResult:
        """Ask the model for the next message.

        Args:
            messages: The whole conversation so far. It must begin with the messages of every earlier call, unchanged,
                because the model is trained on a single conversation.
            params: Sampling parameters, such as `**ctx.request.completion_params`.

        Raises:
            MessagesRewrittenError: Messages that were sent before are changed or missing.
            OsmosisRolloutError: A message contains bytes, or the trainer can't be reached or refuses.
        """
        # A copy, because the loop goes on appending to its list, and this one is the record of a rollout that fails.
        sent = list(messages)
        refuse_bytes(sent)
        if self._sent is not None:
            self._sent = _appended(self._sent, sent)
        self.conversation = sent
        started = time.monotonic()
        try:
            result = await self.llm.chat_completions(sent, **params)
        finally:
            # A failed call counts too.
            self.metrics.llm_latency_ms += (time.monotonic() - started) * 1000
            self.metrics.num_llm_calls += 1
        # A new list, because the client may keep the one above.
        self.conversation = [*sent, result.message]
        usage = result.usage or {}
        prompt, response = (count_of(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        self.metrics.prompt_tokens += prompt
        self.metrics.response_tokens += response
        self.metrics.max_context_tokens = max(self.metrics.max_context_tokens, prompt + response)
        return result

    def complete(
        self, final_messages: list[Message], finish_reason: str = "stop", reward: float | None = None
    ) -> RolloutResult:
        """Create the result of a completed rollout.

        Args:
            final_messages: The whole conversation.
            finish_reason: The reason for its end: `stop`, `length`, `max_turns`, ….
            reward: The loop's own score, if it has one.
        """
        return RolloutResult("COMPLETED", final_messages, finish_reason, metrics=self.final_metrics(), reward=reward)

    def error(self, message: str, final_messages: list[Message] | None = None) -> RolloutResult:
        """Create the result of a failed rollout.

        Args:
            message: The reason for the failure.
            final_messages: The conversation so far.
        """
        return RolloutResult("ERROR", final_messages or [], "error", message, self.final_metrics())

    def record_tool_call(self, latency_ms: float = 0.0) -> None:
        """Count a tool call in the metrics.

        Args:
            latency_ms: Its duration in milliseconds.
        """
        self.metrics.num_tool_calls += 1
        self.metrics.tool_latency_ms += latency_ms

    def log_event(self, event_type: str, **data: object) -> None:
        """Append a line to the rollout's debug file, if there is a debug folder.

        Args:
            event_type: The loop's own name for the event.
            data: Any values; those that JSON can't represent are written as their `str`.
        """
        if self._debug_file is None:
            return
        event = {"time": time.time(), "rollout_id": self.request.rollout_id, "event_type": event_type, **data}
        line = json.dumps(event, ensure_ascii=False, default=str).encode("utf-8", "replace")
        try:
            self._debug_file.parent.mkdir(parents=True, exist_ok=True)
            private_file(self._debug_file)
            with self._debug_file.open("ab") as file:
                # Loops log whole requests, with the trainer's key.
                file.write(Masker([self.request.api_key or ""]).encoded(line) + b"\n")
        except OSError as error:
            # A full disk must not cost the rollout that is being debugged.
            logger.warning("%s can't be written: %s", self._debug_file, error)
            self._debug_file = None

    def final_metrics(self) -> RolloutMetrics:
        """Return the metrics, with `total_latency_ms` up to now."""
        self.metrics.total_latency_ms = (time.monotonic() - self._started) * 1000
        return self.metrics


class RolloutAgentLoop(ABC):
    """An agent that calls the model, runs tools, and returns the conversation of a rollout.

    Subclasses set `name` and implement `get_tools` and `run`. One instance runs many rollouts concurrently, so keep a
    rollout's state in `run`, not on `self`.

    Example:
        class Echo(RolloutAgentLoop):
            name = "echo"

            def get_tools(self, request):
                return []

            async def run(self, ctx):
                messages = list(ctx.request.messages)
                reply = await ctx.chat(messages, **ctx.request.completion_params)
                return ctx.complete([*messages, reply.message])
    """

    name: str

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # An abstract base class of several loops needs no name.
        methods = (getattr(cls, name, None) for name in ("get_tools", "run"))
        # Asked of the methods, because ABCMeta sets `__abstractmethods__` only after this call.
        is_abstract = any(getattr(method, "__isabstractmethod__", False) for method in methods)
        if not is_abstract and getattr(cls, "name", None) is None:
            raise TypeError(
                f'{cls.__module__}.{cls.__qualname__} is an agent loop without a name: add `name = "…"` to the class'
            )

    @abstractmethod
    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        """Return the tools the model may call in this rollout.

        Called before the trainer gets its answer, so it must return quickly, and again when the rollout starts.

        Args:
            request: The requested rollout.
        """

    @abstractmethod
    async def run(self, ctx: RolloutContext) -> RolloutResult:
        """Run one rollout.

        Args:
            ctx: The rollout: its request, its tools, its model.

        Returns:
            `ctx.complete(messages)`, or `ctx.error(message)`.
        """

    def get_default_tools(self) -> list[OpenAIFunctionToolSchema]:
        """Return the tools for an empty request, used to check the loop and to show its tools."""
        return self.get_tools(RolloutRequest(rollout_id="default", server_url="http://localhost", messages=[]))


# Sorted, because a loop may rebuild an equal message with its keys in another order.
_encode = msgspec.json.Encoder(order="sorted").encode


def _appended(sent: list[bytes], messages: list[Message]) -> list[bytes]:
    # Digests, because a loop may change a message in place, and a kept reference would then equal itself.
    digests = [_digest(message, index) for index, message in enumerate(messages)]
    for index, before in enumerate(sent):
        if index >= len(digests):
            raise MessagesRewrittenError(
                f"messages are append-only: message {index} was sent before and is missing now "
                f"({len(sent)} were sent, these are {len(digests)})",
                index=index,
            )
        if digests[index] != before:
            role = messages[index].get("role")
            raise MessagesRewrittenError(
                f"messages are append-only: message {index} (role {role!r}) differs from what was sent before; "
                "pass the whole conversation, with new messages at its end (--allow-rewrites, or "
                "`create_app(…, allow_rewrites=True)`, takes it anyway)",
                index=index,
            )
    return digests


def refuse_bytes(messages: Sequence[object], start: int = 0) -> None:
    """Refuse messages with bytes, which would silently arrive as base64; `start` is the first one's index.

    Raises:
        OsmosisRolloutError: A message contains bytes, or contains itself; the error names the message.
    """
    for index, message in enumerate(messages, start):
        if too_deep(message):
            raise OsmosisRolloutError(f"message {index} is nested more than {MAX_DEPTH} levels deep")
        if _has_bytes(message):
            hint = "and messages are JSON text: decode them first (`.decode()`)"
            raise OsmosisRolloutError(f"message {index} holds bytes, {hint}")


def _has_bytes(value: object) -> bool:
    # A plain loop that skips strings, for speed: it checks every message before every model call.
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, bytes) or (not isinstance(inner, str) and _has_bytes(inner)):
                return True
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(not isinstance(inner, str) and _has_bytes(inner) for inner in value)
    return isinstance(value, (bytes, bytearray, memoryview))


def _digest(message: JsonObject, index: int) -> bytes:
    if not isinstance(message, dict):
        raise OsmosisRolloutError(f"message {index} must be a dict, not {type(message).__name__}")
    try:
        encoded = _encode(message)
    except UnicodeEncodeError:
        # A lone surrogate, from a tool that read bytes.
        encoded = json.dumps(message, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OsmosisRolloutError(f"message {index} can't be written as JSON: {error}") from error
    return hashlib.blake2b(encoded, digest_size=16).digest()


def file_stem(rollout_id: str) -> str:
    """Convert a rollout id to a file name without suffix, unique to the id."""
    # A leading dot would hide the file, or name another folder.
    safe = re.sub(r"[^\w.-]", "_", rollout_id, flags=re.ASCII).lstrip(".")[:MAX_FILE_NAME]
    if safe == rollout_id:
        return safe
    # Ids that differ only in characters replaced above must not share a file.
    digest = hashlib.blake2b(rollout_id.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{safe}-{digest}"
