"""Records that cross process boundaries and are stored: plain, frozen, JSON-able data without behavior.

Messages are plain dicts in the OpenAI chat format, because repositories' functions receive them in this form and
fields unknown to this package (`reasoning_content`, provider extras) must survive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from osmosis_ai.bounds import Count
from osmosis_ai.failures import Origin as Origin

if TYPE_CHECKING:
    from osmosis_ai.failures import CallError as CallError
    from osmosis_ai.failures import FailureKind as FailureKind
else:
    # A store written by another version may name a kind that this version doesn't know.
    CallError = FailureKind = str

JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
"""Any JSON value, to be narrowed before use."""

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object whose keys are defined elsewhere: in a schema, a protocol, a provider's documentation."""

Message: TypeAlias = dict[str, Any]
"""One chat message: {"role": …, "content": …, …}."""

Tool: TypeAlias = dict[str, Any]
"""One tool as the model sees it: {"type": "function", "function": {"name", "description", "parameters"}}."""

FinishReason: TypeAlias = Literal["stop", "length", "max_turns", "max_tokens_total", "removed", "timeout", "error"]
"""Why a rollout ended. `removed` means that its grader took it out of every count."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every record: immutable, and encoded without fields at their default."""


class SolutionCall(Record, frozen=True):
    """One tool call of a reference solution. Arguments may refer to earlier results; see `data.solution`."""

    tool: str
    # msgspec copies an empty default for each instance.
    arguments: dict[str, Any] = {}


SolutionStep: TypeAlias = list[SolutionCall] | str
"""One step of a reference solution: tool calls made together, or the text of the answer."""


class Row(Record, frozen=True):
    """One dataset row.

    `index` is the absolute position in the file, from 0. `id` identifies the row by its content and its occurrence
    number among equal rows, and survives when other rows move. `extra` holds every other column. `ground_truth` is for
    scoring and `offline/oracle`, `solution` for `offline/oracle` alone: tools never see either, and scorers and agent
    loops never get the solution.
    """

    index: int
    id: str
    system_prompt: str
    user_prompt: str
    ground_truth: str | None = None
    extra: dict[str, Any] = {}
    solution: list[SolutionStep] | None = None


def opening_messages(row: Row) -> list[Message]:
    """Return the conversation before the first model call."""
    return [{"role": "system", "content": row.system_prompt}, {"role": "user", "content": row.user_prompt}]


class Failure(Record, frozen=True):
    """The origin and cause of a failure.

    `kind` is the short cause, one of `failures.FAILURE_KINDS`. `file` and `line` point into the user's code if it is to
    blame. `detail` is a longer text, such as a traceback.
    """

    origin: Origin
    message: str
    kind: FailureKind | Literal[""] = ""
    file: str | None = None
    line: Count | None = None
    detail: str | None = None


class TokenUsage(Record, frozen=True):
    """Tokens of all model calls of a rollout."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(Record, frozen=True):
    """Tokens of one or more model calls."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    total_tokens: Count = 0

    def as_object(self) -> TokenUsage:
        """Convert to a record that is encoded with every field, even those that are 0."""
        return TokenUsage(self.prompt_tokens, self.completion_tokens, self.total_tokens)


TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TopLogprob(Record, frozen=True):
    """A token and its log probability. `bytes` are the token's bytes in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob, frozen=True):
    """A token of a reply, and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob] = []


class Logprobs(Record, frozen=True):
    """Log probabilities of a reply's tokens, in order."""

    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class TokenIds(Record, frozen=True):
    """Token ids of a request and of its reply; None if the endpoint didn't return them."""

    prompt_token_ids: list[TokenId] | None = None
    token_ids: list[TokenId] | None = None


class Completion(Record, frozen=True):
    """One model reply.

    `message` is the assistant message as added to the conversation. `attempts` counts requests, retries included.
    `cost_usd` is None if no price is known. `left_out` gives the reason, by name, for each dropped `logprobs` or
    `token_ids`.
    """

    message: Message
    finish_reason: str = "stop"
    usage: Usage = Usage()
    model: str | None = None
    logprobs: Logprobs | None = None
    token_ids: TokenIds | None = None
    attempts: int = 1
    cost_usd: float | None = None
    cached: bool = False
    left_out: dict[str, str] = {}


