"""The look of tables at each width, compared with `tests/cli/snapshots`; OSMOSIS_UPDATE_SNAPSHOTS=1 rewrites these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.eval_rubric import print_results
from osmosis_ai.cli.report import print_report
from osmosis_ai.cli.runs_output import print_comparison, print_rollouts, print_run, print_runs
from osmosis_ai.cli.tables import Cell, Column, Table
from osmosis_ai.cli.validate_output import print_validation
from osmosis_ai.discovery.scan import Component
from osmosis_ai.records import CallSummary, Failure, Outcome, Rollout, Row, Score, Usage
from osmosis_ai.reward_fn.statistics import paired, summarize
from osmosis_ai.reward_rubric.evaluation import (
    BaselineDifference,
    JudgedRun,
    RecordResult,
    RubricResults,
    compare_with_labels,
    spread_of,
    statistics_of,
)
from osmosis_ai.runtime.run.report import Baseline, Policy, Report
from osmosis_ai.runtime.run.results import Cause, JudgeTotals, ToolStatistics
from osmosis_ai.runtime.run.rows import ListedRow
from osmosis_ai.store.queries import FunctionTotals, RunInfo, ScoredRollout, SharedRows, StoredRollout
from osmosis_ai.store.views import ComparedFunction, ComparedRuns, run_view
from osmosis_ai.text import visible
from osmosis_ai.validate import Finding
from osmosis_ai.validate.controls import ControlReport, FormReport
from osmosis_ai.validate.probes import WRONG
from osmosis_ai.validate.validation import Validation
from snapshots import check_snapshot

SNAPSHOTS = Path(__file__).parent / "snapshots"
WIDTHS = (60, 80, 100, 160, None)
PREFIX = "reward_fn.compute_reward:"
THIRTY = [f"{PREFIX}the_{what}_{how}_for_numbers" for what in "abcde" for how in ("x", "y", "z", "u", "v", "w")]
LONG = f"{PREFIX}{'a_very_' * 28}long"
WIDE = [f"{PREFIX}数字が一致する報酬関数", f"{PREFIX}形式が正しい報酬関数の名前はとても長い"]
Scores = list[list[float | None]]
HALF: Scores = [[1.0], [0.0], [1.0], [0.5]]


def policy(functions: dict[str, Scores], model: str = "openai/gpt-5-mini") -> Policy:
    rows = next(iter(functions.values()))
    count = sum(map(len, rows))
    return Policy(
        model=model,
        base_url=None,
        stand_in=False,
        params={},
        planned=count,
        rollouts=count,
        failed=0,
        removed=0,
        duration_ms=81234.5,
        usage=Usage(1_000_000, 234_567, 1_234_567),
        cost_usd=12.3456,
        functions={name: summarize(scores, 1.0) for name, scores in functions.items()},
    )


def report(functions: dict[str, Scores], *, against: Scores | None = None, **fields: object) -> Report:
    baseline = None
    if against is not None:
        other = policy(dict.fromkeys(functions, against), "openai/gpt-4.1-nano")
        comparison = {name: paired(scores, against) for name, scores in functions.items()}
        baseline = Baseline(**{name: getattr(other, name) for name in other.__struct_fields__}, comparison=comparison)
    rows = next(iter(functions.values()))
    known: dict[str, object] = {
        "command": "eval",
        "run_id": "20260301-094143-382a",
        "store": "",
        "dataset": "test_data.jsonl",
        "agent": None,
        "rows": len(rows),
        "n": max(map(len, rows)),
        "pass_threshold": 1.0,
        "policy": policy(functions),
        "baseline": baseline,
        "scoring_errors": 0,
        "tools": {},
        "tool_errors": [],
        "failures": [],
        "judges": JudgeTotals(0, 0, None),
        "wall_ms": 61_234.0,
        "rows_below": 0,
        "below": [],
        "others": [],
    }
    return Report(**{**known, **fields})  # type: ignore[arg-type]


def outcome(row: int, scores: dict[str, Score], failure: Failure | None = None) -> Outcome:
    calls = [CallSummary("price", 3.0, "exception"), CallSummary("add", 1.0)]
    return Outcome(f"p{row}", row, f"row{row}", 0, "policy", "stop", 63.8, failure, Usage(), 0.01, calls, scores)


FAILING = [
    ListedRow(outcome(3, {}, Failure("model", "the endpoint refuses the key (401): wrong key for this project")), 1, 0),
    ListedRow(
        outcome(
            1204,
            {
                f"{PREFIX}exact": Score(f"{PREFIX}exact", 0.0),
                f"{PREFIX}close": Score(f"{PREFIX}close", failure=Failure("reward", "KeyError: 'milk'")),
            },
        ),
        1,
        0,
    ),
]
PASSING = [ListedRow(outcome(7, {f"{PREFIX}{name}": Score(name, 1.0) for name in ("exact", "close")}), 1, 1)]
TOOLS = {
    "price": ToolStatistics(1_234_567, {"exception": 12_345, "schema": 3}, 2001.1, 61_214.9),
    "x" * 200: ToolStatistics(1, {}, 0.2, 0.2),
}
CAUSES = [Cause("reward", "exception", 1_200, "KeyError: 'milk'", 1204, 0, "reward_fn/a.py", 7, f"{PREFIX}close")]
TWO: dict[str, Scores] = {f"{PREFIX}exact": HALF, f"{PREFIX}close": [[0.9], [None], [0.4], [1.0]]}


def runs() -> list[RunInfo]:
    config = {"model": "openai/gpt-5-mini", "dataset": "/data/test_data.jsonl", "functions": list(TWO), "n": 1}
    config |= {"planned": 10_000, "base_url": "https://user:secret@models.example/v1?key=secret"}
    summary = {"functions": {f"{PREFIX}exact": 0.875, f"{PREFIX}close": 1e300}, "total_tokens": 12_345, "cost_usd": 3.5}
    one = RunInfo("20261121-205652-3aaa", "eval", "finished", 1e9, 1e9 + 125, {}, config, summary, 10_000, 12, False)
    other = {**config, "model": "vertex_ai/a-model-with-a-rather-long-name@20260101", "dataset": "数学の問題集.jsonl"}
    two = RunInfo("20261121-205744-4bbb", "test", "interrupted", 1.1e9, None, {}, other, None, 7, 0, False)
    return [two, one]


def rollouts() -> Iterator[ScoredRollout]:
    failure = Failure(
        "model", "the endpoint answered 500 three times: " + "upstream overloaded, " * 20, kind="overloaded"
    )
    for index, value in enumerate((1.0, 0.333333, None, 1e300)):
        scores = {
            f"{PREFIX}{name}": Score(
                f"{PREFIX}{name}", value, None if value is not None else Failure("reward", "bad row")
            )
            for name in ("exact", "close")
        }
        rollout = Rollout(
            id=f"p{index}",
            row_index=index * 4_321,
            row_id=f"row{index}",
            run_index=0,
            policy="policy",
            messages=[],
            finish_reason="stop" if index else "error",
            duration_ms=12.34 * 30**index,
            failure=None if index else failure,
            usage=Usage(1000, 234, 1234),
            cost_usd=0.0123,
        )
        stored = StoredRollout(
            rollout, turns=2, tool_calls=1, tool_errors=0, requests=2, attempt=1, started_at=0, finished_at=1
        )
        yield ScoredRollout(stored, Row(index, f"row{index}", "", "", None), scores)


def show_run(output: Output) -> None:
    totals = [FunctionTotals(name, 10_000, 9_988, 12, 0.875) for name in TWO]
    print_run(output, runs()[1], totals)
    print_rollouts(output, runs()[1], list(rollouts()), 9_996)


def show_comparison(output: Output) -> None:
    b, a = runs()
    better: Scores = [[1.0], [1.0], [1.0], [0.5]]
    function = ComparedFunction(
        a=summarize(HALF, 1.0),
        b=summarize(better, 1.0),
        difference=0.25,
        rows=4,
        wins=12_345,
        losses=1,
        ties=2,
        standard_error=0.25,
        confidence_interval=(-0.24, 0.74),
        same_code=False,
        now_pass=0,
        now_fail=0,
        flips=[],
    )
    compared = ComparedRuns(
        a=run_view(a),
        b=run_view(b),
        pass_threshold=1.0,
        rows=SharedRows(12_348, 0, 7),
        functions={f"{PREFIX}exact": function, LONG: function},
        only_in_a=[f"{PREFIX}close"],
        only_in_b=[],
        notes=["reward_fn.compute_reward:exact: its code differs between the runs"],
    )
    print_comparison(output, compared, a, b, NO_STORE, limit=5)


NO_STORE: Any = None
"""For a comparison without a flipped row, of which the prompt would be read."""


def show_validation(output: Output) -> None:
    components = [
        Component(
            "tool", "convert_temperature", "mcp/tools/conversion.py", 12, "tools.conversion", True, ("value", "unit")
        ),
        Component("reward", f"{PREFIX}exact", "reward_fn/compute_reward.py", 1_204, "reward_fn.compute_reward"),
    ]
    forms = [FormReport("the answer alone", True, 1.0, dict.fromkeys(WRONG, 0.0))]
    control = ControlReport(f"{PREFIX}exact", "it tells right from wrong answers", 20, 412, 0.31, forms, 0.0, 0.0, None)
    message = "the parameter `unit` of convert_temperature has no description, so a model can only guess what it takes"
    findings = [
        Finding(
            "OSM111", "warning", components[0].file, 12, "convert_temperature", message, "Write Annotated[str, …]."
        ),
        Finding("OSM201", "error", components[1].file, 1_204, f"{PREFIX}exact", "it raised KeyError: 'milk'", ""),
    ]
    print_validation(Validation(components, findings, [control]), output, static=False)


def judged(index: int, score: float | None) -> JudgedRun:
    return JudgedRun(
        run_index=index,
        status="error" if score is None else "success",
        started_at="2026-01-01T00:00:00Z",
        completed_at="2026-01-01T00:00:01Z",
        duration_seconds=1.0,
        preview="",
        score=score,
        explanation=None
        if score is None
        else "The reply is friendly, names the sum and explains each of its steps in order.",
        error="the judge answered 500 three times" if score is None else None,
        raw=None,
    )


def show_rubric_results(output: Output) -> None:
    judgements = [[judged(0, 0.9), judged(1, 0.7)], [judged(0, 0.123456), judged(1, None)]]
    records = [
        RecordResult(f"a-conversation-with-a-long-id-{index}", index, None, {}, statistics_of(runs), runs)
        for index, runs in enumerate(judgements)
    ]
    results = RubricResults(
        generated_at="2026-01-01T00:00:02Z",
        rubric_id="friendly",
        rubric_source="config",
        provider="openai",
        model="gpt-5-mini",
        number=2,
        config_path="rubric_configs.yaml",
        data_path="rubric_data.jsonl",
        spread=spread_of(records),
        agreement=compare_with_labels("human_score", records, {0: 1.0, 1: 0.0}, 0.5),
        baseline=BaselineDifference("before.json", 0.5, 0.074),
        overall_statistics=statistics_of([run for runs in judgements for run in runs]),
        records=records,
    )
    print_results(output, results)


SHOWN: dict[str, Callable[[Output], None]] = {
    "one-function": lambda output: print_report(output, report({f"{PREFIX}exact": HALF})),
    "thirty-functions": lambda output: print_report(output, report(dict.fromkeys(THIRTY, HALF))),
    "long-name": lambda output: print_report(output, report({LONG: HALF, f"{PREFIX}exact": HALF})),
    "pass-at-k": lambda output: print_report(output, report({f"{PREFIX}exact": [[1.0] * 7 + [0.0] * 3] * 4})),
    "baseline": lambda output: print_report(output, report(TWO, against=[[1.0], [0.0], [0.0], [0.0]])),
    "wide-characters": lambda output: print_report(output, report(dict.fromkeys(WIDE, HALF))),
    "huge-scores": lambda output: print_report(output, report({f"{PREFIX}exact": [[1e300], [-1e300], [2.5e7]]})),
    "errors-and-tools": lambda output: print_report(
        output, report(TWO, tools=TOOLS, failures=CAUSES, rows_below=1_002, below=FAILING, scoring_errors=1)
    ),
    "test-rows": lambda output: print_report(
        output, report(TWO, command="test", rows=1_234, rows_below=2, below=FAILING, others=PASSING)
    ),
    "runs-list": lambda output: print_runs(output, runs()),
    "runs-show": show_run,
    "runs-compare": show_comparison,
    "validate": show_validation,
    "eval-rubric": show_rubric_results,
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_table_at_every_width(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    shown = ""
    for width in WIDTHS:
        monkeypatch.delenv("COLUMNS", raising=False)
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        SHOWN[name](Output())
        shown += f"== {'piped' if width is None else f'{width} columns'}\n{capsys.readouterr().out}\n"
    check_snapshot(SNAPSHOTS / f"{name}.txt", shown)


def lines(table: Table, width: int | None) -> list[str]:
    return [line.plain for line in table.lines(width, visible)]


def test_no_width_cuts_a_figure_and_no_line_ends_in_blanks() -> None:
    columns = (Column("function", "function"), "mean", Column("when", "label"), Column("model", "name"), "95 % CI")
    table = Table(*columns, Column("error", "text"), title="scores")
    figures = []
    for number, name in enumerate([*THIRTY, *WIDE, LONG]):
        interval = f"{number / 9:.3f} … {number / 5:.3f}"
        figures.append((f"{number / 7:.3f} ± 0.100", f"2026-11-{number:02} 05:57", interval))
        mean, when, _ = figures[-1]
        table.add(name, mean, when, f"provider/{name}", interval, "because it says so " * number)
    for width in [*range(40, 250, 3), None]:
        shown = lines(table, width)
        assert all(line == line.rstrip() for line in shown)
        assert all(any(figure in line for line in shown) for row in figures for figure in row)
        if width is None:
            assert len(shown) == 2 + len(figures)
            assert "…" not in "".join(shown).replace(" … ", "")
        else:
            assert max(map(cell_len, shown)) <= width


def test_names_that_begin_alike_are_cut_so_that_they_differ() -> None:
    table = Table(Column("function", "function"), "mean")
    for name in THIRTY:
        table.add(name, "1.000")
    found = [line.split()[0] for line in lines(table, 30)[1:]]
    assert len(set(found)) == len(THIRTY)
    assert all(re.fullmatch(r"the_\w_\w_for_numbers", name) for name in found)


def test_names_that_can_not_be_told_apart_when_cut_get_blocks() -> None:
    names = [f"{'a' * 50}{letter}{'b' * 50}" for letter in "xyz"]
    table = Table(Column("tool", "name"), "calls")
    for name in names:
        table.add(name, "3")
    assert lines(table, 110)[1:] == [f"{name}      3" for name in names]
    assert lines(table, 30) == [line for name in names for line in (name, "  calls 3")]


def test_styles_belong_to_their_cell() -> None:
    table = Table(Column("name", "name"), "mean")
    table.add("a", Cell("0.000", "red"))
    _, line = table.lines(None, visible)
    (span,) = line.spans
    assert (line.plain[span.start : span.end], span.style) == ("0.000", "red")


def test_a_list_wraps_after_a_comma_and_a_text_at_a_space() -> None:
    table = Table("row", Column("mean", "list"), Column("error", "text"))
    table.add(
        "1", "right_answer 1.000, right_form 0.500, few_calls 0.25", "the endpoint refuses the key of this project"
    )
    assert lines(table, 55) == [
        "row  mean                      error",
        "  1  right_answer 1.000,       the endpoint refuses the",
        "     right_form 0.500,         key of this project",
        "     few_calls 0.25",
    ]
