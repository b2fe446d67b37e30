"""Call a policy with tokens instead of messages: vLLM's completions endpoint, or a policy that a trainer serves.

A rollout's tokens are exactly those that the model read and sampled. A reply with inconsistent tokens is an error,
because a trainer would learn from tokens that the model never sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from osmosis_ai.bounds import MAX_COUNT
from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.models.base import ChatModel
from osmosis_ai.models.endpoint import ENGINE as CHAT
from osmosis_ai.models.endpoint import EndpointClient
from osmosis_ai.models.host import HostOptions, ModelHost
from osmosis_ai.models.policy.replies import FORMS, Form, form_of, read_reply
from osmosis_ai.models.policy.template import ChatTemplate, load_template
from osmosis_ai.models.policy.tokens import Conversations, TokenSession
from osmosis_ai.models.retry import AdaptiveLimiter, RetryingModel
from osmosis_ai.records import (
    Completion,
    JsonObject,
    Logprobs,
    Message,
    ModelSpec,
    Record,
    Row,
    TokenIds,
    TokenLogprob,
    Tool,
    Usage,
)

__all__ = ["ENGINE", "MAX_RESPONSE", "REPLY_FORM", "PolicyClient"]

MAX_RESPONSE = "max_response_tokens"
"""Parameter of this engine: the maximum number of tokens after a rollout's first prompt, including tool results."""
REPLY_FORM = "reply_form"
"""Parameter of this engine: how the model writes tool calls, if the chat template doesn't show it."""

MAX_TOKENS = 1024
"""Maximum tokens of a reply without any other limit; vLLM's own default is 16."""
_LIMITS = ("max_tokens", "max_completion_tokens")
# A chat endpoint implements these in its prompt or parser. This engine has its own prompt and parser, without them.
_CHAT_ONLY = ("tool_choice", "parallel_tool_calls", "response_format", "functions", "function_call", "modalities")
_OWN = (MAX_RESPONSE, REPLY_FORM, "logprobs", "top_logprobs", "return_token_ids", *_LIMITS)


class _Choice(Record, frozen=True):
    """The fields used of an endpoint's reply."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: dict[str, Any] | None = None


class _Reply(Record, frozen=True):
    choices: list[_Choice]
    model: str | None = None


class PolicyClient(EndpointClient):
    """A client of the completions endpoint, with token ids in and out."""

    path = "/completions"

    async def sample(self, prompt: Sequence[int], params: JsonObject) -> tuple[_Choice, str | None]:
        """Sample a continuation of `prompt`, and return it with the name of the model that replied.

        Raises:
            ModelError: The request failed, or the reply doesn't report exactly which tokens were read and sampled.
        """
        # For vLLM, `logprobs: 0` asks for the sampled tokens only, without alternatives.
        body = {"model": self.spec.model, "prompt": prompt, **params, "logprobs": 0, "return_token_ids": True}
        given = await self.ask(body)
        try:
            reply = msgspec.convert(given, _Reply)
            choice = reply.choices[0]
        except (msgspec.ValidationError, IndexError) as error:
            raise self._wrong(f"a reply that isn't a completion: {error}") from error
        if choice.token_ids is None or choice.prompt_token_ids is None:
            raise self._wrong("no token ids; it must support `return_token_ids`, as vLLM does since 0.10.2")
        # An endpoint may truncate a long prompt or prepend a BOS token of its own.
        if choice.prompt_token_ids != list(prompt):
            raise self._wrong("prompt tokens that differ from those it was sent, so its reply has another context")
        values = (choice.logprobs or {}).get("token_logprobs")
        if values is not None and (not isinstance(values, list) or len(values) != len(choice.token_ids)):
            raise self._wrong("more or fewer log probabilities than sampled tokens")
        return choice, reply.model

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.url} answered with {what}", kind="bad_reply")


class _PolicyModel:
    """The policy in one rollout."""

    def __init__(self, client: PolicyClient, template: ChatTemplate, form: Form | None) -> None:
        self._client = client
        self._template = template
        self._form = form
        self._conversations = Conversations(template)

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Sample the next reply; raise ModelError if that fails or the request can't be rendered."""
        asked = {name: value for name, value in {**self._client.spec.params, **params}.items() if value is not None}
        # Clients send the defaults of these too, which change nothing and are dropped.
        for name in _CHAT_ONLY:
            if asked.pop(name, "auto") not in ("auto", True):
                message = f"the parameter {name} isn't supported for a policy called with tokens; remove it"
                raise ModelError(message, kind="bad_request")
        if tools and (self._form is None or not self._template.shows_tools):
            message = "the model's chat template doesn't show tools, or has no known form of tool calls"
            raise ModelError(f"{message}; choose one of {', '.join(FORMS)} with {REPLY_FORM}", kind="bad_request")
        session, prompt = self._conversations.find(messages, tools)
        room = self._room(asked, session, prompt)
        if room <= 0:
            # The response has reached its token limit. End the rollout here instead of failing it: what was sampled
            # counts.
            return Completion(
                {"role": "assistant", "content": ""}, "length", model=None, token_ids=TokenIds(prompt, [])
            )
        sampling = {name: value for name, value in asked.items() if name not in _OWN}
        sampling |= {"max_tokens": room, "stop_token_ids": self._template.stop_ids}
        choice, model = await self._client.sample(prompt, sampling)
        ids = choice.token_ids or []
        ended = bool(ids) and ids[-1] in self._template.stop_ids
        reply = read_reply(self._template.text(ids), self._form if tools else None, tools, len(messages))
        # Kept only with a reply, so a retried request starts from the same tokens.
        self._conversations.keep(
            TokenSession([*messages, reply], list(tools), [*prompt, *ids], session.opening or len(prompt))
        )
        return Completion(
            message=reply,
            finish_reason="tool_calls" if reply.get("tool_calls") else "stop" if ended else "length",
            usage=Usage(len(prompt), len(ids), min(len(prompt) + len(ids), MAX_COUNT)),
            model=model,
            logprobs=self._logprobs(ids, choice.logprobs),
            token_ids=TokenIds(prompt, ids),
        )

    def _room(self, asked: JsonObject, session: TokenSession, prompt: Sequence[int]) -> int:
        """Return how many tokens the next reply may have; zero or less if the response is full."""
        limits = [asked[name] for name in _LIMITS if name in asked]
        if MAX_RESPONSE in asked:
            limits.append(asked[MAX_RESPONSE] - (len(prompt) - (session.opening or len(prompt))))
        return min(limits, default=MAX_TOKENS)

    def _logprobs(self, ids: Sequence[int], given: JsonObject | None) -> Logprobs | None:
        values = (given or {}).get("token_logprobs")
        if values is None:
            return None
        return Logprobs(
            [TokenLogprob(self._template.token(token), value) for token, value in zip(ids, values, strict=True)]
        )

    async def aclose(self) -> None:
        return  # the client belongs to the host


