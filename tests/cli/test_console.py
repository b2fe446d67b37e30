"""Results go to stdout, everything else to stderr; keys go nowhere."""

from __future__ import annotations

import pytest
from rich.text import Text

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.tables import Column, Table


def test_results_and_messages_have_a_stream_each(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    for write in (output.say, output.warn, output.fail, output.line):
        write("[bold]said[/] 12")
    output.result(Text("shown"))
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
    output = Output(lambda text: text.replace("sk-secret", "[masked]"))
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
    Output(lambda text: text.replace("sk-secret", "[masked]")).table(table)
    shown = capsys.readouterr().out
    assert "sk-" not in shown
    assert "\x1b" not in shown
