"""The report of a finished run: statistics, tools, failures by cause; and its conversion to the documented results."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec

from osmosis_ai.config import RunConfig
from osmosis_ai.options import config_of
from osmosis_ai.records import CallSummary, Failure, JsonObject, ModelSpec, Origin, Outcome, Record, Score, Usage
from osmosis_ai.reward_fn.statistics import FunctionStatistics, PairedComparison, paired, summarize
from osmosis_ai.runtime.protocol import Ready
from osmosis_ai.runtime.run import results as objects
from osmosis_ai.runtime.run.plan import BASELINE, POLICY, RunPlan
from osmosis_ai.runtime.run.rows import ListedRow, RowTally, telling_functions
from osmosis_ai.store.queries import Queries
from osmosis_ai.text import failure_line

__all__ = ["Baseline", "Policy", "Report", "build_report", "run_summary", "score_names", "summary_of"]


class Policy(Record, frozen=True):
    """A model and the totals of its rollouts. Tokens and cost don't include judges."""

    model: str
    """Name of the model."""
    base_url: str | None
    """Endpoint of the model, None for the provider's default."""
    stand_in: bool
    """True for an offline model: the scores say nothing about a model."""
    params: JsonObject
    """Request parameters sent to the model."""
    planned: int
    """Rollouts planned."""
    rollouts: int
    """Rollouts recorded."""
    failed: int
    """Rollouts that ended in an error."""
    removed: int
    """Rollouts that their grader removed from every count."""
    duration_ms: float
    """Sum of the rollouts' durations in milliseconds."""
    usage: Usage
    """Tokens of all rollouts."""
    cost_usd: float | None
    """Cost of all rollouts in US dollars, None if no price is known."""
    functions: dict[str, FunctionStatistics]
    """Statistics of each function on these rollouts."""

    @property
    def missing(self) -> int:
        """Planned rollouts without a record."""
        return max(self.planned - self.rollouts, 0)

    @property
    def passed(self) -> int:
        """Rollouts that ended without error, whatever their score; without those removed."""
        return self.rollouts - self.failed - self.removed


class Baseline(Policy, frozen=True):
    """The baseline model on the same rows."""

    comparison: dict[str, PairedComparison]
    """Policy against baseline, by function: a win is a row where the policy is better."""


