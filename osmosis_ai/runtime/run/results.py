"""The documented results of `osmosis test` and `osmosis eval`: the object that `-o` and `--json` write.

A field without a default is always present; a field at its default is left out.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from osmosis_ai.records import Failure, FinishReason, JsonObject, Origin, Record, TokenUsage
from osmosis_ai.reward_fn.statistics import FunctionStatistics, PairedComparison

Rows = TypeVar("Rows")
"""The type of an object's rows: a list of records to read, `msgspec.Raw` to write."""


class ToolStatistics(Record, frozen=True):
    """All calls of one tool by the model, not counting a baseline's."""

    calls: int
    """Number of calls."""
    errors: dict[str, int]
    """Number of failed calls by kind of error, most frequent first."""
    median_ms: float
    """Median duration in milliseconds."""
    p95_ms: float
    """95th percentile of the durations in milliseconds, by nearest rank."""


class Cause(Record, frozen=True):
    """Failures with the same origin, kind and location; message, row and attempt are the first one's."""

    origin: Origin
    """The part at fault."""
    kind: str
    """Short name of the cause, such as `exception` or `refused`."""
    count: int
    """Number of failures."""
    message: str
    """Message of the first failure."""
    row_index: int
    """Row of the first failure: its position in the dataset, from 0."""
    run_index: int
    """Attempt of the first failure, from 0."""
    file: str | None
    """The user's file at fault, null if none or unknown."""
    line: int | None
    """Line in that file, from 1."""
    function: str | None
    """The function that was scoring, or the tool; null if the rollout itself failed."""


class JudgeTotals(Record, frozen=True):
    """Requests of rubrics to their judges, not included in the rollouts' tokens and cost."""

    calls: int
    """Number of requests."""
    total_tokens: int
    """Tokens of all requests."""
    cost_usd: float | None
    """Cost in US dollars, null if no price is known."""


class TestConfig(Record, frozen=True, kw_only=True):
    """Configuration of the run."""

    model: str
    """Name of the model."""
    base_url: str | None
    """Endpoint of the model, null for the provider's default."""
    stand_in: bool
    """True for an offline model: the scores say nothing about a model."""
    params: JsonObject
    """Request parameters sent to the model."""
    dataset: str
    """Path of the dataset."""
    run_id: str
    """Id of the run in the run store."""
    agent: str | None = None
    """The agent loop named with `-m`, absent for the built-in one."""
    interactive: bool = False
    """True if the user stepped through the run with `-i`."""


class EvalConfig(TestConfig, frozen=True, kw_only=True):
    """Configuration of the run."""

    n_runs: int
    """Attempts per row."""
    pass_threshold: float
    """Lowest score with which an attempt passes."""
    eval_fns: list[str]
    """Names of the scoring functions."""
    baseline_model: str | None = None
    """Name of the baseline model, absent if there is none."""


class RunTotals(Record, frozen=True, kw_only=True):
    """Totals of the rollouts. They are keyword-only, so a subclass's fields come first in the JSON."""

    passed: int
    """Rollouts that ended without error, whatever their score; without those removed."""
    failed: int
    """Rollouts that failed or did not run."""
    missing: int
    """Rollouts that did not run."""
    removed: int = 0
    """Rollouts that their grader removed from every count; absent if there are none."""
    total_duration_ms: float
    """Sum of the rollouts' durations in milliseconds."""
    total_tokens: int
    """Tokens of all rollouts."""
    cost_usd: float | None
    """Cost of all rollouts in US dollars, null if no price is known."""
    wall_ms: float
    """Time from the first rollout to the last record, in milliseconds."""
    scoring_errors: int
    """Scores that could not be computed, including a baseline's."""
    judges: JudgeTotals
    """Requests to judges."""
    tools: dict[str, ToolStatistics]
    """Statistics of each tool."""
    failures: list[Cause]
    """Failures by cause, most frequent first, including a baseline's."""
    tool_errors: list[Cause]
    """Failed tool calls of the model by cause, most frequent first."""
    not_scored: list[Failure] = []
    """Files and functions that could not be loaded, and were left out of scoring with `--keep-going`."""
    changed_files: list[str] = []
    """The dataset and files of the repository that changed during the run; the results are those of its start."""


class PlannedTotals(RunTotals, frozen=True):
    """Totals of the planned rollouts."""

    total: int
    """Rollouts planned."""


class TestSummary(PlannedTotals, frozen=True, kw_only=True):
    """Totals of the rollouts, and statistics of the functions."""

    functions: dict[str, FunctionStatistics]
    """Statistics of each function."""


class EvalSummary(RunTotals, frozen=True):
    """Totals of the rollouts, and statistics of the functions."""

    total_rows: int
    """Selected rows of the dataset."""
    total_runs: int
    """Rollouts planned, not counting a baseline's."""
    eval_fns: dict[str, FunctionStatistics]
    """Statistics of each function."""


