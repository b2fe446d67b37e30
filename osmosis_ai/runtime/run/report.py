"""What a run came to: statistics, tools, failures by cause; and the documented JSON objects."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from osmosis_ai.records import CallSummary, Failure, JudgeCall, Outcome, Record, Usage
from osmosis_ai.reward_fn.statistics import FunctionStatistics, PairedComparison, paired, summarize
from osmosis_ai.runtime.protocol import Ready
from osmosis_ai.runtime.run.run import BASELINE, POLICY, RunPlan

__all__ = [
    "Cause",
    "Comparison",
    "JudgeTotals",
    "Report",
    "ToolStatistics",
    "Totals",
    "build_report",
    "results_object",
    "run_summary",
    "score_names",
]


class ToolStatistics(Record, frozen=True):
    """All calls of one tool. Times in milliseconds."""

    name: str
    calls: int
    errors: dict[str, int]
    median_ms: float
    p95_ms: float


class Cause(Record, frozen=True):
    """Failures that share their origin, kind and place, with the first of them as the example."""

    origin: str
    kind: str
    count: int
    message: str
    row_index: int
    run_index: int
    file: str | None = None
    line: int | None = None
    function: str | None = None


class Comparison(Record, frozen=True):
    """The policy against the baseline on the same rows, for one function."""

    function: str
    baseline: FunctionStatistics
    paired: PairedComparison


class Totals(Record, frozen=True):
    """One policy's rollouts. Times in milliseconds; tokens and cost of rollouts only."""

    planned: int
    rollouts: int = 0
    failed: int = 0
    duration_ms: float = 0.0
    usage: Usage = Usage()
    cost_usd: float | None = None

    @property
    def missing(self) -> int:
        """Rollouts that were planned and have no record."""
        return max(self.planned - self.rollouts, 0)

    @property
    def passed(self) -> int:
        """Rollouts that ended without error, whatever their score."""
        return self.rollouts - self.failed


class JudgeTotals(Record, frozen=True):
    """What rubrics asked of their judges, which no rollout's tokens and cost contain."""

    calls: int = 0
    total_tokens: int = 0
    cost_usd: float | None = None

    def __add__(self, call: JudgeCall) -> JudgeTotals:
        cost = self.cost_usd if call.cost_usd is None else (self.cost_usd or 0.0) + call.cost_usd
        return JudgeTotals(self.calls + 1, self.total_tokens + call.usage.total_tokens, cost)


class Report(Record, frozen=True):
    """Everything a finished run says about itself. `tools` are the policy's, `causes` also the baseline's."""

    policy: Totals
    functions: dict[str, FunctionStatistics]
    scoring_errors: int
    tools: list[ToolStatistics]
    causes: list[Cause]
    baseline: Totals | None = None
    comparisons: list[Comparison] = []
    judges: JudgeTotals = JudgeTotals()

    @property
    def whole(self) -> bool:
        """Whether everything ran and everything was scored."""
        everyone = [self.policy] if self.baseline is None else [self.policy, self.baseline]
        return self.scoring_errors == 0 and not any(totals.failed or totals.missing for totals in everyone)


def build_report(plan: RunPlan, functions: list[str], outcomes: Iterable[Outcome]) -> Report:
    """Summarize a run in one pass; what is kept per rollout is a few numbers.

    Args:
        plan: What was to be run.
        functions: The names of the functions that score.
        outcomes: Every stored rollout.
    """
    grid = _ScoreGrid(functions)
    totals = {policy: _TotalsTally() for policy in plan.policies}
    tools: dict[str, _ToolTally] = {}
    causes: dict[tuple[Any, ...], list[Any]] = {}
    judges = JudgeTotals()
    for outcome in outcomes:
        totals[outcome.policy].add(outcome)
        grid.add(outcome)
        if outcome.policy == POLICY:
            for call in outcome.calls:
                tools.setdefault(call.name, _ToolTally()).add(call)
        if outcome.failure is not None:
            _count(causes, outcome, outcome.failure, None)
        for name, score in outcome.scores.items():
            for judged in score.judge_calls:
                judges += judged
            if score.failure is not None:
                _count(causes, outcome, score.failure, name)
    planned = plan.total_rows * plan.n
    compared = BASELINE in plan.policies
    return Report(
        policy=totals[POLICY].totals(planned),
        baseline=totals[BASELINE].totals(planned) if compared else None,
        functions={name: grid.statistics(name, POLICY, plan.pass_threshold) for name in functions},
        scoring_errors=grid.scoring_errors,
        judges=judges,
        comparisons=[
            Comparison(name, grid.statistics(name, BASELINE, plan.pass_threshold), grid.paired(name))
            for name in functions
            if compared
        ],
        tools=[tally.statistics(name) for name, tally in sorted(tools.items())],
        causes=sorted(
            (Cause(key[0], key[1], *values) for key, values in causes.items()), key=lambda cause: -cause.count
        ),
    )


