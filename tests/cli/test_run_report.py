"""`test` reports row by row, `eval` with statistics; both lead on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import run_osmosis
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_calls
from repos import ADDING, ROWS, write_repo

RAISING = ADDING.replace("    return a + b", '    if a == 3:\n        raise KeyError("milk")\n    return a + b')


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Three rows: a right answer, a tool that raises, and a wrong answer."""
    rows = [
        {**row, "solution": [{"tool": "add", "arguments": {"a": a, "b": b}}, answer]}
        for row, (a, b), answer in zip(ROWS, ((1, 2), (3, 4), (5, 6)), ("3", "7", "12"), strict=True)
    ]
    return write_repo(tmp_path / "repo", main=RAISING, rows=rows)


def test_test_has_a_line_per_row_those_that_fall_short_first(repo: Path) -> None:
    done = run_osmosis("test", "--model", "offline/oracle", cwd=repo)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    first = lines.index("rows") + 1
    assert lines[first] == "row exact calls time tool errors what went wrong"
    rows = [line.split() for line in lines[first + 1 : first + 4]]
    assert [(row[0], row[1], row[2]) for row in rows] == [("2", "0.000", "1"), ("0", "1.000", "1"), ("1", "1.000", "1")]
    assert lines[first + 1].endswith("answered '12', expected '11'")
    assert "add: KeyError: 'milk'" in lines[first + 3]
    assert "pass@" not in done.stdout
    assert "CI" not in done.stdout


def test_eval_lists_the_rows_that_fall_short_after_the_statistics(repo: Path) -> None:
    done = run_osmosis("eval", "--model", "offline/oracle", "--n", "2", "-o", "out.json", cwd=repo)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "scores, n = 3 rows × 2 attempts" in lines
    first = lines.index("1 row below the pass threshold 1")
    assert lines[first + 1 : first + 3] == [
        "row passed exact what went wrong",
        "2 0 of 2 0.000 answered '12', expected '11'",
    ]
    low, high = json.loads((repo / "out.json").read_text("utf-8"))["summary"]["eval_fns"]["reward_fn.rewards:exact"][
        "confidence_interval"
    ]
    assert 0 <= low < 2 / 3 < high <= 1


def test_the_end_names_the_commands_that_show_more(repo: Path) -> None:
    done = run_osmosis("test", "--model", "offline/oracle", cwd=repo)
    (made,) = [line.removeprefix("run ") for line in done.stdout.splitlines() if line.startswith("run ")]
    assert f"to see a row: osmosis runs show {made} --row 2\n" in done.stderr
    assert f"to list what falls short: osmosis runs show {made} --not-passed\n" in done.stderr
    shown = run_osmosis("runs", "show", made, "--not-passed", cwd=repo)
    assert "1.000" not in shown.stdout.split("error")[-1]


HOSTILE = "\x1b]0;owned\x07\x9b2J\u202e[/INST]\r"
PRINTING = f"""
from fastmcp import FastMCP

mcp = FastMCP("t")


@mcp.tool
def price() -> str:
    \"\"\"Print, then raise.\"\"\"
    print("out", {HOSTILE!r}, "end")
    raise ValueError({HOSTILE!r} + "\\n::error::forged")
"""


@pytest.mark.parametrize("options", [("test", "--debug"), ("eval", "--n", "2")])
def test_what_models_and_tools_write_is_shown_and_not_obeyed(options: tuple[str, ...], tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=PRINTING)
    script = by_turn(tool_calls([(f"price{HOSTILE}", {}), ("price", {})]), text(f"3{HOSTILE}"))
    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ("--base-url", endpoint.url, "--model", f"any{HOSTILE}")
        done = run_osmosis(*options, *model, cwd=root, env={"OSMOSIS_API_KEY": "any", "CI": "true"})
    (log,) = (root / ".osmosis" / "logs").iterdir()
    for written in (done.stdout, done.stderr, log.read_text(encoding="utf-8")):
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(written)
        assert not any(line.lstrip().startswith("::") for line in written.splitlines())
    assert "[/INST]" in done.stdout
    assert r"out \x1b]0;owned\x07" in log.read_text(encoding="utf-8")
