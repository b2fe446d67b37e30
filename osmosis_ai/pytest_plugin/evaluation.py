"""The fixture `evaluate`: run many rows in worker processes, and assert thresholds with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from osmosis_ai.errors import OsmosisError, UsageError
from osmosis_ai.pytest_plugin.harness import fail
from osmosis_ai.pytest_plugin.rollouts import full_name
from osmosis_ai.records import JsonObject, Outcome
from osmosis_ai.reward_fn.statistics import FunctionStatistics, paired
from osmosis_ai.runtime.run.plan import POLICY
from osmosis_ai.store.queries import Queries
from osmosis_ai.text import counted, score_number

if TYPE_CHECKING:
    from osmosis_ai.pytest_plugin.harness import ItemRuns, Options
    from osmosis_ai.runtime.run.report import Report

__all__ = ["Evaluate", "Evaluation"]

MOST_ATTEMPTS = 4
"""Default limit on attempts for an undecided threshold, as a multiple of the initial number."""

Scores = dict[str, list[float | None]]
"""One function's scores by the row's id."""


class Evaluation:
    """The run of many rows.

    Attributes:
        report: The run's report, as `osmosis_ai.run` returns it.
        command: The command that shows it.
    """

    def __init__(self, evaluate: Evaluate, rows: Any, options: Options, report: Report) -> None:
        self.report = report
        self._evaluate = evaluate
        self._rows = rows
        self._options = options

    @property
    def command(self) -> str:
        """The command that shows the run."""
        return f"osmosis runs show {self.report.run_id} --not-passed --store {Path(self.report.store).parent}"

    def statistics(self, function: str) -> FunctionStatistics:
        """Return a function's statistics; raise LookupError if nothing was scored with it."""
        found = self.report.functions.get(full_name(function, self.report.functions))
        if found is None:
            there = ", ".join(self.report.functions) or "nothing was scored"
            raise LookupError(f"there is no score of {function!r}; there are {there}")
        return found

    def mean(self, function: str) -> float:
        """Return a function's mean score; a missing score counts as 0."""
        return self.statistics(function).mean

    def assert_at_least(self, function: str, bound: float, *, max_n: int | None = None) -> None:
        """Assert that a function's mean is at least `bound`, using its 95 % confidence interval.

        Passes if the interval lies above the bound, and fails if it lies below. If the interval contains the bound, the
        rows run again with twice the attempts, up to `max_n`; if it still does, the assertion fails as undecided.
        Earlier attempts are reused, not paid for again.

        Args:
            function: The function's name as in reports, or the part after the colon.
            bound: The lowest acceptable mean.
            max_n: Maximum attempts per row; four times the initial number by default.
        """
        __tracebackhide__ = True
        self._assert_whole()
        most = max_n or self.report.n * MOST_ATTEMPTS
        while True:
            found = self.statistics(function)
            # Without an interval, as for a single row, only the mean can decide.
            low, high = found.confidence_interval or (found.mean, found.mean)
            shown = (
                f"{function}: mean {score_number(found.mean)}, 95 % CI {score_number(low)} to {score_number(high)}, "
            )
            shown += f"{counted(self.report.rows, 'row')} × {self.report.n}"
            if low >= bound:
                return
            if high < bound:
                pytest.fail(f"{shown}: below {bound:g}\nto see it: {self.command}", pytrace=False)
            if self.report.n >= most:
                why = "add rows or raise max_n to decide"
                pytest.fail(f"{shown}: undecided about {bound:g}; {why}\nto see it: {self.command}", pytrace=False)
            self._draw(min(most, self.report.n * 2))

    def assert_not_worse_than(self, other: Evaluation | str | Path, *, function: str | None = None) -> None:
        """Assert that no function's mean is lower than in an earlier run, on their common rows.

        Fails if the 95 % confidence interval of the paired difference lies below 0.

        Args:
            other: An evaluation, a results file of `osmosis eval -o`, or a run of the repository's own store.
            function: The only function to compare; by default every one that both have.
        """
        __tracebackhide__ = True
        self._assert_whole()
        theirs, mine = _scores_of(other, self._evaluate.root), _own_scores(self.report)
        wanted = None if function is None else full_name(function, mine)
        names = [name for name in mine if name in theirs and wanted in (None, name)]
        if not names:
            raise LookupError(f"there is no common function; {other} has {', '.join(theirs) or 'none'}")
        worse = []
        for name in names:
            common = [row for row in mine[name] if row in theirs[name]]
            difference = paired([mine[name][row] for row in common], [theirs[name][row] for row in common])
            interval = difference.confidence_interval
            mean = difference.mean_difference
            if not common:
                raise LookupError(f"{name}: there is no common row; the dataset has changed")
            if interval is not None and mean is not None and interval[1] < 0:
                low, high = map(score_number, interval)
                worse.append(
                    f"{name}: worse by {score_number(-mean)} on {counted(len(common), 'row')}, 95 % CI {low} to {high} "
                    f"({difference.losses} rows lower, {difference.wins} higher)"
                )
        if worse:
            pytest.fail("\n".join([*worse, f"to see it: {self.command}"]), pytrace=False)

    def _assert_whole(self) -> None:
        __tracebackhide__ = True
        # A missing score counts as 0, so a bound would be missed for a reason that isn't the policy's.
        if not self.report.whole:
            cause = self.report.failures[0].message if self.report.failures else "a score is missing"
            pytest.fail(f"the run is incomplete: {cause}\nto see it: {self.command}", pytrace=False)

    def _draw(self, n: int) -> None:
        self.report = self._evaluate.again(self._rows, {**self._options, "n": n})


