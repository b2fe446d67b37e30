"""`osmosis eval run CONFIG`: the options that a run config stands for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

from osmosis_ai.cli.options import Given
from osmosis_ai.discovery.eval_configs import EvalConfig, read_eval_config
from osmosis_ai.environment import environment_of
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import UnreadableError, given_path, read_bounded

__all__ = ["given_by_config"]

MAX_SECRETS_BYTES = 1 << 20


def given_by_config(config: str, typed: Given, secrets_file: str | None) -> Given:
    """Return a run config's options, overridden by the typed ones, and put its variables into the environment.

    Secrets come from the file, else from the environment or a `.env`. Raises UsageError.
    """
    cwd = Path.cwd()
    found = read_eval_config(config, cwd)
    given = {**found.options, **typed}
    if "dataset" not in given:
        raise UsageError(
            f"{config}: the dataset {found.dataset!r} is no file in {Path(found.root, 'data')}; "
            "name one with --dataset-file FILE"
        )
    secrets = _secrets(found, secrets_file, cwd)
    if found.key_variable is not None and "api_key" not in typed:
        given["api_key"] = _known(found, cwd).get(found.key_variable)
        if not given["api_key"]:
            raise UsageError(f"{config}: api_key_env names {found.key_variable}, which isn't set")
    os.environ.update({**found.env, **secrets})
    return given


def _secrets(config: EvalConfig, file: str | None, cwd: Path) -> dict[str, str]:
    given = {} if file is None else _read_secrets(file, cwd)
    known = {**_known(config, cwd), **given}
    missing = [name for name in config.secrets if not known.get(name)]
    if missing:
        where = "the environment, a .env file, or a file named with --secrets-file"
        raise UsageError(f"the config needs the secrets {', '.join(missing)}: put them into {where}")
    return {**given, **{name: known[name] for name in config.secrets}}


def _known(config: EvalConfig, cwd: Path) -> Mapping[str, str]:
    return environment_of(os.environ, cwd, Path(config.root))


def _read_secrets(file: str, cwd: Path) -> dict[str, str]:
    from dotenv import dotenv_values

    if file == "-":
        text = sys.stdin.read(MAX_SECRETS_BYTES)
    else:
        path = given_path(file, cwd)
        try:
            text = read_bounded(path, MAX_SECRETS_BYTES, "larger than 1 MiB").decode("utf-8-sig")
        except (UnreadableError, UnicodeDecodeError) as error:
            raise UsageError(f"--secrets-file {file}: {error}") from None
    return {name: value for name, value in dotenv_values(stream=StringIO(text)).items() if value}