class Report(Record, frozen=True, kw_only=True):
    """The report of a run. It holds only summaries; `outcomes` and `results` read the run store.

    Example:
        >>> report = osmosis_ai.run(RunConfig.of(mcp="./mcp", dataset="data.jsonl"))
        >>> print(report.whole, {name: one.mean for name, one in report.functions.items()})
    """

    command: Literal["test", "eval"]
    """Kind of run, which decides the form of its results."""
    run_id: str
    """Id of the run in the run store."""
    store: str
    """Path of the run store."""
    dataset: str
    """Path of the dataset."""
    agent: str | None
    """Agent loop named by the config, None for the built-in one."""
    rows: int
    """Selected rows of the dataset."""
    n: int
    """Attempts per row."""
    pass_threshold: float
    """Lowest score with which an attempt passes."""
    policy: Policy
    """The model and its rollouts."""
    baseline: Baseline | None
    """The baseline model and its rollouts, None if there is none."""
    scoring_errors: int
    """Scores that could not be computed, including the baseline's."""
    tools: dict[str, objects.ToolStatistics]
    """Statistics of each tool that the policy called."""
    failures: list[objects.Cause]
    """Failures by cause, most frequent first, including the baseline's."""
    tool_errors: list[objects.Cause]
    """Failed tool calls of the policy by cause, most frequent first."""
    judges: objects.JudgeTotals
    """Requests of rubrics to their judges."""
    wall_ms: float
    """Time from the first rollout to the last record, in milliseconds."""
    rows_below: int
    """Rows with an attempt that failed, lacks a score, or scored below the pass threshold."""
    below: list[ListedRow]
    """The first of these rows."""
    others: list[ListedRow]
    """The first of all other rows."""
    not_scored: list[Failure] = []
    """Files and functions that could not be loaded, and were left out of scoring (`--keep-going`)."""
    changed_files: list[str] = []
    """The dataset and files of the repository that changed during the run; the results are those of its start."""
    interactive: bool = False
    """True if the user stepped through the run."""

    @property
    def functions(self) -> dict[str, FunctionStatistics]:
        """Statistics of each function on the policy's rollouts."""
        return self.policy.functions

    @property
    def usage(self) -> Usage:
        """Tokens of the policy's rollouts."""
        return self.policy.usage

    @property
    def cost_usd(self) -> float | None:
        """Cost of the policy's rollouts in US dollars, None if no price is known."""
        return self.policy.cost_usd

    @property
    def whole(self) -> bool:
        """True if every rollout ran without error and was scored by every function."""
        unscored = self.scoring_errors or self.not_scored
        return self.complete and not unscored and not any(policy.failed for policy in self._policies)

    @property
    def complete(self) -> bool:
        """True if every planned rollout is recorded, whether or not it failed."""
        return not any(policy.missing for policy in self._policies)

    @property
    def _policies(self) -> list[Policy]:
        return [self.policy] if self.baseline is None else [self.policy, self.baseline]

    def outcomes(self) -> Iterator[Outcome]:
        """Stream every rollout with its scores but without its trajectory, in the order of the dataset.

        Raises:
            StoreError: The run store can't be read.
        """
        return Queries(Path(self.store)).outcomes(self.run_id)

    def results(self) -> objects.TestResults | objects.EvalResults:
        """Return the documented results with all rows, as records.

        Raises:
            StoreError: The run store can't be read.
        """
        # Through JSON, so that these records can't differ from the written results.
        if self.command == "test":
            return msgspec.json.decode(self.to_json(), type=objects.TestResults)
        return msgspec.json.decode(self.to_json(), type=objects.EvalResults)

    def to_json(
        self,
        outcomes: Callable[[], Iterable[Outcome]] | None = None,
        *,
        iteration: objects.WatchIteration | None = None,
    ) -> bytes:
        """Return the documented results as JSON; only the encoded rows are held in memory.

        Args:
            outcomes: Returns the rollouts in the order of the dataset; by default, those of the run store.
            iteration: The iteration of watch mode that has ended.

        Raises:
            StoreError: The run store can't be read.
        """
        outcomes = outcomes or self.outcomes
        if self.command == "test":
            rows = _encoded(_test_row(outcome, self.functions) for outcome in outcomes())
            return msgspec.json.encode(objects.TestObject(_test_config(self), _test_summary(self), rows, iteration))
        rows = _encoded(_eval_rows(outcomes(), POLICY, self.functions))
        # A second pass, because the stream interleaves both policies.
        baseline = None if self.baseline is None else _baseline_object(self.baseline, outcomes())
        return msgspec.json.encode(
            objects.EvalObject(_eval_config(self), _eval_summary(self), rows, baseline, iteration)
        )


def build_report(
    plan: RunPlan,
    functions: list[str],
    outcomes: Iterable[Outcome],
    *,
    run_id: str,
    store: Path,
    wall_ms: float,
    not_scored: Sequence[Failure] = (),
    changed_files: Sequence[str] = (),
    interactive: bool = False,
) -> Report:
    """Summarize a run in one pass, with a few numbers per rollout in memory.

    `functions` are the names of the scoring functions, `outcomes` all stored rollouts; `wall_ms` is the time from the
    first rollout to the last record; `not_scored` and `changed_files` are as in the report.
    """
    grid = _ScoreGrid(functions)
    tallies = {policy: _PolicyTally() for policy in plan.policies}
    tools: dict[str, _ToolTally] = {}
    failures, tool_errors = _FailureTally(), _FailureTally()
    judges = objects.JudgeTotals(0, 0, None)
    rows = RowTally(functions, plan.config.scoring.pass_threshold)
    for outcome in outcomes:
        tallies[outcome.policy].add(outcome)
        counts = outcome.finish_reason != "removed"
        if counts:
            grid.add(outcome)
        if outcome.policy == POLICY:
            if counts:
                rows.add(outcome)
            for call in outcome.calls:
                tools.setdefault(call.name, _ToolTally()).add(call)
                if call.failure is not None:
                    tool_errors.add(outcome, call.failure, call.name)
        if outcome.failure is not None:
            failures.add(outcome, outcome.failure, None)
        for name, score in outcome.scores.items():
            judges = _with_judges(judges, score)
            if score.failure is not None:
                failures.add(outcome, score.failure, name)
    summaries = {
        policy: tally.summary(
            plan.policies[policy],
            plan.total_rows * plan.config.scoring.n,
            {name: grid.statistics(name, policy, plan.config.scoring.pass_threshold) for name in functions},
        )
        for policy, tally in tallies.items()
    }
    baseline = summaries.get(BASELINE)
    telling = telling_functions(summaries[POLICY].functions, plan.config.scoring.pass_threshold)
    rows_below, below, others = rows.listed(telling)
    return Report(
        command="test" if plan.config.command == "test" else "eval",
        run_id=run_id,
        store=str(store),
        dataset=plan.dataset,
        agent=plan.agent,
        rows=plan.total_rows,
        n=plan.config.scoring.n,
        pass_threshold=plan.config.scoring.pass_threshold,
        policy=summaries[POLICY],
        baseline=None
        if baseline is None
        else Baseline(**msgspec.structs.asdict(baseline), comparison={name: grid.paired(name) for name in functions}),
        scoring_errors=grid.scoring_errors,
        tools={name: tally.statistics() for name, tally in sorted(tools.items())},
        failures=failures.causes(),
        tool_errors=tool_errors.causes(),
        judges=judges,
        wall_ms=round(wall_ms, 1),
        rows_below=rows_below,
        below=below,
        others=others,
        not_scored=list(not_scored),
        changed_files=list(changed_files),
        interactive=interactive,
    )


