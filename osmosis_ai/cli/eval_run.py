"""`osmosis eval run CONFIG`: a run with the options of a run config."""

from __future__ import annotations

import getpass
import os
import secrets
import sys
import time
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.options import Given, dash_is_json
from osmosis_ai.discovery.eval_configs import EvalConfig, read_eval_config
from osmosis_ai.environment import environment_of
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import UnreadableError, given_path, read_bounded
from osmosis_ai.masking import VARIABLE

__all__ = ["evaluate_config"]

MAX_SECRETS_BYTES = 1 << 20
"""Bound of a dotenv file: one that is named by mistake may hold gigabytes."""


def evaluate_config(config: str, typed: Given, secrets_file: str | None) -> int:
    """Run a run config, overridden by the typed options, and return the exit code. Raises UsageError."""
    typed = dash_is_json(typed)
    if not typed.keys() & {"name", "resume", "resume_run", "retry_failed", "regrade"}:
        # Name the run after its config, so that it can be continued by that name.
        typed = {**typed, "name": _new_name(config)}
    cwd = Path.cwd()
    if typed.get("watch"):
        from osmosis_ai.cli.watch import watch_command

        if "output" in typed:
            raise UsageError("-o writes files when a run ends, and --watch never ends; remove one of them")
        return watch_command(lambda: _given(config, typed, secrets_file, cwd)[0], "eval")
    from osmosis_ai.cli.run import run_command
    from osmosis_ai.runtime.run.eval_files import check_folder

    given, folder = _given(config, typed, secrets_file, cwd)
    # Before the run, whose results an unusable folder would not take.
    files = None if folder is None else check_folder(folder, cwd)
    # As in released SDKs, failed rollouts don't fail this command.
    return run_command(given, "eval", files=files, counts_failures=False)


def _given(config: str, typed: Given, secrets_file: str | None, cwd: Path) -> tuple[Given, str | None]:
    """Return the run's options and the folder for its files, and set the config's secrets."""
    found = read_eval_config(config, cwd)
    options = {**found.options, "output": found.output}
    # They exclude each other, and a typed option overrides the config's.
    if "rows" in typed:
        options = {name: value for name, value in options.items() if name not in ("limit", "offset")}
    given = {**options, **typed}
    # These are for the rollout only: an OSMOSIS_ variable among them mustn't become an option of this command.
    given["rollout_env"] = {**found.env, **typed.get("rollout_env", {})}
    folder = given.pop("output")
    if "dataset" not in given:
        raise UsageError(
            f"{config}: the dataset {found.dataset!r} is not a file in {Path(found.root, 'data')}; "
            "name one with --dataset-file FILE"
        )
    output = Output(quiet=bool(given.get("quiet")))
    for name in found.ignored:
        output.say(f"{name} has no effect: the run uses the code in {found.root}")
    _set_variables(found, secrets_file, cwd, output, offline=str(given["model"]).startswith("offline/"))
    if found.key_variable is not None and "api_key" not in typed:
        given["api_key"] = _known(found, cwd).get(found.key_variable)
        if not given["api_key"]:
            raise UsageError(f"{config}: api_key_env names {found.key_variable}, which isn't set")
    return given, folder


def _new_name(config: str) -> str:
    stem = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in Path(config).stem)
    # The random part tells apart runs that begin in the same second.
    return f"{stem[:64]}-{time.strftime('%Y%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


def _set_variables(config: EvalConfig, secrets_file: str | None, cwd: Path, output: Output, *, offline: bool) -> None:
    """Put a config's secrets into the environment, which the rollout server inherits.

    Secrets may be missing with an offline model, which needs no key.
    """
    found, missing = _secrets(config, secrets_file, cwd, ask=not offline)
    if missing and not offline:
        where = "the environment, a .env file, or a file named with --secrets-file"
        raise UsageError(f"the config needs the secrets {', '.join(missing)}; set them in {where}")
    if missing:
        output.say(f"not set: {', '.join(missing)} of [secrets]; the offline model needs no key, a grader may")
    # Mask them all, even if their names don't look like those of keys.
    masked = ",".join(filter(None, [os.environ.get(VARIABLE), *found]))
    os.environ.update({**found, **({VARIABLE: masked} if found else {})})


def _secrets(config: EvalConfig, file: str | None, cwd: Path, *, ask: bool) -> tuple[dict[str, str], list[str]]:
    """Return the secrets, and the names of those that are missing.

    They come from the file, else from the environment or a `.env`, else (with `ask`) from a prompt.
    """
    given = {} if file is None else _read_secrets(file, cwd)
    known = {**_known(config, cwd), **given}
    missing = [name for name in config.secrets if not known.get(name)]
    # With `-`, stdin has been read as the file, so nothing can be asked on it.
    if ask and missing and file != "-" and sys.stdin.isatty():
        known |= {name: getpass.getpass(f"{name}: ") for name in missing}
        missing = [name for name in missing if not known[name]]
    return {**given, **{name: known[name] for name in config.secrets if name not in missing}}, missing


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
