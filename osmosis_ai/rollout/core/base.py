"""What an agent loop is, and what it may use: `RolloutAgentLoop` and its `RolloutContext`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from osmosis_ai.errors import MessagesRewrittenError, OsmosisRolloutError
from osmosis_ai.records import JsonObject, JsonValue, Message
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
"""Characters; with a digest and an ending it stays below the 255 bytes of usual file systems."""


@dataclasses.dataclass(frozen=True)
class CompletionsResult:
    """One model reply, as `ctx.chat` gives it.

    Attributes:
        message: The assistant message: append it to the conversation as it is.
        token_ids: The reply's token ids, if the endpoint gave them.
        logprobs: The reply's log-probabilities, if the endpoint gave them.
        usage: `prompt_tokens`, `completion_tokens`, `total_tokens`, as far as known.
        finish_reason: `stop`, `length`, `tool_calls`, ….
    """

    message: JsonObject
    token_ids: Any = None
    logprobs: Any = None
    usage: JsonObject = dataclasses.field(default_factory=dict)
    finish_reason: str = "stop"

    @property
    def tool_calls(self) -> list[JsonObject]:
        """The tool calls of the message; empty when it has none."""
        return self.message.get("tool_calls") or []

    @property
    def has_tool_calls(self) -> bool:
        """Whether the model asks for tools."""
        return bool(self.tool_calls)

    @property
    def content(self) -> str:
        """The text of the message; empty when it has none."""
        return self.message.get("content") or ""


class ChatClient(Protocol):
    """The model behind a context: a trainer, or the model of a local run."""

    async def chat_completions(self, messages: list[Message], **params: JsonValue) -> CompletionsResult:
        """The next assistant message.

        Args:
            messages: The conversation so far. Not changed.
            params: Sampling parameters.
        """
        ...


@dataclasses.dataclass
class RolloutResult:
    """What a loop's `run` returns; made by `ctx.complete` and `ctx.error`."""

    status: Literal["COMPLETED", "ERROR"]
    final_messages: list[Message] = dataclasses.field(default_factory=list)
    finish_reason: str = "stop"
    error_message: str | None = None
    metrics: RolloutMetrics | None = None
    reward: float | None = None


class RolloutContext:
    """One rollout, as its loop sees it.

    Args:
        request: What is asked for: the messages to begin with, limits, metadata.
        tools: The tools the model may call, as `get_tools` gave them.
        llm: The model. Loops ask it by `chat`, which also measures.
        debug_dir: The folder for `log_event`'s file; None for no file.
        allow_rewrites: Whether `chat` takes messages that differ from those sent before.

    Attributes:
        metrics: What the rollout took so far.
        conversation: The messages of the last model call, and its reply if it came: what is there of a rollout whose
            loop doesn't come to its end.
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
            messages: The whole conversation so far. It begins with the messages of every earlier call, unchanged: what
                the model is trained on is one conversation.
            params: Sampling parameters, such as `**ctx.request.completion_params`.

        Raises:
            MessagesRewrittenError: Messages that were sent before are changed or left out.
            OsmosisRolloutError: A message holds bytes, or the trainer can't be asked, or refuses.
        """
        sent = list(messages)
        refuse_bytes(sent)
        if self._sent is not None:
            self._sent = _appended(self._sent, sent)
        self.conversation = sent
        started = time.monotonic()
        try:
            result = await self.llm.chat_completions(sent, **params)
        finally:
            self.metrics.llm_latency_ms += (time.monotonic() - started) * 1000
            self.metrics.num_llm_calls += 1
        # A copy: the loop may go on with the message in hand, and the list above is the client's to keep.
        self.conversation = [*sent, result.message]
        usage = result.usage or {}
        counts = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        prompt, response = (count if isinstance(count, int) else 0 for count in counts)
        self.metrics.prompt_tokens += prompt
        self.metrics.response_tokens += response
        self.metrics.max_context_tokens = max(self.metrics.max_context_tokens, prompt + response)
        return result

    def complete(
        self, final_messages: list[Message], finish_reason: str = "stop", reward: float | None = None
    ) -> RolloutResult:
        """The result of a rollout that came to its end.

        Args:
            final_messages: The whole conversation.
            finish_reason: Why it ended: `stop`, `length`, `max_turns`, ….
            reward: The loop's own score of it, if it has one.
        """
        return RolloutResult("COMPLETED", final_messages, finish_reason, metrics=self.final_metrics(), reward=reward)

    def error(self, message: str, final_messages: list[Message] | None = None) -> RolloutResult:
        """The result of a rollout that failed.

        Args:
            message: What went wrong.
            final_messages: The conversation as far as it came.
        """
        return RolloutResult("ERROR", final_messages or [], "error", message, self.final_metrics())

    def record_tool_call(self, latency_ms: float = 0.0) -> None:
        """Count a tool call in the metrics.

        Args:
            latency_ms: How long it took, in milliseconds.
        """
        self.metrics.num_tool_calls += 1
        self.metrics.tool_latency_ms += latency_ms

    def log_event(self, event_type: str, **data: object) -> None:
        """Append a line to the rollout's debug file; does nothing when there is no debug directory.

        Args:
            event_type: What happened, in the words of the loop.
            data: Anything; what JSON doesn't know goes in as its `str`.
        """
        if self._debug_file is None:
            return
        event = {"time": time.time(), "rollout_id": self.request.rollout_id, "event_type": event_type, **data}
        line = json.dumps(event, ensure_ascii=False, default=str)
        if self.request.api_key:
            line = line.replace(json.dumps(self.request.api_key, ensure_ascii=False)[1:-1], "***")
        try:
            self._debug_file.parent.mkdir(parents=True, exist_ok=True)
            with self._debug_file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
        except OSError as error:
            # A full disk must not cost the rollout that is being debugged.
            logger.warning("%s can't be written: %s", self._debug_file, error)
            self._debug_file = None

    def final_metrics(self) -> RolloutMetrics:
        """The metrics, with `total_latency_ms` up to now."""
        self.metrics.total_latency_ms = (time.monotonic() - self._started) * 1000
        return self.metrics


