"""`evaluate_rubric`: have a language model score a text by a rubric. The first call imports LiteLLM."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import msgspec

from osmosis_ai.errors import ModelError, ModelNotFoundError, ProviderRequestError
from osmosis_ai.masking import mask
from osmosis_ai.records import Completion, JsonObject, JudgeCall, Message, Record, Tool
from osmosis_ai.reward_rubric import background
from osmosis_ai.reward_rubric.prompt import RESPONSE_FORMAT, Case, judge_messages, repair_messages
from osmosis_ai.reward_rubric.reply import Judgement, UnusableReplyError, finite_number, parse_judgement
from osmosis_ai.reward_rubric.target import Target, find_target, has_price

if TYPE_CHECKING:
    from osmosis_ai.models.base import ChatModel

__all__ = [
    "RewardRubricRunResult",
    "aevaluate_rubric",
    "check_model_info",
    "current_attempt",
    "evaluate_rubric",
    "judged_attempt",
    "trace_judge_calls",
]

DEFAULT_SCORE_MIN, DEFAULT_SCORE_MAX = 0.0, 1.0
DEFAULT_TIMEOUT = 60.0
MAX_ATTEMPTS = 3
"""Requests for one reply, with retries; a reply that can't be used gets as many again."""
SHOWN_REPLY = 300
"""Characters of an unusable reply in its error."""
TRACED_REPLY = 20_000
TRACED_PROMPT = 20_000
"""Characters of each message and each reply that a score's record keeps."""

_listeners: ContextVar[tuple[list[JudgeCall], ...]] = ContextVar("judge_call_listeners", default=())
_attempt: ContextVar[_Attempt | None] = ContextVar("judge_attempt", default=None)
_TEXTS = ("provider", "model", "api_key", "api_key_env", "api_base", "system_prompt", "original_input")
_NUMBERS = ("score_min", "score_max", "timeout")


class _Attempt(NamedTuple):
    """Distinguishes a judge's recordings of equal requests: by attempt, and by how often it made each request."""

    number: int
    asked: Counter[str]


class RewardRubricRunResult(TypedDict):
    """A full judgement: the clamped score, the judge's explanation, and its reply as a chat completion."""

    score: float
    explanation: str
    raw: dict[str, Any]


@contextmanager
def trace_judge_calls() -> Iterator[list[JudgeCall]]:
    """Collect the requests that `evaluate_rubric` and `aevaluate_rubric` make inside the block, in order of completion.

    This includes requests from tasks started in the block, and from threads that run in a copy of its context
    (`contextvars.copy_context`, `asyncio.to_thread`).
    """
    calls: list[JudgeCall] = []
    token = _listeners.set((*_listeners.get(), calls))
    try:
        yield calls
    finally:
        _listeners.reset(token)


@contextmanager
def judged_attempt(number: int) -> Iterator[None]:
    """Say which attempt the judge calls inside the block belong to; each attempt has recordings of its own."""
    token = _attempt.set(_Attempt(number, Counter()))
    try:
        yield
    finally:
        _attempt.reset(token)


def current_attempt() -> int:
    """Return the attempt that judge calls belong to, 0 outside of any."""
    attempt = _attempt.get()
    return 0 if attempt is None else attempt.number


class _Evaluation(Record, frozen=True):
    case: Case
    target: Target
    timeout: float
    reasoning_effort: str | None


def evaluate_rubric(
    rubric: str,
    solution_str: str,
    model_info: Mapping[str, Any],
    *,
    ground_truth: str | None = None,
    original_input: str | None = None,
    metadata: dict[str, Any] | None = None,
    score_min: float | None = None,
    score_max: float | None = None,
    timeout: float | None = None,
    return_details: bool = False,
) -> float | RewardRubricRunResult:
    """Have a language model score a text by a rubric. Blocks the calling thread, even one with a running event loop.

    Example:
        evaluate_rubric("Is the answer polite?", "Yes, sir.", {"provider": "openai", "model": "gpt-5-mini"})

    Args:
        rubric: A description of a good solution.
        solution_str: The text to score. The judge gets it as data and is told to ignore instructions in it.
        model_info: The judge: `provider` and `model` as LiteLLM knows them; `api_key`, or `api_key_env` for the name of
            its environment variable (default: the provider's own); `api_base` for an OpenAI-compatible endpoint;
            `timeout` and `reasoning_effort`; and `score_min`, `score_max`, `system_prompt`, `original_input` for all
            calls with it. Other keys are ignored. None counts as absent.
        ground_truth: A reference answer to show the judge.
        original_input: The prompt that the solution answers.
        metadata: Further context, shown to the judge as JSON.
        score_min: The lowest score; default 0.0.
        score_max: The highest score; default 1.0.
        timeout: Seconds for the judge's reply, including retries; default 60. After an unusable reply the judge is
            asked once more, with the same time limit.
        return_details: Also return the explanation and the judge's reply.

    Returns:
        The score, clamped to the bounds; or `{"score", "explanation", "raw"}`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has an invalid value.
        MissingAPIKeyError: There is no key; the message names the variable to export.
        ModelNotFoundError: The provider has no such model.
        ProviderRequestError: The request failed, or two replies were unusable.
    """
    result = background.wait(
        _start(rubric, solution_str, model_info, ground_truth, original_input, metadata, score_min, score_max, timeout)
    )
    return result if return_details else result["score"]


