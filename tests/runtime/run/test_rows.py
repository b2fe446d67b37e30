"""The rows that a report lists, and which functions tell rows apart."""

from __future__ import annotations

from osmosis_ai.records import Failure, Outcome, Score, Usage
from osmosis_ai.reward_fn.statistics import summarize
from osmosis_ai.runtime.run.rows import LISTED, ListedRow, RowTally, lacking, telling_functions


def outcome(row: int, scores: dict[str, float | None], *, run: int = 0, failed: bool = False) -> Outcome:
    wrong = Failure("reward", "no")
    found = {name: Score(name, value, wrong if value is None else None) for name, value in scores.items()}
    failure = Failure("model", "refused") if failed else None
    return Outcome(f"p{row}.{run}", row, f"id{row}", run, "policy", "stop", 1.0, failure, Usage(), None, [], found)


def listed(outcomes: list[Outcome], functions: list[str]) -> tuple[int, list[ListedRow], list[ListedRow]]:
    tally = RowTally(functions, 1.0)
    for one in outcomes:
        tally.add(one)
    found = {}
    for name in functions:
        scores = [one.scores.get(name, Score(name)).value for one in outcomes]
        found[name] = summarize([[score] for score in scores], 1.0)
    return tally.listed(telling_functions(found, 1.0))


def indices(rows: list[ListedRow]) -> list[int]:
    return [row.outcome.row_index for row in rows]


def test_a_row_falls_short_by_a_failure_a_missing_score_or_a_low_one() -> None:
    outcomes = [
        outcome(0, {"exact": 1.0}),
        outcome(1, {"exact": 0.5}),
        outcome(2, {}, failed=True),
        outcome(3, {"exact": None}),
        outcome(4, {"exact": 2.0}),
    ]
    count, below, others = listed(outcomes, ["exact"])
    assert (count, indices(below), indices(others)) == (3, [1, 2, 3], [0, 4])


def test_the_attempt_that_falls_short_is_listed_with_how_many_passed() -> None:
    outcomes = [outcome(0, {"exact": value}, run=run) for run, value in enumerate((1.0, 0.0, 0.0))]
    _, (row,), _ = listed([*outcomes, outcome(1, {"exact": 1.0})], ["exact"])
    assert (row.outcome.run_index, row.attempts, row.passed) == (1, 3, 1)


def test_a_function_that_nothing_passes_makes_no_row_fall_short_unless_all_are_like_that() -> None:
    outcomes = [outcome(index, {"exact": float(index % 2), "effort": 0.5}) for index in range(4)]
    count, below, others = listed(outcomes, ["exact", "effort"])
    assert (count, indices(below), indices(others)) == (2, [0, 2], [1, 3])
    assert listed(outcomes, ["effort"])[0] == 4
    assert lacking(outcomes[1], ["exact", "effort"], 1.0) == ["effort"]


def test_the_first_rows_are_listed_and_all_are_counted() -> None:
    outcomes = [outcome(index, {"exact": float(index % 3 == 0), "form": float(index > 50)}) for index in range(100)]
    count, below, others = listed(outcomes, ["exact", "form"])
    short = [index for index in range(100) if index % 3 or index <= 50]
    assert (count, indices(below)) == (len(short), short[:LISTED])
    assert indices(others) == [index for index in range(100) if index not in short][:LISTED]


def test_without_functions_only_failures_fall_short() -> None:
    count, below, others = listed([outcome(0, {}), outcome(1, {}, failed=True)], [])
    assert (count, indices(below), indices(others)) == (1, [1], [0])