def score_names(loaded: Ready, scored: Iterable[str]) -> list[str]:
    """List the names under which scores are reported: the functions, and the agent loop if it gave scores."""
    own = [name for name in scored if name == loaded.agent and name not in loaded.functions]
    return [*own, *loaded.functions]


def run_summary(report: Report) -> JsonObject:
    """Return the few figures that lists of runs show."""
    return {
        "functions": {name: statistics.mean for name, statistics in report.functions.items()},
        "intervals": {name: statistics.confidence_interval for name, statistics in report.functions.items()},
        "planned": report.policy.planned + (report.baseline.planned if report.baseline else 0),
        "total_tokens": report.usage.total_tokens,
        "cost_usd": report.cost_usd,
    }


def summary_of(config: JsonObject, rows: int, functions: list[str], outcomes: Iterable[Outcome]) -> JsonObject:
    """Return the summary of a run by its config and its rollouts, as at its end."""
    models = {POLICY: config["model"], BASELINE: config["baseline_model"]}
    plan = RunPlan(
        config=config_of(RunConfig, {"n": config["n"], "pass_threshold": config["pass_threshold"]}),
        root="",
        store="",
        dataset=config["dataset"],
        policies={policy: ModelSpec(str(name), "", "") for policy, name in models.items() if name is not None},
        functions=[],
        total_rows=rows,
    )
    return run_summary(build_report(plan, functions, outcomes, run_id="", store=Path(), wall_ms=0.0))


# Building


class _PolicyTally:
    """Adds up one policy's rollouts."""

    def __init__(self) -> None:
        self._rollouts = self._failed = self._removed = self._prompt = self._completion = self._tokens = 0
        self._duration = 0.0
        self._cost: float | None = None

    def add(self, outcome: Outcome) -> None:
        self._rollouts += 1
        self._failed += outcome.failure is not None
        self._removed += outcome.finish_reason == "removed"
        self._duration += outcome.duration_ms
        self._prompt += outcome.usage.prompt_tokens
        self._completion += outcome.usage.completion_tokens
        self._tokens += outcome.usage.total_tokens
        if outcome.cost_usd is not None:
            self._cost = (self._cost or 0.0) + outcome.cost_usd

    def summary(self, spec: ModelSpec, planned: int, functions: dict[str, FunctionStatistics]) -> Policy:
        return Policy(
            model=spec.name,
            base_url=spec.base_url,
            stand_in=spec.stand_in,
            params=spec.params,
            planned=planned,
            rollouts=self._rollouts,
            failed=self._failed,
            removed=self._removed,
            duration_ms=round(self._duration, 1),
            usage=Usage(self._prompt, self._completion, self._tokens),
            cost_usd=self._cost,
            functions=functions,
        )


