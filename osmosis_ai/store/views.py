"""The JSON objects that show stored runs, in `osmosis runs … --json` and in the viewer.

They always include every field, also in nested records; only pass@k and pass^k are left out where they don't apply.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

import msgspec

from osmosis_ai.records import (
    AgentReport,
    Failure,
    FinishReason,
    Message,
    Record,
    Row,
    Score,
    ToolCall,
    Turn,
    Usage,
    Verdict,
)
from osmosis_ai.reward_fn.statistics import FunctionStatistics
from osmosis_ai.store.alignment import AlignedStep
from osmosis_ai.store.queries import FunctionTotals, RunInfo, ScoredRollout, SharedRows
from osmosis_ai.store.tables import RunStatus
from osmosis_ai.store.verdicts import Verdicts
from osmosis_ai.text import iso_time

ShownStatus: TypeAlias = Literal[RunStatus, "killed"]

R = TypeVar("R", bound="_Rollout")


class ImportedFrom(Record, frozen=True):
    """The origin of a run that another tool ran (`osmosis import`)."""

    format: str
    """Format of the file."""
    file: str
    """Path of the file when it was imported."""
    sha256: str
    """SHA-256 of the file."""
    tool: str
    """The tool that ran it, with its version if the file has it."""
    task: str | None
    """Task or environment that ran, null if the file doesn't name one."""
    scorers: list[str]
    """Scorers that the file names."""
    unreadable: int
    """Samples that could not be read."""
    left_out: dict[str, int]
    """Rollouts left out, by reason."""


class RunView(Record, frozen=True):
    """A stored run."""

    id: str
    """Id of the run."""
    name: str | None
    """Name of the run (`--name`), null if it has none."""
    command: str
    """`test`, `eval`, or `import` for a run of another tool."""
    status: ShownStatus
    """`killed` if the run didn't end and its process is gone."""
    created_at: str
    """Start of the run, in ISO 8601."""
    finished_at: str | None
    """End of the run, in ISO 8601; null while it runs."""
    model: str | None
    """Name of the model."""
    base_url: str | None
    """Endpoint of the model, null for the provider's default."""
    stand_in: bool
    """True for an offline model: the scores say nothing about a model."""
    baseline_model: str | None
    """Name of the baseline model, null if there is none."""
    dataset: str | None
    """Path of the dataset."""
    shard: str | None
    """The shard of the rows that the run is, as in 2/4; null for all."""
    n: int | None
    """Attempts per row."""
    planned: int | None
    """Rollouts planned."""
    rollouts: int
    """Rollouts recorded."""
    failed: int
    """Recorded rollouts that failed."""
    functions: dict[str, float | None]
    """Mean score by function."""
    intervals: dict[str, tuple[float, float] | None]
    """95 % confidence interval of the mean by function, `[low, high]`; null or absent where it isn't known."""
    total_tokens: int | None
    """Tokens of all rollouts, null while it runs."""
    cost_usd: float | None
    """Cost of all rollouts in US dollars, null if no price is known."""
    imported: ImportedFrom | None
    """Where an imported run comes from, null for any other."""


class _Rollout(Record, frozen=True, kw_only=True):
    """The fields shown for every rollout."""

    id: str
    """Id of the rollout, unique in its run."""
    row_index: int
    """Position of the row in the dataset, from 0."""
    row_id: str
    """Hash of the row's content and its occurrence number."""
    run_index: int
    """Attempt of the row, from 0."""
    policy: str
    """`policy` or `baseline`."""
    finish_reason: FinishReason
    """Why the rollout ended."""
    duration_ms: float
    """Duration in milliseconds."""
    failure: Failure | None
    """Why the rollout failed, null if it didn't."""
    usage: Usage
    """Tokens of all model calls."""
    cost_usd: float | None
    """Cost in US dollars, null if no price is known."""
    agent: AgentReport | None
    """Report of the repository's own agent loop, null for the built-in one."""
    requests: int
    """Model requests, retries included."""
    attempt: int
    """2 if this record replaced a first one."""
    started_at: str
    """Start of the rollout, in ISO 8601."""
    finished_at: str
    """End of the rollout, in ISO 8601."""
    scores: dict[str, Score]
    """Score by function."""
    verdict: Verdict | None
    """A person's verdict, null without one."""


class RolloutSummary(_Rollout, frozen=True, kw_only=True):
    """A rollout without its trajectory."""

    turns: int
    """Model calls."""
    tool_calls: int
    """Tool calls."""
    tool_errors: int
    """Tool calls that failed."""