class _PolicyHost:
    """One client, one limiter and one template, shared by every rollout of a worker."""

    def __init__(self, spec: ModelSpec, options: HostOptions) -> None:
        if options.cache is not None or options.cassette is not None:
            raise ModelStartError(
                "a policy called with tokens can't use stored or recorded replies: remove --cache, --record and "
                "--replay, or --tokenizer"
            )
        self.spec = spec
        self._template, self._form = _loaded(spec)
        self._options = options
        self._limiter = AdaptiveLimiter(options.concurrency)
        self._client = PolicyClient(spec)

    def for_rollout(self, row: Row, run_index: int, draw: str = "") -> ChatModel:
        return self._model()

    def _model(self) -> ChatModel:
        model = _PolicyModel(self._client, self._template, self._form)
        # One for each rollout, because the model inside keeps its conversations; the limiter is shared.
        return RetryingModel(model, self._options.policy, self._limiter, self._options.on_wait)

    def price_known(self) -> bool:
        return False

    async def probe(self) -> None:
        try:
            await self._model().complete([{"role": "user", "content": "ping"}], [], {"max_tokens": 1})
        except ModelError as error:
            hint = await CHAT.hint(self.spec, error.kind)
            raise ModelStartError(f"{str(error).rstrip('.')}. {hint}") from error

    async def aclose(self) -> None:
        await self._client.aclose()


class _Engine:
    def create(self, spec: ModelSpec, options: HostOptions) -> ModelHost:
        return _PolicyHost(spec, options)

    def preload(self, spec: ModelSpec) -> None:
        _loaded(spec)

    def destination(self, spec: ModelSpec, environ: Mapping[str, str]) -> object:
        return [spec.base_url, spec.tokenizer]


def _loaded(spec: ModelSpec) -> tuple[ChatTemplate, Form | None]:
    """Return the model's chat template and form of tool calls, loaded once per process; raise ModelStartError."""
    assert spec.tokenizer is not None
    template = load_template(spec.tokenizer)
    named = spec.params.get(REPLY_FORM)
    if named is None:
        return template, form_of(template.source)
    if named not in FORMS:
        raise ModelStartError(f"{REPLY_FORM} is {named!r}; it must be one of {', '.join(FORMS)}")
    return template, FORMS[named]


ENGINE = _Engine()