class TestRow(Record, frozen=True):
    """One rollout of `test`."""

    row_index: int
    """Position of the row in the dataset, from 0."""
    success: bool
    """True if the rollout ended without error, whatever its score."""
    error: str | None
    """The failure, after its origin: `model: …`, `timeout: …`, `worker: …`."""
    duration_ms: float
    """Duration in milliseconds."""
    token_usage: TokenUsage
    """Tokens of all model calls."""
    reward: float | None
    """Mean of the functions' scores, null if one is missing."""
    finish_reason: FinishReason
    """Why the rollout ended."""
    scores: dict[str, float | None]
    """Score by function, null if it could not be computed."""
    scoring_errors: dict[str, str]
    """Error by function, for scores that could not be computed."""
    explanations: dict[str, str]
    """Explanations of scores by function: those of judges, and of `tools_as_expected`."""
    cost_usd: float | None
    """Cost in US dollars, null if no price is known."""
    tool_calls: int
    """Number of tool calls."""
    row_id: str
    """Hash of the row's content and its occurrence number."""


class EvalRun(Record, frozen=True):
    """One attempt at a row."""

    run_index: int
    """Number of the attempt, from 0."""
    success: bool
    """True if the rollout ended without error, whatever its score."""
    scores: dict[str, float | None]
    """Score by function, null if it could not be computed."""
    duration_ms: float
    """Duration in milliseconds."""
    tokens: int
    """Tokens of all model calls."""
    error: str | None
    """The failure, after its origin: `model: …`, `timeout: …`, `worker: …`."""
    scoring_errors: dict[str, str]
    """Error by function, for scores that could not be computed."""
    explanations: dict[str, str]
    """Explanations of scores by function: those of judges, and of `tools_as_expected`."""
    finish_reason: FinishReason
    """Why the rollout ended."""
    cost_usd: float | None
    """Cost in US dollars, null if no price is known."""


class EvalRow(Record, frozen=True):
    """One row with all its attempts."""

    row_index: int
    """Position of the row in the dataset, from 0."""
    row_id: str
    """Hash of the row's content and its occurrence number."""
    runs: list[EvalRun]
    """The attempts, in order."""


class Flip(Record, frozen=True):
    """An attempt that passes now but failed in the last iteration, or the reverse."""

    row_index: int
    """Position of the row in the dataset, from 0."""
    row_id: str
    """Hash of the row's content and its occurrence number."""
    run_index: int
    """Number of the attempt, from 0."""
    prompt: str
    """Start of the user prompt."""
    before: float | None
    """Reward in the last iteration, or the function's score; null if it was missing."""
    after: float | None
    """Reward now, or the function's score; null if it is missing."""


class Redone(Record, frozen=True):
    """Counts of an iteration's work."""

    rollouts: int
    """Rollouts."""
    scores: int
    """Scores."""
    cached_turns: int
    """Model calls answered from the reply cache."""


class Flips(Record, frozen=True):
    """Attempts with a changed result."""

    passed: list[Flip]
    """Attempts that pass now."""
    failed: list[Flip]
    """Attempts that fail now."""


class Flipped(Flips, frozen=True):
    """Attempts with a changed result: by all functions together, and by each."""

    functions: dict[str, Flips]
    """Attempts with a changed result by one function, for each function that has some."""


class ToolChanges(Record, frozen=True):
    """Names of tools added, removed or changed since the last iteration."""

    added: list[str]
    removed: list[str]
    changed: list[str]


class WatchIteration(Record, frozen=True):
    """One iteration of `--watch`."""

    number: int
    """Number of the iteration, from 1."""
    trigger: list[str]
    """The changed files that started the iteration, or `start`, or the key pressed."""
    redone: Redone
    """Counts of the iteration's work."""
    flipped: Flipped
    """Attempts with a changed result."""
    tools: ToolChanges
    """Tools that changed."""
    took_ms: float
    """Duration in milliseconds."""
    out_of_budget: bool
    """True if something was not run or scored because the `--max-cost` budget is spent."""


class TestObject(Record, Generic[Rows], frozen=True):
    """The results of `osmosis test`."""

    config: TestConfig
    summary: TestSummary
    results: Rows
    """One object per rollout, in the order of the dataset."""
    iteration: WatchIteration | None = None
    """The iteration, with `--watch`."""


class BaselineObject(Record, Generic[Rows], frozen=True):
    """The baseline's results on the same rows."""

    model: str
    """Name of the model."""
    stand_in: bool
    """True for an offline model: the scores say nothing about a model."""
    failed: int
    """Rollouts that failed or did not run."""
    total_duration_ms: float
    """Sum of the rollouts' durations in milliseconds."""
    total_tokens: int
    """Tokens of all rollouts."""
    cost_usd: float | None
    """Cost of all rollouts in US dollars, null if no price is known."""
    eval_fns: dict[str, FunctionStatistics]
    """Statistics of each function."""
    comparison: dict[str, PairedComparison]
    """The model against the baseline, by function."""
    rows: Rows
    """One object per row, in the order of the dataset."""


class EvalObject(Record, Generic[Rows], frozen=True):
    """The results of `osmosis eval`."""

    config: EvalConfig
    summary: EvalSummary
    rows: Rows
    """One object per row, in the order of the dataset."""
    baseline: BaselineObject[Rows] | None = None
    """The baseline's results, with `--baseline-model`."""
    iteration: WatchIteration | None = None
    """The iteration, with `--watch`."""


class TestResults(TestObject[list[TestRow]], frozen=True):
    """The results of `osmosis test`."""


class EvalResults(EvalObject[list[EvalRow]], frozen=True):
    """The results of `osmosis eval`."""