def results_object(
    plan: RunPlan, report: Report, outcomes: Callable[[], Iterator[Outcome]], *, wall_ms: float, run_id: str
) -> dict[str, Any]:
    """The object that `-o` and `--json` write, `rows` or `results` included; those are encoded already.

    Args:
        plan: What was run.
        report: Its summary.
        outcomes: Gives every stored rollout, in row order.
        wall_ms: Milliseconds from the first rollout to the last record.
        run_id: The run's id in the store.
    """
    totals = report.policy
    common: dict[str, Any] = {
        "passed": totals.passed,
        "failed": totals.failed + totals.missing,
        "missing": totals.missing,
        **_spent(totals),
        "wall_ms": round(wall_ms, 1),
        "scoring_errors": report.scoring_errors,
        "judges": _plain(report.judges),
        "tools": {tool.name: _without(tool, "name") for tool in report.tools},
        "failures": [_plain(cause) for cause in report.causes],
    }
    config: dict[str, Any] = {
        "model": plan.policies[POLICY].name,
        "base_url": plan.policies[POLICY].base_url,
        "stand_in": plan.policies[POLICY].engine == "offline",
        "params": plan.policies[POLICY].params,
        "dataset": plan.dataset,
        "run_id": run_id,
        **({} if plan.agent is None else {"agent": plan.agent}),
    }
    functions = {name: _function_object(statistics) for name, statistics in report.functions.items()}
    if plan.command == "test":
        return {
            "config": config,
            "summary": {
                "total": totals.planned,
                **common,
                "functions": functions,
            },
            "results": _encoded(_test_row(outcome, functions) for outcome in outcomes()),
        }
    result: dict[str, Any] = {
        "config": {
            **config,
            "n_runs": plan.n,
            "pass_threshold": plan.pass_threshold,
            "eval_fns": list(report.functions),
        },
        "summary": {
            "total_rows": plan.total_rows,
            "total_runs": totals.planned,
            "eval_fns": functions,
            **common,
        },
        "rows": _encoded(_eval_rows((outcome for outcome in outcomes() if outcome.policy == POLICY), functions)),
    }
    if report.baseline is not None:
        result["config"]["baseline_model"] = plan.policies[BASELINE].name
        result["baseline"] = {
            "model": plan.policies[BASELINE].name,
            "stand_in": plan.policies[BASELINE].engine == "offline",
            "failed": report.baseline.failed + report.baseline.missing,
            **_spent(report.baseline),
            "eval_fns": {
                comparison.function: _function_object(comparison.baseline) for comparison in report.comparisons
            },
            "comparison": {comparison.function: _plain(comparison.paired) for comparison in report.comparisons},
            "rows": _encoded(_eval_rows((outcome for outcome in outcomes() if outcome.policy == BASELINE), functions)),
        }
    return result


def _encoded(rows: Iterable[dict[str, Any]]) -> list[msgspec.Raw]:
    """Rows as they will be written, which takes less memory than rows as objects."""
    return [msgspec.Raw(msgspec.json.encode(row)) for row in rows]


def _spent(totals: Totals) -> dict[str, Any]:
    return {
        "total_duration_ms": totals.duration_ms,
        "total_tokens": totals.usage.total_tokens,
        "cost_usd": totals.cost_usd,
    }


def score_names(loaded: Ready, scored: Iterable[str]) -> list[str]:
    """Under which names scores are reported: the functions, and the agent loop when it has given rewards of its own.

    Args:
        loaded: What the workers have loaded.
        scored: The names under which there are scores.
    """
    own = [name for name in scored if name == loaded.agent and name not in loaded.functions]
    return [*own, *loaded.functions]


def run_summary(report: Report) -> dict[str, Any]:
    """The few figures of a run that lists of runs show."""
    return {
        "functions": {name: statistics.mean for name, statistics in report.functions.items()},
        "planned": report.policy.planned + (report.baseline.planned if report.baseline else 0),
        "total_tokens": report.policy.usage.total_tokens,
        "cost_usd": report.policy.cost_usd,
    }


class _TotalsTally:
    """Adds up one policy's rollouts."""

    def __init__(self) -> None:
        self._rollouts = self._failed = self._prompt = self._completion = self._tokens = 0
        self._duration = 0.0
        self._cost: float | None = None

    def add(self, outcome: Outcome) -> None:
        self._rollouts += 1
        self._failed += outcome.failure is not None
        self._duration += outcome.duration_ms
        self._prompt += outcome.usage.prompt_tokens
        self._completion += outcome.usage.completion_tokens
        self._tokens += outcome.usage.total_tokens
        if outcome.cost_usd is not None:
            self._cost = (self._cost or 0.0) + outcome.cost_usd

    def totals(self, planned: int) -> Totals:
        usage = Usage(self._prompt, self._completion, self._tokens)
        return Totals(planned, self._rollouts, self._failed, round(self._duration, 1), usage, self._cost)