class RolloutAgentLoop(ABC):
    """An agent: given a rollout's request, it asks the model, runs tools, and returns the conversation.

    Subclasses set `name` and write `get_tools` and `run`. One instance runs many rollouts at a time, so what belongs to
    one rollout lives in `run`, not on `self`.
    """

    name: str

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A base class for several loops, which leaves a method to them, may leave them the name too.
        methods = (getattr(cls, name, None) for name in ("get_tools", "run"))
        is_abstract = any(getattr(method, "__isabstractmethod__", False) for method in methods)
        if not is_abstract and getattr(cls, "name", None) is None:
            raise TypeError(
                f'{cls.__module__}.{cls.__qualname__} is an agent loop without a name: add `name = "…"` to the class'
            )

    @abstractmethod
    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        """The tools the model may call in this rollout.

        Called before the trainer gets its answer, so it must return at once; and again when the rollout begins.

        Args:
            request: The rollout that is asked for.
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
        """The tools of a rollout about which nothing is known; used to check the loop, and to show its tools."""
        return self.get_tools(RolloutRequest(rollout_id="default", server_url="http://localhost", messages=[]))


_encode = msgspec.json.Encoder(order="sorted").encode


def _appended(sent: list[bytes], messages: list[Message]) -> list[bytes]:
    # Digests, because a loop can change a message in place: comparing with the very same dict would see nothing.
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
    """Do nothing for messages, from place `start` on, without bytes, which would silently arrive as base64.

    Raises:
        OsmosisRolloutError: One holds bytes, or itself; it is named by its place.
    """
    for index, message in enumerate(messages, start):
        try:
            found = _has_bytes(message)
        except RecursionError as error:
            raise OsmosisRolloutError(f"message {index} can't be written as JSON: it is nested too deeply") from error
        if found:
            hint = "and messages are JSON text: decode them first (`.decode()`)"
            raise OsmosisRolloutError(f"message {index} holds bytes, {hint}")


def _has_bytes(value: object) -> bool:
    # A plain loop that passes over texts: every message is looked at before every model call.
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
    """A rollout id as a file's name, without ending; different for different ids."""
    safe = re.sub(r"[^\w.-]", "_", rollout_id, flags=re.ASCII).lstrip(".")[:MAX_FILE_NAME]
    if safe == rollout_id:
        return safe
    # Two ids that differ only in what a file name can't hold must not share a file.
    digest = hashlib.blake2b(rollout_id.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{safe}-{digest}"