class Turn(Record, frozen=True):
    """One model call of a rollout, without its message, which is in the trajectory. Times are in milliseconds.

    `edited` is True if the user changed its request or reply in the debugger, so the message isn't the model's own.
    `left_out` is copied from the completion.
    """

    index: Count
    finish_reason: str
    usage: Usage
    duration_ms: float
    """Duration of the model call in milliseconds, retries included."""
    model: str | None = None
    params: dict[str, Any] = {}
    logprobs: Logprobs | None = None
    token_ids: TokenIds | None = None
    attempts: Count = 1
    cost_usd: float | None = None
    """Cost in US dollars, null if no price is known."""
    cached: bool = False
    edited: bool = False
    left_out: dict[str, str] = {}


class ToolCall(Record, frozen=True):
    """One tool call of a rollout.

    `arguments` is the text the model wrote. `error` says why the call failed, None if it succeeded, and `failure` how:
    with the traceback of a tool that raised in its worker. `truncated_from` is the result's full length in characters
    if it was cut for the model. `content` keeps what the model saw only as a placeholder: structured content, images,
    files. `edited` is True if the user changed the result in the debugger.
    """

    turn: Count
    id: str
    name: str
    arguments: str
    duration_ms: float
    """Duration in milliseconds."""
    error: CallError | None = None
    truncated_from: Count | None = None
    content: Any = None
    edited: bool = False
    failure: Failure | None = None


class Rollout(Record, frozen=True):
    """One finished rollout: its row, trajectory, usage and failure. Times are in milliseconds.

    `failure` is None if the rollout ended without error, whatever its score. `messages` is the whole trajectory, system
    and user message included; a failed rollout keeps the messages so far. `samples` are completions that tools
    requested from the rollout's model; they count in `usage` and `cost_usd`, but aren't part of the conversation.
    `agent` is the report of the repository's own agent loop, None for the built-in loop.
    """

    id: str
    row_index: int
    row_id: str
    run_index: int
    policy: str
    messages: list[Message]
    finish_reason: FinishReason
    duration_ms: float
    """Duration in milliseconds."""
    failure: Failure | None = None
    usage: Usage = Usage()
    turns: list[Turn] = []
    tool_calls: list[ToolCall] = []
    samples: list[Turn] = []
    cost_usd: float | None = None
    """Cost in US dollars, null if no price is known."""
    agent: AgentReport | None = None


class ScoringInput(Record, frozen=True):
    """A reward function's input: a rollout's messages and its dataset row.

    `extra` holds the row's columns other than the prompts and `ground_truth`; `row_index` is the absolute position in
    the file, and `run_index` the number of the rollout at its row, both from 0.
    """

    messages: list[Message]
    ground_truth: str | None
    row_index: int
    extra: dict[str, Any]
    run_index: int = 0


class StoredInput(Record, frozen=True):
    """A ScoringInput as the run store keeps it: a row and a trajectory, each as JSON that may be compressed."""

    row_index: int
    row: bytes
    trajectory: bytes
    run_index: int = 0


class JudgeCall(Record, frozen=True):
    """One request to a judge and its result. Times are in milliseconds.

    `model` is the requested model, as provider/model. `reply` is the judge's text. `score` (not yet clamped) and
    `explanation` are parsed from it; they are None if the reply is unusable, and `error` then says why.
    """

    model: str
    duration_ms: float
    """Duration in milliseconds."""
    usage: Usage = Usage()
    cost_usd: float | None = None
    """Cost in US dollars, null if no price is known."""
    attempts: Count = 1
    reply: str | None = None
    score: float | None = None
    explanation: str | None = None
    error: str | None = None
    prompt: list[Message] = []
    """The judge's messages, long ones cut; empty where only scores are read."""


