"""Results go to stdout, everything else to stderr; keys go nowhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.tables import Column, Table
from osmosis_ai.masking import Masker
from osmosis_ai.text import visible_json


def test_results_and_messages_have_a_stream_each(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    for write in (output.say, output.warn, output.fail, output.line):
        write("[bold]said[/] 12")
    output.result("shown")
    assert tuple(capsys.readouterr()) == (
        "[bold]said[/] 12\nshown\n",
        "[bold]said[/] 12\n[bold]said[/] 12\nerror: [bold]said[/] 12\n",
    )


def test_quiet_leaves_out_what_is_no_result_warning_or_error(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(quiet=True)
    output.say("status")
    output.warn("warning")
    output.line("result")
    assert tuple(capsys.readouterr()) == ("result\n", "warning\n")


def test_every_text_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Masker(["sk-secret"]))
    for write in (output.say, output.warn, output.fail, output.line):
        write("sk-secret")
    assert capsys.readouterr().out == "[masked]\n"
    output.say("sk-secret")
    assert capsys.readouterr().err == "[masked]\n"


def test_a_long_line_in_a_pipe_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    text = "word " * 200 + "end"
    for write in (output.say, output.warn, output.line):
        write(text)
    out, err = capsys.readouterr()
    assert (out, err) == (f"{text}\n", f"{text}\n" * 2)


def test_a_table_in_a_pipe_is_as_wide_as_its_cells_or_as_columns_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(Column("[name]", "name"), "score")
    table.add("long " * 40, "12")
    for columns, widest in (("", 207), ("60", 60), ("0", 207)):
        monkeypatch.setenv("COLUMNS", columns)
        Output().table(table)
        header, row = capsys.readouterr().out.splitlines()
        assert (header.split(), row.split()[-1]) == (["[name]", "score"], "12")
        assert max(len(header), len(row)) == widest


def test_a_table_is_masked_before_anything_of_it_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table(Column("name", "name"), "score")
    table.add(f"{'sk-secret' * 10}\x1b[2J", "12")
    Output(Masker(["sk-secret"])).table(table)
    shown = capsys.readouterr().out
    assert "sk-" not in shown
    assert "\x1b" not in shown


HOSTILE = "\x1b]0;title\x07 \u202etxt.exe \x9b2J \r[row 1]"


def test_nothing_that_a_terminal_obeys_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    for write in (output.say, output.warn, output.fail, output.line, output.result, output.ci_command):
        write(HOSTILE)
    output.line(HOSTILE, "bold")
    output.result("a part ", (HOSTILE, "bold"))
    table = Table(Column(HOSTILE, "score"), title=HOSTILE)
    table.add(HOSTILE)
    output.table(table)
    output.json(json.dumps({HOSTILE: HOSTILE}, ensure_ascii=False).encode())
    for stream in capsys.readouterr():
        assert stream.count("title") == stream.count(r"\x1b]0;title") + stream.count(r"\u001b]0;title") > 0
        assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(stream)


@given(st.text())
def test_json_is_the_same_json_when_a_terminal_obeys_nothing_of_it(text: str) -> None:
    shown = visible_json(json.dumps({text: [text]}, ensure_ascii=False))
    assert json.loads(shown) == {text: [text]}
    assert visible_json(shown) == shown


def test_a_ci_run_obeys_only_what_is_meant_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "it raised\n::error::forged\n  ::stop-commands::x\nstd::vector ##[add-mask]x"
    Output().line(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("CI", "true")
    Output().line(text)
    Output().ci_command("::error::meant")
    assert capsys.readouterr().out == (
        "it raised\n\\x3a:error::forged\n  \\x3a:stop-commands::x\nstd::vector \\x23#[add-mask]x\n::error::meant\n"
    )