class _ToolTally:
    """Durations as plain doubles: a run of a hundred thousand calls keeps less than a megabyte."""

    def __init__(self) -> None:
        self._durations = array("d")
        self._errors: Counter[str] = Counter()

    def add(self, call: CallSummary) -> None:
        self._durations.append(call.duration_ms)
        if call.error is not None:
            self._errors[call.error] += 1

    def statistics(self, name: str) -> ToolStatistics:
        ordered = sorted(self._durations)
        return ToolStatistics(
            name=name,
            calls=len(ordered),
            errors=dict(self._errors.most_common()),
            median_ms=round(_quantile(ordered, 0.5), 3),
            p95_ms=round(_quantile(ordered, 0.95), 3),
        )


class _ScoreGrid:
    """Scores by function, policy and row. A rollout that failed has None: it counts as 0 and is no scoring error."""

    def __init__(self, functions: list[str]) -> None:
        self._functions = functions
        self._rows: dict[tuple[str, str], dict[str, list[float | None]]] = {}
        self._errors: Counter[tuple[str, str]] = Counter()
        self.scoring_errors = 0

    def add(self, outcome: Outcome) -> None:
        for name in self._functions:
            rows = self._rows.setdefault((name, outcome.policy), {})
            score = outcome.scores.get(name)
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


def _count(causes: dict[tuple[Any, ...], list[Any]], outcome: Outcome, failure: Failure, function: str | None) -> None:
    key = (failure.origin, failure.kind, failure.file, failure.line, function)
    known = causes.get(key)
    if known is None:
        example = [failure.message, outcome.row_index, outcome.run_index, failure.file, failure.line, function]
        causes[key] = [1, *example]
    else:
        known[0] += 1


def _quantile(ordered: list[float], fraction: float) -> float:
    """The nearest-rank quantile of sorted values."""
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _function_object(statistics: FunctionStatistics) -> dict[str, Any]:
    plain = _without(statistics, "pass_at_k", "pass_hat_k")
    plain.update({f"pass_at_{k}": value for k, value in statistics.pass_at_k.items()})
    plain.update({f"pass_hat_{k}": value for k, value in statistics.pass_hat_k.items()})
    return plain


def _test_row(outcome: Outcome, functions: Iterable[str]) -> dict[str, Any]:
    return {
        "row_index": outcome.row_index,
        "success": outcome.failure is None,
        "error": _error_text(outcome.failure),
        "duration_ms": outcome.duration_ms,
        "token_usage": _plain(outcome.usage),
        "reward": outcome.reward,
        "finish_reason": outcome.finish_reason,
        "scores": _values(outcome, functions),
        "scoring_errors": _scoring_errors(outcome),
        "explanations": _explanations(outcome),
        "cost_usd": outcome.cost_usd,
        "tool_calls": len(outcome.calls),
        "row_id": outcome.row_id,
    }


def _eval_rows(outcomes: Iterable[Outcome], functions: Iterable[str]) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] | None = None
    for outcome in outcomes:
        if row is None or row["row_id"] != outcome.row_id:
            if row is not None:
                yield row
            row = {"row_index": outcome.row_index, "row_id": outcome.row_id, "runs": []}
        row["runs"].append(
            {
                "run_index": outcome.run_index,
                "success": outcome.failure is None,
                "scores": _values(outcome, functions),
                "duration_ms": outcome.duration_ms,
                "tokens": outcome.usage.total_tokens,
                "error": _error_text(outcome.failure),
                "scoring_errors": _scoring_errors(outcome),
                "explanations": _explanations(outcome),
                "finish_reason": outcome.finish_reason,
                "cost_usd": outcome.cost_usd,
            }
        )
    if row is not None:
        yield row


def _values(outcome: Outcome, functions: Iterable[str]) -> dict[str, float | None]:
    """Scores in the order of the functions, as everywhere else."""
    return {name: outcome.scores[name].value for name in functions if name in outcome.scores}


def _scoring_errors(outcome: Outcome) -> dict[str, str]:
    return {name: _error_text(score.failure) or "" for name, score in outcome.scores.items() if score.failure}


def _explanations(outcome: Outcome) -> dict[str, str]:
    return {name: score.explanation for name, score in outcome.scores.items() if score.explanation is not None}


def _error_text(failure: Failure | None) -> str | None:
    return None if failure is None else f"{failure.origin}: {failure.message}"


def _plain(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _without(record: Record, *names: str) -> dict[str, Any]:
    return {name: value for name, value in _plain(record).items() if name not in names}
