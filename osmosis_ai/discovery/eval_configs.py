"""Read the run configs of evaluations: rollout, model, dataset and how much to run.

Two forms were released. One begins with `[experiment]`; the older one has `[eval]`, `[llm]` and `[runs]`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from osmosis_ai.config import RunConfig
from osmosis_ai.data.formats import FORMATS
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.options import declared_options
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.toml_files import TomlError, read_toml

__all__ = ["EvalConfig", "eval_config_of", "find_dataset_file", "find_experiment", "read_eval_config"]

ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
"""The hosted platform's rules; unlike a variable, a secret can't begin with an underscore."""
RESERVED = "_OSMOSIS_"
"""The prefix of the variables by which the runtime talks to a rollout server."""
MCP, MAIN = "mcp", "main.py"
TRAINING = {"training", "sampling", "checkpoints"}
"""Tables that only training configs have."""
KEYS = {
    "model": "model_path",
    "base_url": "base_url",
    "timeout": "agent_workflow_timeout_s",
    "reward_timeout": "grader_timeout_s",
}
"""Options that configs call by another name."""


class EvalConfig(Record, frozen=True):
    """A run config: options by their names, the server's variables, and the names of the secrets it needs.

    `dataset` is a name or a path; the options have one only if it is a file of the workspace. `key_variable` is the
    variable that holds the model's key, `output` the folder for results. `ignored` names what has no effect here.
    """

    root: str
    dataset: str
    options: JsonObject
    env: dict[str, str] = {}
    secrets: list[str] = []
    key_variable: str | None = None
    output: str | None = None
    ignored: list[str] = []


class _Table(Record, frozen=True, forbid_unknown_fields=True):
    pass


class _Experiment(_Table, frozen=True):
    rollout: str
    entrypoint: str
    model_path: str
    dataset: str
    commit_sha: str | None = None
    branch: str | None = None


class _Evaluation(_Table, frozen=True):
    limit: int | None = None
    n: int | None = None
    batch_size: int | None = None
    pass_threshold: float | None = None
    agent_workflow_timeout_s: float | None = None
    grader_timeout_s: float | None = None


class _Secrets(_Table, frozen=True):
    required: list[str] = []


class _Current(_Table, frozen=True):
    experiment: _Experiment
    evaluation: _Evaluation = _Evaluation()
    env: dict[str, str] = {}
    secrets: _Secrets = _Secrets()
    # For platforms; an evaluation on this machine accepts it without effect.
    advanced: dict[str, Any] = {}


class _Eval(_Table, frozen=True):
    rollout: str
    entrypoint: str
    dataset: str
    limit: int | None = None
    offset: int | None = None
    fresh: bool = False
    retry_failed: bool = False


class _Llm(_Table, frozen=True):
    model: str
    base_url: str | None = None
    api_key_env: str | None = None


class _Runs(_Table, frozen=True):
    n: int | None = None
    batch_size: int | None = None
    pass_threshold: float | None = None


class _Output(_Table, frozen=True):
    log_samples: bool = False
    output_path: str | None = None
    quiet: bool = False
    debug: bool = False


class _Timeouts(_Table, frozen=True):
    agent_workflow_timeout_s: float | None = None
    grader_timeout_s: float | None = None


class _Older(_Table, frozen=True):
    eval: _Eval
    llm: _Llm
    runs: _Runs = _Runs()
    output: _Output = _Output()
    timeouts: _Timeouts = _Timeouts()
    env: dict[str, str] = {}


def read_eval_config(text: str, cwd: Path) -> EvalConfig:
    """Read a run config; raise UsageError if it is unusable."""
    path = given_path(text, cwd)
    if not path.is_file():
        raise UsageError(f"no run config at {path}")
    try:
        document = read_toml(path, path.parent)
    except TomlError as error:
        place = f"{path}:{error.line}" if error.line is not None else str(path)
        raise UsageError(f"{place}: {error.message}") from error
    return eval_config_of(document, path)


def eval_config_of(document: JsonObject, path: Path) -> EvalConfig:
    """Read a parsed run config as if it came from `path`; raise UsageError if it is unusable."""
    if TRAINING & document.keys():
        raise UsageError(
            f"{path}: a training config, as [{min(TRAINING & document.keys())}] shows; name one of configs/eval. "
            "`osmosis validate` checks training configs, and `osmosis rollout serve` serves the rollout to a trainer"
        )
    if "experiment" in document:
        return _current(_as(_Current, document, path), path)
    if "eval" in document:
        return _older(_as(_Older, document, path), path)
    raise UsageError(f"{path}: no [experiment]; it names rollout, entrypoint, model_path and dataset")


_T = TypeVar("_T", _Current, _Older)


def _as(kind: type[_T], document: JsonObject, path: Path) -> _T:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        # msgspec speaks of objects and JSON paths, a config's author of tables and keys.
        said = str(error).replace("Object ", "the table ").replace("`$.", "`").replace("at `$`", "at the top")
        raise UsageError(f"{path}: {said}") from error


def _current(config: _Current, path: Path) -> EvalConfig:
    experiment, evaluation = config.experiment, config.evaluation
    root, agent = find_experiment(path, experiment.rollout, experiment.entrypoint)
    for name in config.env:
        if name.startswith(RESERVED) or not ENV_NAME.fullmatch(name):
            raise UsageError(f"{path}: [env] can't set {name}: it is reserved, or no name of capitals, digits and _")
    for name in config.secrets.required:
        if not SECRET_NAME.fullmatch(name):
            raise UsageError(f"{path}: [secrets] names {name!r}; a name has capitals, digits and _")
        if name in config.env:
            raise UsageError(f"{path}: {name} is in [env] and in [secrets]; keep one of them")
    options = {
        **agent,
        "model": experiment.model_path,
        "dataset": find_dataset_file(root, experiment.dataset),
        # As in released SDKs, a limit of 0 or less counts as none.
        "limit": evaluation.limit if evaluation.limit is not None and evaluation.limit > 0 else None,
        "n": evaluation.n,
        "batch_size": evaluation.batch_size,
        "pass_threshold": evaluation.pass_threshold,
        "timeout": evaluation.agent_workflow_timeout_s,
        "reward_timeout": evaluation.grader_timeout_s,
    }
    pinned = {"commit_sha": experiment.commit_sha, "branch": experiment.branch}
    return EvalConfig(
        str(root),
        experiment.dataset,
        _given(options, path),
        config.env,
        config.secrets.required,
        ignored=[name for name, value in pinned.items() if value is not None],
    )


def _older(config: _Older, path: Path) -> EvalConfig:
    asked, runs, timeouts = config.eval, config.runs, config.timeouts
    root, agent = find_experiment(path, asked.rollout, asked.entrypoint)
    options = {
        **agent,
        "model": config.llm.model,
        "base_url": config.llm.base_url,
        "dataset": find_dataset_file(root, asked.dataset),
        "limit": asked.limit,
        "offset": asked.offset,
        "fresh": asked.fresh or None,
        "retry_failed": asked.retry_failed or None,
        "n": runs.n,
        "batch_size": runs.batch_size,
        "pass_threshold": runs.pass_threshold,
        "timeout": timeouts.agent_workflow_timeout_s,
        "reward_timeout": timeouts.grader_timeout_s,
        "quiet": config.output.quiet or None,
        "debug": config.output.debug or None,
    }
    return EvalConfig(
        str(root),
        asked.dataset,
        _given(options, path),
        config.env,
        key_variable=config.llm.api_key_env,
        output=config.output.output_path,
    )


def _given(options: JsonObject, path: Path) -> JsonObject:
    """Return the options that have a value; raise UsageError for one that is out of bounds."""
    declared = {option.name: option for option in declared_options(RunConfig)}
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name in declared:
            declared[name].check(value, f"{path}: {KEYS.get(name, name)} =")
    return given


def find_experiment(path: Path, rollout: str, entrypoint: str) -> tuple[Path, JsonObject]:
    """Return the workspace of a run config, and the option that names the agent; raise UsageError.

    The workspace is the nearest folder above the config that has the rollout in `rollouts/`. The rollout `mcp` may also
    be the repository's own tools, in the built-in loop.
    """
    if rollout in ("", ".", "..") or Path(rollout).name != rollout:
        raise UsageError(f"{path}: the rollout {rollout!r} isn't the name of a folder in rollouts/")
    above = path.resolve().parents
    for root in above:
        folder = root / "rollouts" / rollout
        if folder.is_dir():
            # Resolved, because `..` or a link in a config that someone else wrote could name any script.
            script = (folder / entrypoint).resolve()
            if not script.is_relative_to(folder.resolve()):
                raise UsageError(f"{path}: the entrypoint {entrypoint!r} is outside rollouts/{rollout}")
            return root, {"rollout": str(script)}
    # Only after all of `rollouts/`, so that a rollout in a folder called `mcp` comes first.
    for root in above:
        if rollout == MCP and (root / MCP / MAIN).is_file():
            return root, {"mcp": str(root / MCP)}
    raise UsageError(f"{path}: there is no folder rollouts/{rollout} above it")


def find_dataset_file(root: Path, name: str) -> str | None:
    """Return the file that a dataset's name stands for, if the workspace has it in `data/`."""
    for candidate in (name, *(f"{name}{one.suffix}" for one in FORMATS)):
        for folder in (root / "data", root):
            if (folder / candidate).is_file():
                return str(folder / candidate)
    return None
