"""Declared options: sources and their precedence, checks, storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osmosis_ai.config import RunConfig
from osmosis_ai.errors import UsageError
from osmosis_ai.options import config_of, declared_options, layered, read_size, secret_values, stored_options


def write_pyproject(folder: Path, text: str) -> Path:
    file = folder / "pyproject.toml"
    file.write_text(f"[tool.osmosis]\n{text}", encoding="utf-8")
    return file


def effective(given: dict[str, Any], environ: dict[str, str], pyproject: Path | None) -> dict[str, tuple[Any, str]]:
    _, settings = layered(RunConfig, given, environ, pyproject)
    return {one.option.name: (one.value, one.source) for one in settings}


def test_names_are_unique_and_every_option_has_a_help_text() -> None:
    options = declared_options(RunConfig)
    assert len({option.name for option in options}) == len(options)
    assert len({flag for option in options for flag in option.flags}) == sum(len(option.flags) for option in options)
    for option in options:
        assert option.option.help.endswith("."), option.name


def test_the_command_line_wins_then_the_environment_then_the_file(tmp_path: Path) -> None:
    file = write_pyproject(tmp_path, 'max-turns = 3\nbatch_size = 4\nmodel = "in-file"\nparam = {top_p = 0.5}\n')
    found = effective({"model": "typed"}, {"OSMOSIS_BATCH_SIZE": "5", "OSMOSIS_MODEL": "in-env"}, file)
    assert found["model"] == ("typed", "command line")
    assert found["batch_size"] == (5, "$OSMOSIS_BATCH_SIZE")
    assert found["max_turns"] == (3, "pyproject.toml")
    assert found["param"] == ({"top_p": 0.5}, "pyproject.toml")
    assert found["limit"] == (None, "default")


def test_a_config_is_made_of_what_was_found(tmp_path: Path) -> None:
    config, _ = layered(RunConfig, {"n": 2}, {"OSMOSIS_EVAL_FN": "a:b, c:d"}, write_pyproject(tmp_path, "cache = true"))
    assert (config.scoring.n, config.scoring.eval_fn, config.model.cache) == (2, ["a:b", "c:d"], True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-turns = 0", "pyproject.toml: [tool.osmosis] max-turns = 0: write a whole number of at least 1"),
        ('max-turns = "3"', "pyproject.toml: [tool.osmosis] max-turns = 3: write a whole number of at least 1"),
        ("max-turn = 3", "there is no such option; did you mean 'max_turns'?"),
        ('api-key = "sk-secret"', "a key doesn't belong in a committed file"),
        ("resume = true", "--resume applies to a single run; pass it on the command line"),
        ('isolation = "none"', "isolation = none: write session or rollout"),
        ("timeout = nan", "timeout = nan: write a finite number"),
        ('worker-memory = "much"', "worker-memory = much: write a size such as 500MB or 2GB"),
        ("max-turns = \n", "Invalid"),
    ],
)
def test_a_bad_value_in_the_file_is_an_error_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        layered(RunConfig, {}, {}, write_pyproject(tmp_path, text))
    assert message in str(raised.value)
    assert "sk-secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("OSMOSIS_MAX_TURNS", "many", "$OSMOSIS_MAX_TURNS many: write a whole number of at least 1"),
        ("OSMOSIS_SCORE_PARTIAL", "maybe", "$OSMOSIS_SCORE_PARTIAL maybe: write true or false"),
        ("OSMOSIS_PARAM", "top_p=1", '$OSMOSIS_PARAM top_p=1: write an object such as {"top_p": 0.9}'),
        ("OSMOSIS_LIMIT", "-1", "$OSMOSIS_LIMIT -1: write a whole number of at least 1"),
    ],
)
def test_a_bad_variable_is_an_error_that_names_it(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        layered(RunConfig, {}, {name: text}, None)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "--n 0: write a whole number of at least 1"),
        ({"number": 1}, "there is no option 'number'"),
        ({"baseline": "x"}, "there is no option 'baseline'; did you mean 'baseline_model'?"),
        ({"model": 3}, "--model 3: write a string"),
        ({"api_key": 3}, "--api-key [masked]: write a string"),
        ({"workers": True}, "--workers True: write a whole number of at least 0"),
    ],
)
def test_a_bad_option_of_the_library_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        RunConfig.of(**options)
    assert message in str(raised.value)


def test_variables_that_choose_for_one_run_or_hold_a_key_are_not_read() -> None:
    found = effective({}, {"OSMOSIS_API_KEY": "sk-secret", "OSMOSIS_RESUME": "true", "OSMOSIS_MODEL": " "}, None)
    assert {found[name] for name in ("api_key", "resume", "model")} == {(None, "default"), (False, "default")}


def test_what_is_stored_holds_no_key_and_no_default() -> None:
    config = RunConfig.of(model="m", api_key="sk-secret", baseline_api_key="sk-other", n=3, timeout=450.0, resume=True)
    assert stored_options(config) == {"model": "m", "n": 3}
    assert secret_values(config) == ["sk-secret", "sk-other"]
    assert "sk-" not in repr(config)


def test_a_config_from_its_own_options_is_equal() -> None:
    config = RunConfig.of(mcp="tools", param={"top_p": 0.5}, eval_fn=["a:b"], worker_memory="2GB", isolation="rollout")
    assert config_of(RunConfig, stored_options(config)) == config


@pytest.mark.parametrize(("text", "size"), [("500MB", 500 << 20), ("2GB", 2 << 30), ("1.5 KiB", 1536), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


def test_sampling_parameters_are_merged() -> None:
    model = RunConfig.of(temperature=0.0, param={"top_p": 0.5, "temperature": 1.0}).model
    assert model.sampling == {"top_p": 0.5, "temperature": 0.0}
