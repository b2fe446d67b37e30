"""Results go to stdout, everything else to stderr; keys go nowhere."""

from __future__ import annotations

import pytest

from osmosis_ai.cli.console import Output, table_of


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


def test_a_table_in_a_pipe_is_as_wide_as_its_cells_up_to_a_width(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of(["[name]", "score"], right=["score"], folding=["[name]"], title="Scores")
    table.add_row("short", "1")
    table.add_row("long " * 40, "12")
    Output().result(table)
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert (title.strip(), header.split()) == ("Scores", ["[name]", "score"])
    assert rows[0].split() == ["short", "1"]
    assert len(rows) == 3
    assert len({len(row) for row in (header, *rows)}) == 1
    assert len(header) <= 120