class _ToolTally:
    """Totals of one tool. Durations are plain doubles, so a hundred thousand calls take less than a megabyte."""

    def __init__(self) -> None:
        self._durations = array("d")
        self._errors: Counter[str] = Counter()

    def add(self, call: CallSummary) -> None:
        self._durations.append(call.duration_ms)
        if call.error is not None:
            self._errors[call.error] += 1

    def statistics(self) -> objects.ToolStatistics:
        ordered = sorted(self._durations)
        return objects.ToolStatistics(
            calls=len(ordered),
            errors=dict(self._errors.most_common()),
            median_ms=round(_quantile(ordered, 0.5), 3),
            p95_ms=round(_quantile(ordered, 0.95), 3),
        )


class _ScoreGrid:
    """Scores by function, policy and row. A failed rollout has None, which counts as 0 but isn't a scoring error."""

    def __init__(self, functions: list[str]) -> None:
        self._functions = functions
        self._rows: dict[tuple[str, str], dict[str, list[float | None]]] = {}
        self._errors: Counter[tuple[str, str]] = Counter()
        self.scoring_errors = 0

    def add(self, outcome: Outcome) -> None:
        for name in self._functions:
            rows = self._rows.setdefault((name, outcome.policy), {})
            score = outcome.scores.get(name)
            # Outcomes arrive in the order of run indices, and so a row's scores are in that order.
            rows.setdefault(outcome.row_id, []).append(score.value if score is not None else None)
            if score is not None and score.failure is not None:
                self._errors[name, outcome.policy] += 1
                self.scoring_errors += 1

    def statistics(self, function: str, policy: str, pass_threshold: float) -> FunctionStatistics:
        rows = list(self._rows.get((function, policy), {}).values())
        return summarize(rows, pass_threshold, scoring_errors=self._errors[function, policy])

    def paired(self, function: str) -> PairedComparison:
        ours = self._rows.get((function, POLICY), {})
        theirs = self._rows.get((function, BASELINE), {})
        both = [row for row in ours if row in theirs]
        return paired([ours[row] for row in both], [theirs[row] for row in both])


class _FailureTally:
    """Counts failures by cause, and keeps each cause's first one."""

    def __init__(self) -> None:
        self._first: dict[tuple[Origin, str, str | None, int | None, str | None], objects.Cause] = {}
        self._counts: Counter[tuple[Origin, str, str | None, int | None, str | None]] = Counter()

    def add(self, outcome: Outcome, failure: Failure, function: str | None) -> None:
        # Without the message, which often contains values of the row.
        key = (failure.origin, failure.kind, failure.file, failure.line, function)
        self._counts[key] += 1
        if key not in self._first:
            self._first[key] = objects.Cause(
                origin=failure.origin,
                kind=failure.kind,
                count=1,
                message=failure.message,
                row_index=outcome.row_index,
                run_index=outcome.run_index,
                file=failure.file,
                line=failure.line,
                function=function,
            )

    def causes(self) -> list[objects.Cause]:
        """Return the causes, most frequent first."""
        return [msgspec.structs.replace(self._first[key], count=count) for key, count in self._counts.most_common()]


def _with_judges(judges: objects.JudgeTotals, score: Score) -> objects.JudgeTotals:
    for call in score.judge_calls:
        cost = judges.cost_usd if call.cost_usd is None else (judges.cost_usd or 0.0) + call.cost_usd
        judges = objects.JudgeTotals(judges.calls + 1, judges.total_tokens + call.usage.total_tokens, cost)
    return judges


def _quantile(ordered: list[float], fraction: float) -> float:
    """Return the nearest-rank quantile of sorted values."""
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)] if ordered else 0.0


# The documented results


def _test_config(report: Report) -> objects.TestConfig:
    return objects.TestConfig(
        model=report.policy.model,
        base_url=report.policy.base_url,
        stand_in=report.policy.stand_in,
        params=report.policy.params,
        dataset=report.dataset,
        run_id=report.run_id,
        agent=report.agent,
        interactive=report.interactive,
    )


def _eval_config(report: Report) -> objects.EvalConfig:
    return objects.EvalConfig(
        **msgspec.structs.asdict(_test_config(report)),
        n_runs=report.n,
        pass_threshold=report.pass_threshold,
        eval_fns=list(report.functions),
        baseline_model=None if report.baseline is None else report.baseline.model,
    )


