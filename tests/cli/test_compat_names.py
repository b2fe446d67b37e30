"""Command and option names kept from earlier versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from osmosis_ai.cli.app import app
from osmosis_ai.compat import COMMANDS, EXTRAS, FLAGS, NOT_OFFERED
from osmosis_ai.toml_files import read_toml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [*COMMANDS, *COMMANDS.values()])
def test_a_command_goes_by_both_names(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert "Have a judge score recorded solutions" in result.output


@pytest.mark.parametrize("command", ["test", "eval", "eval-rubric", "validate"])
def test_an_option_goes_by_all_its_names(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output.replace(",", "").split()
    names = [name for today, others in FLAGS.items() if today in shown for name in others]
    assert names
    assert [name for name in names if name not in shown] == []


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_a_command_of_the_platform_says_what_works_here(name: str) -> None:
    error = CliRunner().invoke(app, [*name.split(), "anything", "--at-all"]).exception
    assert str(error) == f"`osmosis {name}` is not offered yet; {NOT_OFFERED[name]}"


def test_the_empty_extras_are_those_of_pyproject() -> None:
    extras = read_toml(ROOT / "pyproject.toml", ROOT)["project"]["optional-dependencies"]
    assert {name for name, packages in extras.items() if not packages} == set(EXTRAS)
