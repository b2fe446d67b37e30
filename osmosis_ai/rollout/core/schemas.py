"""The remote rollout protocol's messages between a trainer and an agent loop."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from osmosis_ai.records import JsonObject, Message
from osmosis_ai.rollout.vocabulary import RolloutStatus
from osmosis_ai.urls import UrlError, http_url

__all__ = [
    "MAX_METADATA_BYTES",
    "CompletionsChoice",
    "CompletionsRequest",
    "CompletionsResponse",
    "CompletionsUsage",
    "InitResponse",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "RolloutMetrics",
    "RolloutRequest",
    "RolloutResponse",
    "RolloutStatus",
]

MAX_METADATA_BYTES = 1024 * 1024
"""Part of the protocol: larger metadata is refused with status 422."""


class _Schema(BaseModel):
    """A part of a tool's schema. It keeps JSON Schema keys that have no field here, and adds none that were absent."""

    model_config = ConfigDict(extra="allow")

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        fields = type(self).model_fields
        return {name: value for name, value in handler(self).items() if value is not None or name not in fields}


class OpenAIFunctionPropertySchema(_Schema):
    """One parameter of a tool."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    """The parameters of a tool: a JSON Schema of an object."""

    type: str = "object"
    # In JSON Schema, true and false are schemas as well.
    properties: dict[str, OpenAIFunctionPropertySchema | bool] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Schema):
    """A tool's name, description and parameters."""

    name: str
    description: str | None = None
    parameters: OpenAIFunctionParametersSchema | None = None
    strict: bool | None = None


class OpenAIFunctionToolSchema(_Schema):
    """One tool as the model sees it, in the OpenAI format."""

    type: str = "function"
    function: OpenAIFunctionSchema


class RolloutRequest(BaseModel):
    """A trainer's request for one rollout.

    Attributes:
        rollout_id: The trainer's id of the rollout, 1 to 256 characters.
        server_url: The trainer's http(s) address without a trailing slash; model calls and the result go there.
        messages: The conversation before the first model call.
        completion_params: Sampling parameters for `ctx.chat`.
        tool_server_url: The address of the rollout's tools, for loops that use remote ones.
        max_turns: Maximum number of model calls; the loop must enforce it.
        max_tokens_total: Maximum number of completion tokens over all turns; the loop must enforce it.
        metadata: Any data about the row, at most 1 MiB as JSON.
        api_key: The bearer key for the trainer. Never shown.
        idempotency_key: Identifies repeated requests; defaults to `rollout_id`.
    """

    # A newer trainer may send fields that this version doesn't know.
    model_config = ConfigDict(extra="ignore")

    rollout_id: str = Field(min_length=1, max_length=256)
    server_url: str
    messages: list[Message]
    completion_params: JsonObject = Field(default_factory=dict)
    tool_server_url: str | None = None
    max_turns: int = Field(default=10, ge=1)
    max_tokens_total: int = Field(default=8192, ge=1)
    metadata: JsonObject = Field(default_factory=dict)
    api_key: str | None = Field(default=None, repr=False)
    idempotency_key: str | None = None

    @field_validator("completion_params", "metadata", mode="before")
    @classmethod
    def _null_is_empty(cls, value: object) -> object:
        return {} if value is None else value

    @field_validator("completion_params")
    @classmethod
    def _only_sampling(cls, value: JsonObject) -> JsonObject:
        # Loops pass the parameters on as `ctx.chat(messages, **params)`, where these names are taken.
        for name in ("messages", "rollout_id", "self"):
            if name in value:
                raise ValueError(f"must not contain `{name}`: it holds sampling parameters")
        return value

    @field_validator("server_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        # The message omits the value, because an address may contain a password.
        try:
            http_url(value, bare=True)
        except UrlError as error:
            hint = {"credentials": ": the key is `api_key`", "query": ": paths are appended to it"}
            raise ValueError(f"{error}{hint.get(error.problem, '')}") from None
        return value.rstrip("/")

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, value: str | None) -> str | None:
        # Otherwise the rollout would run, but its result could never be sent.
        if value is not None and any(character < " " or character == "\x7f" for character in value):
            raise ValueError("must not contain control characters: it is sent in a header")
        return value

    @field_validator("metadata")
    @classmethod
    def _is_small(cls, value: JsonObject) -> JsonObject:
        try:
            # JSON may hold lone surrogates, which the strict codec refuses.
            size = len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"can't be written as JSON: {error}") from error
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"has {size} bytes as JSON, at most {MAX_METADATA_BYTES} are allowed")
        return value


class InitResponse(BaseModel):
    """The answer to a RolloutRequest: the rollout was accepted, and these are its tools."""

    rollout_id: str
    tools: list[OpenAIFunctionToolSchema] = Field(default_factory=list)


class RolloutMetrics(BaseModel):
    """Metrics of a rollout. Latencies are in milliseconds.

    `max_context_tokens` is the largest number of tokens in a single model call, prompt and reply together.
    """

    total_latency_ms: float = 0.0
    llm_latency_ms: float = 0.0
    tool_latency_ms: float = 0.0
    num_llm_calls: int = 0
    num_tool_calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    max_context_tokens: int = 0


class RolloutResponse(BaseModel):
    """A finished rollout, as sent to the trainer."""

    rollout_id: str
    status: Literal[RolloutStatus.COMPLETED, RolloutStatus.ERROR]
    final_messages: list[Message] = Field(default_factory=list)
    finish_reason: str | None = None
    error_message: str | None = None
    reward: float | None = None
    metrics: RolloutMetrics | None = None
    extra_fields: JsonObject = Field(default_factory=dict)


class CompletionsRequest(BaseModel):
    """A request to the trainer for one generation; further sampling parameters are sent unchanged."""

    model_config = ConfigDict(extra="allow")

    model: str = "default"
    messages: list[Message]
    rollout_id: str
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: list[str] | str | None = None
    logprobs: bool = True


class CompletionsUsage(BaseModel):
    """Tokens of one generation."""

    model_config = ConfigDict(extra="allow")

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class CompletionsChoice(BaseModel):
    """One reply of a generation."""

    model_config = ConfigDict(extra="allow")

    index: int = 0
    message: JsonObject
    finish_reason: str | None = None


class CompletionsResponse(BaseModel):
    """The trainer's reply to a CompletionsRequest; only `choices` is required."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[CompletionsChoice] = Field(min_length=1)
    usage: CompletionsUsage | None = None
    token_ids: Any = None
    logprobs: Any = None
    prompt_token_ids: Any = None