class Score(Record, frozen=True):
    """One function's score of one rollout; exactly one of `value` and `failure` is set.

    `explanation` is the text of the function's judges, `judge_calls` are the requests to them.
    """

    function: str
    value: float | None = None
    failure: Failure | None = None
    duration_ms: float = 0.0
    """Duration in milliseconds."""
    explanation: str | None = None
    judge_calls: list[JudgeCall] = []


class Verdict(Record, frozen=True):
    """A person's verdict on a rollout."""

    value: Literal[0, 1]
    """1 if the rollout is good."""
    note: str | None = None
    """What the person wrote about it, null if nothing."""


class AgentReport(Record, frozen=True):
    """The report of a repository's own agent loop at the end of a rollout.

    `name` is the loop's name. `finish_reason` is the loop's own; `Rollout.finish_reason` is the nearest standard one.
    `score` is the reward that the loop gave itself, under its name; None if it gave none. `metrics` are the loop's own.
    `conversations` are those that a workflow held before the rollout's last one, which is `Rollout.messages`.
    """

    name: str
    finish_reason: str = "stop"
    score: Score | None = None
    metrics: dict[str, Any] = {}
    conversations: list[list[Message]] = []


class CallSummary(Record, frozen=True):
    """One tool call without its text. `failure` is without its traceback."""

    name: str
    duration_ms: float
    error: CallError | None = None
    failure: Failure | None = None


class Outcome(Record, frozen=True):
    """One stored rollout with its scores but without its trajectory."""

    id: str
    row_index: int
    row_id: str
    run_index: int
    policy: str
    finish_reason: FinishReason
    duration_ms: float
    failure: Failure | None
    usage: Usage
    cost_usd: float | None
    calls: list[CallSummary]
    scores: dict[str, Score]

    @property
    def reward(self) -> float | None:
        """The mean of the functions' scores; None if one is missing."""
        return reward(self.scores)


def reward(scores: Mapping[str, Score]) -> float | None:
    """Return the mean of the functions' scores; None if one is missing, or there are none."""
    # A mean over fewer functions would not be comparable with other rollouts' means.
    values = [score.value for score in scores.values() if score.value is not None]
    return sum(values) / len(values) if values and len(values) == len(scores) else None


class CassetteSpec(Record, frozen=True):
    """A file of recorded model replies, and its use: replay only, or also record what is missing.

    `uses` is a file to which every process appends the keys it used. `advice` says in an error message how to record.
    """

    path: str
    mode: Literal["replay", "record"]
    uses: str
    advice: str


class FunctionRef(Record, frozen=True):
    """A reward or rubric function, named but not loaded.

    `name` is the label in reports (`reward_fn.compute_reward:exact_match`). `module` and `attribute` say how to import
    the function, with `root` first on `sys.path`; `file` is its source, if known. An entry of a rubric file has no
    module, but a `content`: the hash of its text.
    """

    name: str
    module: str
    attribute: str
    root: str
    kind: Literal["reward", "rubric"] = "reward"
    file: str | None = None
    line: int | None = None
    content: str | None = None


class ModelSpec(Record, frozen=True):
    """A model, its endpoint and its request parameters.

    Reports show `name`; requests send `model`. `engine` is the name of one of `models.engines`. `api_key` never leaves
    the processes of a run: it isn't stored, logged or shown. `stand_in` is True for offline models, whose scores say
    nothing about a model. `request_timeout` is in seconds. `tokenizer` is the folder of the model's tokenizer and chat
    template, for an engine that sends tokens.
    """

    name: str
    engine: str
    model: str
    base_url: str | None = None
    api_key: str | None = None
    params: dict[str, Any] = {}
    request_timeout: float = 300.0
    stand_in: bool = False
    tokenizer: str | None = None

    def __repr__(self) -> str:
        # Without the key, which a traceback or a log might show.
        return f"ModelSpec(name={self.name!r}, engine={self.engine!r}, base_url={self.base_url!r})"