def _totals(report: Report) -> objects.RunTotals:
    policy = report.policy
    return objects.RunTotals(
        passed=policy.passed,
        # A rollout that never ran counts as failed too.
        failed=policy.failed + policy.missing,
        missing=policy.missing,
        removed=policy.removed,
        total_duration_ms=policy.duration_ms,
        total_tokens=policy.usage.total_tokens,
        cost_usd=policy.cost_usd,
        wall_ms=report.wall_ms,
        scoring_errors=report.scoring_errors,
        judges=report.judges,
        tools=report.tools,
        failures=report.failures,
        tool_errors=report.tool_errors,
        not_scored=report.not_scored,
        changed_files=report.changed_files,
    )


def _test_summary(report: Report) -> objects.TestSummary:
    totals = msgspec.structs.asdict(_totals(report))
    return objects.TestSummary(total=report.policy.planned, **totals, functions=report.functions)


def _eval_summary(report: Report) -> objects.EvalSummary:
    totals = msgspec.structs.asdict(_totals(report))
    return objects.EvalSummary(
        total_rows=report.rows, total_runs=report.policy.planned, eval_fns=report.functions, **totals
    )


def _baseline_object(baseline: Baseline, outcomes: Iterable[Outcome]) -> objects.BaselineObject[msgspec.Raw]:
    return objects.BaselineObject(
        model=baseline.model,
        stand_in=baseline.stand_in,
        failed=baseline.failed + baseline.missing,
        total_duration_ms=baseline.duration_ms,
        total_tokens=baseline.usage.total_tokens,
        cost_usd=baseline.cost_usd,
        eval_fns=baseline.functions,
        comparison=baseline.comparison,
        rows=_encoded(_eval_rows(outcomes, BASELINE, baseline.functions)),
    )


def _encoded(rows: Iterable[Record]) -> msgspec.Raw:
    """Encode rows as one JSON array, which takes less memory than the records."""
    encoder = msgspec.json.Encoder()
    text = bytearray(b"[")
    for row in rows:
        if len(text) > 1:
            text += b","
        # Not `encode_into`, which over-allocates the buffer by half.
        text += encoder.encode(row)
    text += b"]"
    return msgspec.Raw(text)


def _test_row(outcome: Outcome, functions: Iterable[str]) -> objects.TestRow:
    usage = outcome.usage
    return objects.TestRow(
        row_index=outcome.row_index,
        success=outcome.failure is None,
        error=None if outcome.failure is None else failure_line(outcome.failure),
        duration_ms=outcome.duration_ms,
        token_usage=usage.as_object(),
        reward=outcome.reward,
        finish_reason=outcome.finish_reason,
        scores=_values(outcome, functions),
        scoring_errors=_scoring_errors(outcome),
        explanations=_explanations(outcome),
        cost_usd=outcome.cost_usd,
        tool_calls=len(outcome.calls),
        row_id=outcome.row_id,
    )


def _eval_rows(outcomes: Iterable[Outcome], policy: str, functions: Iterable[str]) -> Iterator[objects.EvalRow]:
    own = (outcome for outcome in outcomes if outcome.policy == policy)
    # `groupby` needs the attempts of a row to be adjacent, as they are in the store's order.
    for row_id, attempts in groupby(own, key=lambda outcome: outcome.row_id):
        first, *others = attempts
        yield objects.EvalRow(first.row_index, row_id, [_eval_run(outcome, functions) for outcome in (first, *others)])


def _eval_run(outcome: Outcome, functions: Iterable[str]) -> objects.EvalRun:
    return objects.EvalRun(
        run_index=outcome.run_index,
        success=outcome.failure is None,
        scores=_values(outcome, functions),
        duration_ms=outcome.duration_ms,
        tokens=outcome.usage.total_tokens,
        error=None if outcome.failure is None else failure_line(outcome.failure),
        scoring_errors=_scoring_errors(outcome),
        explanations=_explanations(outcome),
        finish_reason=outcome.finish_reason,
        cost_usd=outcome.cost_usd,
    )


def _values(outcome: Outcome, functions: Iterable[str]) -> dict[str, float | None]:
    """Return the scores in the order of the functions, as everywhere else."""
    return {name: outcome.scores[name].value for name in functions if name in outcome.scores}


def _scoring_errors(outcome: Outcome) -> dict[str, str]:
    return {name: failure_line(score.failure) for name, score in outcome.scores.items() if score.failure}


def _explanations(outcome: Outcome) -> dict[str, str]:
    return {name: score.explanation for name, score in outcome.scores.items() if score.explanation is not None}