async def aevaluate_rubric(
    rubric: str,
    solution_str: str,
    model_info: Mapping[str, Any],
    *,
    ground_truth: str | None = None,
    original_input: str | None = None,
    metadata: dict[str, Any] | None = None,
    score_min: float | None = None,
    score_max: float | None = None,
    timeout: float | None = None,
    return_details: bool = False,
) -> float | RewardRubricRunResult:
    """Do the same as `evaluate_rubric`, for asyncio code. Cancelling the call abandons the request."""
    result = await asyncio.wrap_future(
        _start(rubric, solution_str, model_info, ground_truth, original_input, metadata, score_min, score_max, timeout)
    )
    return result if return_details else result["score"]


def check_model_info(model_info: Any) -> None:
    """Check that `model_info` names a judge and that its values have the right types.

    Raises:
        TypeError: It isn't a mapping, or a value has the wrong type.
        ValueError: `provider` or `model` is missing, or a value is invalid.
    """
    if not isinstance(model_info, Mapping):
        raise TypeError(f"model_info must be a dict, not {_kind(model_info)}")
    for name in (*_TEXTS, "reasoning_effort"):
        value = model_info.get(name)
        if value is not None and not isinstance(value, str):
            raise TypeError(f"model_info[{name!r}] must be a str, not {_kind(value)}")
    for name in ("provider", "model"):
        if not (model_info.get(name) or "").strip():
            example = "{'provider': 'openai', 'model': 'gpt-5-mini'}"
            raise ValueError(f"model_info needs a {name!r}: {example}, for example")
    for name in _NUMBERS:
        _number(model_info.get(name), f"model_info[{name!r}]")


def _start(
    rubric: str,
    solution_str: str,
    model_info: Mapping[str, Any],
    ground_truth: str | None,
    original_input: str | None,
    metadata: dict[str, Any] | None,
    score_min: float | None,
    score_max: float | None,
    timeout: float | None,
) -> Future[RewardRubricRunResult]:
    # In the caller's thread, so that a wrong argument raises where it was given.
    for name, value, optional in (
        ("rubric", rubric, False),
        ("solution_str", solution_str, False),
        ("ground_truth", ground_truth, True),
        ("original_input", original_input, True),
    ):
        if not isinstance(value, str) and not (optional and value is None):
            raise TypeError(f"{name} must be a str{' or None' if optional else ''}, not {_kind(value)}")
    if not rubric.strip():
        raise ValueError("rubric is empty: describe a good solution in words")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict or None, not {_kind(metadata)}")
    check_model_info(model_info)

    def first(given: float | None, name: str, default: float) -> float:
        number = _number(given, name)
        number = _number(model_info.get(name), name) if number is None else number
        return default if number is None else number

    low, high = first(score_min, "score_min", DEFAULT_SCORE_MIN), first(score_max, "score_max", DEFAULT_SCORE_MAX)
    if low >= high:
        raise ValueError(f"score_min ({low:g}) must be less than score_max ({high:g})")
    seconds = first(timeout, "timeout", DEFAULT_TIMEOUT)
    if seconds <= 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {seconds:g}")
    if original_input is None:
        original_input = model_info.get("original_input")
    system_prompt = (model_info.get("system_prompt") or "").strip() or None
    context = dict(metadata) if metadata else None
    case = Case(rubric, solution_str, low, high, ground_truth, original_input, context, system_prompt)
    evaluation = _Evaluation(case, find_target(model_info), seconds, model_info.get("reasoning_effort") or None)
    # The calls run in another thread, which doesn't have this context.
    return background.submit(_judge(evaluation, _listeners.get(), _attempt.get() or _Attempt(0, Counter())))


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {_kind(value)}")
    number = finite_number(value)
    if number is None:
        raise ValueError(f"{name} must be a finite number")
    return number


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


# Everything below runs on the judges' own event loop.


async def _judge(
    evaluation: _Evaluation, listeners: tuple[list[JudgeCall], ...], attempt: _Attempt
) -> RewardRubricRunResult:
    case, target = evaluation.case, evaluation.target
    messages = judge_messages(case)
    completion, judged = await _ask(evaluation, messages, listeners, attempt)
    if isinstance(judged, UnusableReplyError):
        messages = repair_messages(messages, _text(completion), str(judged), case)
        completion, judged = await _ask(evaluation, messages, listeners, attempt)
    if isinstance(judged, UnusableReplyError):
        reply = " ".join(mask(_text(completion), target.api_key).split())
        shown = reply if len(reply) <= SHOWN_REPLY else f"{reply[:SHOWN_REPLY]}…"
        why = mask(str(judged), target.api_key)
        problem = f"the judge's reply can't be used, asked twice: {why}. It begins: {shown!r}"
        raise ProviderRequestError(target.provider, target.model, problem)
    score = min(max(judged.score, case.score_min), case.score_max)
    return {"score": score, "explanation": judged.explanation, "raw": _raw(completion, target)}