class Evaluate:
    """The fixture `evaluate`. Calling it runs rows and scores them."""

    def __init__(self, runs: ItemRuns, request: pytest.FixtureRequest) -> None:
        self._runs = runs
        self._request = request
        self.root = runs.harness.root

    def __call__(self, rows: Any = None, *, subtests: bool = False, **options: Any) -> Evaluation:
        """Run rows in worker processes and score them.

        Args:
            rows: A dataset, or rows; by default those of the mark, else `test_data.jsonl`.
            subtests: Report each row as a subtest, where pytest has them (9 and later).
            options: Other options of `osmosis eval`, with `_` for `-`: `limit=40, n=5`; `model` may be a script.
        """
        evaluation = Evaluation(self, rows, options, self.again(rows, options))
        if subtests:
            self._report_rows(evaluation)
        return evaluation

    def again(self, rows: Any, options: Mapping[str, Any]) -> Report:
        """Run rows, reusing the model's replies to equal requests of earlier runs in this session."""
        # The cache's key includes the attempt, so a larger `n` only calls the model for new attempts.
        return self._runs.run("eval", rows if rows is not None else self._runs.rows, {"cache": True, **options})

    def _report_rows(self, evaluation: Evaluation) -> None:
        try:
            subtests = self._request.getfixturevalue("subtests")
        # Before pytest 9, there are no subtests without a plugin.
        except pytest.FixtureLookupError:
            return
        threshold = evaluation.report.pass_threshold
        rows: dict[int, list[str]] = {}
        for outcome in evaluation.report.outcomes():
            rows.setdefault(outcome.row_index, []).extend(_short(outcome, threshold))
        for index, problems in rows.items():
            with subtests.test(msg=f"row {index}"):
                if problems:
                    pytest.fail("\n".join([*problems, f"to see it: {evaluation.command}"]), pytrace=False)


def _short(outcome: Outcome, threshold: float) -> list[str]:
    """Return the reasons why a rollout falls short: it failed, or a score is missing or too low."""
    place = f"attempt {outcome.run_index}"
    if outcome.failure is not None:
        return [f"{place}: {outcome.failure.origin}: {outcome.failure.message}"]
    lines = []
    for name, score in outcome.scores.items():
        if score.value is None:
            lines.append(f"{place}: {name}: {score.failure.message if score.failure else 'no score'}")
        elif score.value < threshold:
            lines.append(f"{place}: {name}: {score_number(score.value)}, and {threshold:g} passes")
    return lines


def _own_scores(report: Report) -> dict[str, Scores]:
    return _by_row(report.functions, (one for one in report.outcomes() if one.policy == POLICY))


def _by_row(functions: Iterable[str], outcomes: Iterable[Outcome]) -> dict[str, Scores]:
    found: dict[str, Scores] = {name: {} for name in functions}
    for outcome in outcomes:
        for name, rows in found.items():
            score = outcome.scores.get(name)
            rows.setdefault(outcome.row_id, []).append(None if score is None else score.value)
    return found


def _scores_of(other: Evaluation | str | Path, root: Path) -> dict[str, Scores]:
    if isinstance(other, Evaluation):
        return _own_scores(other.report)
    file = root / other
    try:
        if file.is_file():
            return _file_scores(file)
        store = Queries(root / ".osmosis" / "runs.db")
        run = store.find_run(str(other))
        names: Sequence[str] = run.config.get("functions") or []
        return _by_row(names, (one for one in store.outcomes(run.id) if one.policy == POLICY))
    except OsmosisError as error:
        fail(error)


def _file_scores(file: Path) -> dict[str, Scores]:
    try:
        results: JsonObject = msgspec.json.decode(file.read_bytes())
        rows = results["rows"]
        found: dict[str, Scores] = {}
        for row in rows:
            for run in row["runs"]:
                for name, value in run["scores"].items():
                    found.setdefault(name, {}).setdefault(row["row_id"], []).append(value)
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is not a result of osmosis eval -o: {error!r}") from None
    return found