class RolloutDetail(_Rollout, frozen=True, kw_only=True):
    """A rollout with its trajectory and its row."""

    messages: list[Message]
    """The conversation in the OpenAI chat format."""
    turns: list[Turn]
    """The model calls."""
    tool_calls: list[ToolCall]
    """The tool calls."""
    samples: list[Turn]
    """Model calls requested by tools."""
    row: Row
    """The dataset row."""


class ImportProblem(Record, frozen=True):
    """A sample or row that could not be imported."""

    file: str
    """Path of the file."""
    where: str
    """Its place in the file; empty for the file itself."""
    reason: str
    """Why it can't be read."""


class ImportedFiles(Record, frozen=True):
    """`osmosis import`."""

    runs: list[RunView]
    """The runs, in the order of the files."""
    rows: int
    """Dataset rows written."""
    output: str | None
    """Path of the written dataset, null if the files are runs."""
    problems: list[ImportProblem]
    """What could not be read."""


class ListedRuns(Record, frozen=True):
    """`osmosis runs`."""

    runs: list[RunView]
    """The latest runs, newest first."""


class ShownRun(Record, frozen=True):
    """`osmosis runs show`."""

    run: RunView
    functions: list[FunctionTotals]
    """The functions' scores, added up."""
    verdicts: Verdicts | None
    """People's verdicts, and how far the functions agree with them; null without one."""
    rollouts: list[RolloutSummary]
    """Rollouts, ordered by row, attempt and policy."""
    more: int
    """Rollouts beyond `--limit`."""


class ShownRow(Record, frozen=True):
    """`osmosis runs show --row N`."""

    run: RunView
    functions: list[FunctionTotals]
    """The functions' scores, added up."""
    rollouts: list[RolloutDetail]
    """The row's rollouts, ordered by attempt and policy."""
    more: int
    """Rollouts of the row beyond `--limit`."""


class FlippedRow(Record, frozen=True):
    """A row that crossed the pass threshold between the first and the second run."""

    row_index: int
    """Position of the row in the dataset of the first run, from 0."""
    row_id: str
    """Hash of the row's content and its occurrence number."""
    a: float
    """Mean score in the first run."""
    b: float
    """Mean score in the second run."""

    @property
    def passes(self) -> bool:
        """True if the row passes in the second run."""
        return self.b > self.a


class ComparedFunction(Record, frozen=True):
    """One function's scores of the rows in both runs."""

    a: FunctionStatistics
    b: FunctionStatistics
    difference: float
    """Mean over rows of b − a."""
    rows: int
    """Rows compared."""
    wins: int
    """Rows where b is higher."""
    losses: int
    """Rows where a is higher."""
    ties: int
    """Rows where both are equal."""
    standard_error: float | None
    """Standard error of the difference, null for fewer than two rows."""
    confidence_interval: tuple[float, float] | None
    """95 % confidence interval of the difference, `[low, high]`; null for fewer than two rows."""
    same_code: bool | None
    """True if the same code computed the scores of a and b, null if unknown."""
    now_pass: int
    """Rows that pass in b but not in a."""
    now_fail: int
    """Rows that pass in a but not in b."""
    flips: list[FlippedRow]
    """The rows counted in `now_pass` and `now_fail`."""


class ComparedRuns(Record, frozen=True):
    """`osmosis runs compare A B`."""

    a: RunView
    b: RunView
    pass_threshold: float
    """Lowest mean score with which a row passes."""
    rows: SharedRows
    functions: dict[str, ComparedFunction]
    """Comparison by each function that scored both runs."""
    only_in_a: list[str]
    """Functions that scored only a."""
    only_in_b: list[str]
    """Functions that scored only b."""
    notes: list[str]
    """Reasons for caution with the comparison."""


class ComparedRow(Record, frozen=True):
    """`osmosis runs diff A B --row N`: one attempt of a row in two runs, step by step."""

    row_id: str
    """Hash of the row's content and its occurrence number."""
    a: RolloutSummary
    b: RolloutSummary
    steps: list[AlignedStep]
    """The steps of both conversations, aligned on role, tool and canonical arguments."""
    first_difference: int | None
    """Position in `steps` of the first one that isn't equal, null if all are."""


class RescoredRun(Record, frozen=True):
    """`osmosis runs rescore`."""

    run_id: str
    """Id of the run."""
    rescored: int
    """Rollouts that were scored."""
    before: dict[str, float]
    """Mean score by function before rescoring."""
    functions: dict[str, FunctionTotals]
    """The functions' scores now."""
    not_scored: list[Failure]
    """Files and functions that could not be loaded, and were left out with `--keep-going`."""