async def _ask(
    evaluation: _Evaluation, messages: list[Message], listeners: tuple[list[JudgeCall], ...], attempt: _Attempt
) -> tuple[Completion, Judgement | UnusableReplyError]:
    target = evaluation.target
    started = perf_counter()

    def record(**facts: Any) -> None:
        if not listeners:
            return
        asked = [{**each, "content": _traced(each["content"], target)} for each in messages]
        call = JudgeCall(target.name, round((perf_counter() - started) * 1000, 3), prompt=asked, **facts)
        for calls in listeners:
            calls.append(call)

    try:
        completion = await _complete(evaluation, messages, attempt)
    except ModelError as error:
        record(error=str(error))
        raise _failure(target, error) from error
    # Parsed as it came, and masked only where people or records see it.
    reply = _text(completion)
    shown = mask(reply, target.api_key)[:TRACED_REPLY]
    # A replay costs nothing, and needs no LiteLLM to know it.
    cost = 0.0 if completion.cached else completion.cost_usd if has_price(target) else None
    known = {"usage": completion.usage, "cost_usd": cost, "attempts": completion.attempts}
    try:
        judged = parse_judgement(reply)
    except UnusableReplyError as problem:
        record(**known, reply=shown, error=mask(f"the reply can't be used: {problem}", target.api_key))
        return completion, problem
    explanation = mask(judged.explanation, target.api_key)
    # Not clamped, so that the record shows what the judge gave.
    record(**known, reply=shown, score=judged.score, explanation=explanation)
    return completion, Judgement(judged.score, explanation)


def _traced(text: str, target: Target) -> str:
    shown = mask(text, target.api_key)
    more = len(shown) - TRACED_PROMPT
    return shown if more <= 0 else f"{shown[:TRACED_PROMPT]}… ({more:,} more characters)"


async def _complete(evaluation: _Evaluation, messages: list[Message], attempt: _Attempt) -> Completion:
    judge: ChatModel = _LiveJudge(evaluation)
    params: JsonObject = {}
    if evaluation.reasoning_effort is not None:
        params["reasoning_effort"] = evaluation.reasoning_effort
    cassette = background.cassette_of(evaluation.target)
    if cassette is not None:
        from osmosis_ai.models.cassette import CassetteModel

        live = judge if cassette.spec.mode == "record" else None
        # Outside the live judge, so that what it adds, such as the response format, isn't part of a recording's key.
        judge = CassetteModel(live, cassette, evaluation.target.name, {}, attempt.number, asked=attempt.asked)
    return await judge.complete(messages, [], params)


class _LiveJudge:
    """The judge itself, with retries, for one evaluation."""

    def __init__(self, evaluation: _Evaluation) -> None:
        self._evaluation = evaluation

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        import anyio

        from osmosis_ai.models.retry import RetryingModel
        from osmosis_ai.retry import RetryPolicy

        target, seconds = self._evaluation.target, self._evaluation.timeout
        judge = background.client_of(target)
        params = {**params}
        if judge.takes_schema:
            params["response_format"] = RESPONSE_FORMAT
        if target.base_url is not None and "reasoning_effort" in params:
            # LiteLLM doesn't know which parameters a model at this endpoint accepts.
            params["allowed_openai_params"] = ["reasoning_effort"]
        last: list[ModelError] = []
        policy = RetryPolicy(max_attempts=MAX_ATTEMPTS, max_seconds=seconds)
        model = RetryingModel(judge.model, policy, judge.limiter, lambda error, _: last.append(error))
        # The policy bounds the waits between requests, and this the request that is running.
        with anyio.move_on_after(seconds):
            return await model.complete(messages, tools, params)
        # The error that caused the last retry says more than a timeout.
        if last:
            raise last[-1]
        raise ModelError(f"the judge gave no answer within {seconds:g} s", kind="timeout")

    async def aclose(self) -> None:
        """Do nothing: the process keeps the judge's client."""


def _failure(target: Target, error: ModelError) -> ProviderRequestError:
    from osmosis_ai.models.host import UNKNOWN_MODEL

    detail = str(error)
    if error.status == 404 or (error.kind == "bad_request" and UNKNOWN_MODEL.search(detail)):
        where = " and api_base" if target.base_url is not None else ""
        detail = f"{detail.rstrip('.')}. Check the model's name{where}: names of snapshots change"
        return ModelNotFoundError(target.provider, target.model, detail)
    return ProviderRequestError(target.provider, target.model, detail)


def _text(completion: Completion) -> str:
    content = completion.message.get("content")
    # Some providers answer with a list of parts.
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _raw(completion: Completion, target: Target) -> dict[str, Any]:
    message = {**completion.message, "content": mask(_text(completion), target.api_key)}
    return {
        "model": completion.model or target.model,
        "choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason}],
        "usage": msgspec.structs.asdict(completion.usage),
    }
