"""Declared options as parameters of a command, and the typed ones as a config."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import typer

from osmosis_ai.cli.options import Given, OutputConfig, effective_config, output_options, takes
from osmosis_ai.config import RunConfig
from osmosis_ai.errors import UsageError

BAD_COMMAND_LINE: Any = typer.BadParameter.__base__


def typed(*arguments: str, command: str = "eval") -> dict[str, Any]:
    """Return what a command with every option of a run, and one of its own, receives; raise what it raises."""
    received: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @takes(RunConfig, OutputConfig, command=command)
    def run(given: Given, shout: Annotated[bool, typer.Option("--shout")] = False) -> None:
        received.update(given, shout=shout)

    app(list(arguments), standalone_mode=False)
    return received


def refused(*arguments: str, command: str = "eval") -> str:
    """Return why a command line can't be read."""
    with pytest.raises(BAD_COMMAND_LINE) as error:
        typed(*arguments, command=command)
    return str(error.value.format_message())


def test_only_what_was_typed_is_given() -> None:
    assert typed() == {"shout": False}
    # A default that was typed wins over the environment and the file, so it counts as given.
    assert typed("--batch-size", "8", "-q", "--shout") == {"batch_size": 8, "quiet": True, "shout": True}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["--cache"], {"cache": True}),
        (["--no-cache"], {"cache": False}),
        (["-d", "rows.csv", "-m", "agents:loop"], {"dataset": "rows.csv", "module": "agents:loop"}),
        (["--eval-fn", "a:b", "--eval-fn", "c"], {"eval_fn": ["a:b", "c"]}),
        (["--worker-memory", "2GB"], {"worker_memory": "2GB"}),
        (
            ["--param", "top_p=0.5", "--param", 'stop=["a", "b=c"]', "--param", " seed =7"],
            {"param": {"top_p": 0.5, "stop": ["a", "b=c"], "seed": 7}},
        ),
    ],
)
def test_every_kind_of_option_has_its_value(arguments: list[str], given: dict[str, Any]) -> None:
    assert typed(*arguments) == {**given, "shout": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top_p", "--param top_p: write NAME=JSON"),
        ("=1", "--param =1: write NAME=JSON"),
        ("stop=END", "'END' is not JSON; a text needs quotes: --param 'stop=\"END\"'"),
        ("stop=", "'' is not JSON"),
    ],
)
def test_a_parameter_that_is_no_json_says_how_to_write_it(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        typed("--param", text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("option", "value", "minimum"),
    [
        ("--batch-size", "0", 1),
        ("--n", "0", 1),
        ("--limit", "-1", 1),
        ("--offset", "-1", 0),
        ("--max-turns", "0", 1),
        ("--workers", "-1", 0),
        ("--max-cost", "-1", 0),
    ],
)
def test_a_number_that_is_too_small_is_refused_with_the_smallest(option: str, value: str, minimum: int) -> None:
    said = refused(option, value)
    assert option in said
    assert f"{minimum}" in said


def test_a_command_has_its_own_options_only() -> None:
    assert "No such option" in refused("--n", "2", command="test")
    assert typed("--limit", "2", command="test") == {"limit": 2, "shout": False}


def test_the_help_names_each_default() -> None:
    @takes(RunConfig)
    def run(given: Given) -> None:
        pass

    options = {name: get_args(parameter.annotation)[1] for name, parameter in signature(run).parameters.items()}
    assert options["batch_size"].help == "Run up to N rollouts at a time. Default: 8."
    assert options["dataset"].help.endswith("Default: test_data.jsonl.")
    # Neither "nothing" nor "off" needs to be said.
    assert "Default" not in options["limit"].help + options["score_partial"].help


def test_a_config_is_made_of_what_was_typed_the_environment_and_the_repositorys_file(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "pyproject.toml").write_text("[tool.osmosis]\nbatch-size = 2\nmax-turns = 3\nlimit = 4\n", encoding="utf-8")
    (repo / ".env").write_text("OSMOSIS_MAX_TURNS=5\n", encoding="utf-8")
    monkeypatch.setenv("OSMOSIS_LIMIT", "6")
    below = repo / "reward_fn"
    found = effective_config(RunConfig, {"mcp": "../mcp", "limit": 7, "quiet": True}, below)
    config = found.config
    assert (config.workers.batch_size, config.limits.max_turns, config.data.limit) == (2, 5, 7)
    assert {setting.option.name for setting in found.settings} >= {"batch_size", "max_turns", "limit"}


def test_a_repository_that_does_not_exist_is_an_error_before_its_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--mcp gone"):
        effective_config(RunConfig, {"mcp": "gone"}, tmp_path)


def test_output_options_are_told_from_those_of_the_run() -> None:
    output = output_options({"quiet": True, "output": "results.json", "limit": 3})
    assert (output.quiet, output.output, output.watch, output.json) == (True, "results.json", False, False)
