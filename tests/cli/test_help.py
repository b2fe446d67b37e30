"""`--help` of every command, and shell completion."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commands import parse_command, the_command_line
from osmosis_ai import __version__
from osmosis_ai.cli.app import app
from osmosis_ai.cli.help import PAGES
from osmosis_ai.compat import COMMANDS

ROOT = Path(__file__).parents[2]
OSMOSIS = the_command_line()


def all_commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    yield " ".join(path), group
    for name, command in getattr(group, "commands", {}).items():
        yield from all_commands(command, (*path, name))


OFFERED = dict(all_commands(OSMOSIS))


@functools.cache
def help_of(path: str) -> str:
    with redirect_stdout(io.StringIO()) as shown:
        assert OSMOSIS([*path.split(), "--help"], prog_name="osmosis", standalone_mode=False) == 0
    return shown.getvalue()


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("path", OFFERED)
def test_every_command_has_usage_examples_exit_codes_and_a_page_to_read(path: str) -> None:
    assert COMMANDS.get(path, path) in PAGES, f"`osmosis {path}` needs a Page in PAGES of cli/help.py"
    shown, page = help_of(path), PAGES[COMMANDS.get(path, path)]
    assert shown.startswith(f"Usage: {' '.join(['osmosis', *path.split()])} [OPTIONS]")
    # No placeholder of the library's own, and no colour outside a terminal.
    assert [each for each in ("<bool>", "<str>", "[[", "]...", "......", "\x1b") if each in shown] == []
    assert max(map(len, shown.splitlines())) <= 80
    assert len(page.examples) >= 2
    for _, line in page.examples:
        assert f"\n  {line}\n" in shown
    assert "\n  130  interrupted\n" in shown
    assert shown.endswith(f"More: {page.see}\n")
    assert [each for each in page.see.split(", ") if not (ROOT / each).exists()] == []


@pytest.mark.parametrize("path", OFFERED)
def test_every_option_is_explained_and_names_its_value(path: str) -> None:
    shown = " ".join(help_of(path).split())
    assert "None" not in shown
    for parameter in OFFERED[path].params:
        if parameter.hidden:
            continue
        value = "" if parameter.param_type_name == "argument" or parameter.is_flag else f" {parameter.metavar}"
        assert f"{value} " in shown
        assert parameter.metavar or not value


@pytest.mark.parametrize("line", sorted({line for page in PAGES.values() for _, line in page.examples}))
def test_every_example_is_a_valid_command_line(line: str) -> None:
    parse_command(line)


def test_commands_are_listed_in_the_order_of_work() -> None:
    listed = help_of("").partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    names = [line.split()[0] for line in listed if line[2] != " "]
    assert names[:6] == ["init", "test", "eval", "eval-rubric", "validate", "runs"]
    assert {*names} == {path for path in OFFERED if path and " " not in path}


def test_the_first_screen_is_one_screen() -> None:
    assert len(help_of("").splitlines()) <= 58


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version(option: str) -> None:
    assert CliRunner().invoke(app, [option]).output == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("osmosis va", ["validate"]),
        ("osmosis runs sh", ["show"]),
        ("osmosis test --iso", ["--isolation"]),
        ("osmosis eval --isolation ", ["session", "rollout", "sandbox"]),
        ("osmosis log", ["login", "logout"]),
    ],
)
def test_completion(words: str, found: list[str]) -> None:
    place = str(len(words.split(" ")) - 1)
    env = {"_OSMOSIS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    assert CliRunner().invoke(app, [], env=env, prog_name="osmosis").output.split() == found


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in help_of("")
