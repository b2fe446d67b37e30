"""A text goes to the user's editor and comes back."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from osmosis_ai.cli.prompt import edited_text
from osmosis_ai.errors import UsageError


def editor(folder: Path, program: str) -> str:
    """Return an EDITOR with options, in a folder with a space in its name, that runs this program on `path`."""
    (folder / "an editor").mkdir()
    file = folder / "an editor" / "editor.py"
    file.write_text(
        f"import os, pathlib, signal, sys\npath = pathlib.Path(sys.argv[-1])\n{program}\n", encoding="utf-8"
    )
    return f"{sys.executable} '{file}' --wait"


def test_the_edited_text_comes_back_and_the_file_is_gone(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = f"pathlib.Path({str(seen)!r}).write_text(f'{{path}} {{path.read_text()}}'); path.write_text('after')"
    assert edited_text("before", {"EDITOR": editor(tmp_path, program)}, on_terminal=False) == "after"
    file, text = seen.read_text(encoding="utf-8").split()
    assert text == "before"
    assert file.endswith(".json")
    assert not Path(file).parent.exists()


def test_visual_comes_before_editor(tmp_path: Path) -> None:
    visual = editor(tmp_path, "path.write_text('visual')")
    assert edited_text("before", {"EDITOR": "false", "VISUAL": visual}, on_terminal=False) == "visual"


def test_what_is_no_text_is_replaced_rather_than_lost(tmp_path: Path) -> None:
    assert edited_text("", {"EDITOR": editor(tmp_path, "path.write_bytes(b'a\\xff')")}, on_terminal=False) == "a\ufffd"


def test_piped_commands_are_not_the_editors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "print('shown'); path.write_text(repr(sys.stdin.read()))"
    assert edited_text("", {"EDITOR": editor(tmp_path, program)}, on_terminal=False) == "''"
    assert tuple(capfd.readouterr()) == ("", "shown\n")


def test_ctrl_c_is_the_editors_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    program = "os.kill(os.getppid(), signal.SIGINT); path.write_text(str(signal.getsignal(signal.SIGINT)))"
    left_to_it = edited_text("", {"EDITOR": editor(tmp_path, program)}, on_terminal=False)
    assert "default_int_handler" in left_to_it
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no editor is set: set EDITOR, for example EDITOR=nano"),
        ({"EDITOR": "", "VISUAL": ""}, "no editor is set"),
        ({"EDITOR": "/no/such/editor"}, "the editor '/no/such/editor' can't be started: .*; set EDITOR"),
        ({"EDITOR": "vi 'unbalanced"}, "can't be started: No closing quotation"),
        ({"EDITOR": "false"}, "the editor 'false' ended with code 1, so nothing was changed"),
    ],
)
def test_without_a_working_editor_it_says_what_to_do(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        edited_text("text", environ, on_terminal=False)
