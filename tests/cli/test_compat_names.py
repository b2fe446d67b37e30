"""Command and option names kept from earlier versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from osmosis_ai.cli.app import app
from osmosis_ai.compat import COMMANDS, EXTRAS, FLAGS
from osmosis_ai.toml_files import read_toml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("second", "name"), COMMANDS.items())
def test_a_command_goes_by_both_names(second: str, name: str) -> None:
    shown = [CliRunner().invoke(app, [*each.split(), "--help"]) for each in (second, name)]
    assert [each.exit_code for each in shown] == [0, 0]
    assert shown[0].output.replace(f"osmosis {second}", f"osmosis {name}") == shown[1].output


@pytest.mark.parametrize("command", ["test", "eval", "eval-rubric", "validate"])
def test_an_option_goes_by_all_its_names(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output.replace(",", "").split()
    names = [name for today, others in FLAGS.items() if today in shown for name in others]
    assert names
    assert [name for name in names if name not in shown] == []


def test_the_extras_of_earlier_versions_are_in_pyproject() -> None:
    extras = read_toml(ROOT / "pyproject.toml", ROOT)["project"]["optional-dependencies"]
    assert set(EXTRAS) <= set(extras)
    assert {name for name, packages in extras.items() if not packages} == {"mcp", "server"}