class MovedRun(Record, frozen=True):
    """`osmosis runs push` and `osmosis runs pull`."""

    run_id: str
    """Id of the run."""
    file: str
    """The file that it was written to or read from."""
    new: bool
    """False if the store had the run already."""


class MergedShard(Record, frozen=True):
    """A run that `osmosis runs merge` took."""

    shard: str
    """The shard, as in 2/4."""
    run_id: str
    """Id of its run."""
    store: str
    """The store, file or folder it was found in, as named."""
    rollouts: int
    """Its rollouts."""


class MergedRun(Record, frozen=True):
    """`osmosis runs merge`."""

    run: RunView
    """The run of all shards."""
    shards: list[MergedShard]
    """The shards, in their order."""
    new: bool
    """False if they were merged before."""


class WrittenExport(Record, frozen=True):
    """`osmosis runs export -o FILE`."""

    run_id: str
    """Id of the run."""
    format: str
    """Name of the format."""
    file: str
    """Path of the file."""
    written: int
    """Records written: rollouts, or the format's pairs, prompts or sequences."""
    rollouts: int
    """Rollouts of the run."""
    left_out: dict[str, int] = {}
    """How many rollouts or rows have no record, by reason."""


class RemovedRuns(Record, frozen=True):
    """`osmosis runs rm`."""

    removed: list[str]
    """Ids of the runs that were removed."""


def encode_view(view: Record) -> bytes:
    """Encode a view as JSON on one line."""
    return msgspec.json.encode(_complete(view))


def shown_status(run: RunInfo) -> ShownStatus:
    """Return a run's status; `killed` if its process is gone."""
    return "killed" if run.status == "running" and not run.alive else run.status


def run_view(run: RunInfo) -> RunView:
    """Make the view of a run."""
    config, summary = run.config, run.summary or {}
    return RunView(
        id=run.id,
        name=config.get("name"),
        command=run.command,
        status=shown_status(run),
        created_at=iso_time(run.created_at),
        finished_at=None if run.finished_at is None else iso_time(run.finished_at),
        stand_in=bool(config.get("stand_in")),
        shard=run.identity.get("shard"),
        **{name: config.get(name) for name in ("model", "base_url", "baseline_model", "dataset", "n")},
        planned=config.get("planned", summary.get("planned")),
        rollouts=run.rollouts,
        failed=run.failed,
        functions=summary.get("functions") or {},
        intervals=summary.get("intervals") or {},
        total_tokens=summary.get("total_tokens"),
        cost_usd=summary.get("cost_usd"),
        imported=None if "imported" not in config else msgspec.convert(config["imported"], ImportedFrom),
    )


def rollout_summary(scored: ScoredRollout) -> RolloutSummary:
    """Make the view of a rollout without its trajectory."""
    stored = scored.stored
    counts = {"turns": stored.turns, "tool_calls": stored.tool_calls, "tool_errors": stored.tool_errors}
    return _rollout(RolloutSummary, scored, **counts)


def rollout_detail(scored: ScoredRollout) -> RolloutDetail:
    """Make the view of a rollout, which must have been read with its trajectory."""
    rollout = scored.stored.rollout
    return _rollout(
        RolloutDetail,
        scored,
        messages=rollout.messages,
        turns=rollout.turns,
        tool_calls=rollout.tool_calls,
        samples=rollout.samples,
        row=scored.row,
    )


def _rollout(kind: type[R], scored: ScoredRollout, **more: object) -> R:
    stored, rollout = scored.stored, scored.stored.rollout
    return kind(
        id=rollout.id,
        row_index=rollout.row_index,
        row_id=rollout.row_id,
        run_index=rollout.run_index,
        policy=rollout.policy,
        finish_reason=rollout.finish_reason,
        duration_ms=rollout.duration_ms,
        failure=rollout.failure,
        usage=rollout.usage,
        cost_usd=rollout.cost_usd,
        agent=rollout.agent,
        requests=stored.requests,
        attempt=stored.attempt,
        started_at=iso_time(stored.started_at),
        finished_at=iso_time(stored.finished_at),
        scores=scored.scores,
        verdict=scored.verdict,
        **more,
    )


def _complete(value: object) -> object:
    """Convert records to dicts with every field, even those at their default."""
    # msgspec leaves out fields at their default, here pass@k and pass^k that don't apply.
    if isinstance(value, FunctionStatistics):
        return msgspec.to_builtins(value)
    if isinstance(value, msgspec.Struct):
        return {name: _complete(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: _complete(item) for name, item in value.items()}
    return [_complete(item) for item in value] if isinstance(value, (list, tuple)) else value
