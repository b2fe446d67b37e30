"""Read training configs: which agent and rows to roll out, how to train, and what to pass through to the trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from osmosis_ai.config import RunConfig
from osmosis_ai.discovery.eval_configs import find_dataset_file, find_experiment
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import UnreadableError, given_path, read_bounded
from osmosis_ai.models.policy.engine import MAX_RESPONSE, REPLY_FORM
from osmosis_ai.platform.orders import TrainingOrder
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.row_numbers import RowNumbers
from osmosis_ai.toml_files import parse_toml, read_toml_text
from osmosis_ai.validate.run_configs import check_config

__all__ = ["TRAINERS", "Policy", "TrainingConfig", "read_order", "read_training_config", "training_config_of"]

TRAINERS = {"trl": "osmosis_trainer_trl"}
"""The module of each trainer, by the name of its folder in `trainers/`."""
DEFAULTS: JsonObject = {
    "lr": 1e-5,
    "total_epochs": 1,
    "n_samples_per_prompt": 8,
    "rollout_batch_size": 16,
    "max_prompt_length": 4096,
    "max_response_length": 4096,
}
MAX_ORDER_BYTES = 16 * 1024 * 1024
EVAL_INTERVAL = 10
"""Steps between evaluations."""
SAVE_FREQUENCY = 10
"""Steps between checkpoints."""
IN_FLIGHT = 32
"""Concurrent rollouts."""
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 64
"""Share of the rows to hold out, and the maximum number, because each evaluation rolls them all out."""


class Policy(Record, frozen=True):
    """A served policy: its base URL, and the bearer token it requires."""

    url: str
    token: str | None


class TrainingConfig(Record, frozen=True):
    """A training config, with every default filled in.

    Attributes:
        path: The config file.
        root: The workspace folder.
        agent: The run option that selects the agent: `mcp` or `rollout`.
        dataset: The dataset file.
        model: The model folder.
        training: The `[training]` table for the trainer.
        temperature, top_p: The sampling parameters.
        eval_interval: Steps between evaluations on held-out rows; None for no evaluation.
        save_frequency: Steps between checkpoints.
        timeouts: Run options that limit the seconds of a rollout and of a score.
        env: Environment variables for the rollout server.
        secrets: Names of environment variables that must be set.
        trainer: The trainer's name.
        reply_form: How the model writes tool calls; None to detect it from the chat template.
        held_out: The number of rows to hold out; None for a tenth of them.
        in_flight: Maximum concurrent rollouts.
        seed: Seeds the row order, the adapter and sampling.
        advanced: The `[advanced]` options passed through to the trainer.
    """

    path: str
    root: str
    agent: JsonObject
    dataset: str
    model: str
    training: JsonObject
    temperature: float
    top_p: float
    eval_interval: int | None
    save_frequency: int
    timeouts: JsonObject
    env: dict[str, str]
    secrets: list[str]
    trainer: str
    reply_form: str | None
    held_out: int | None
    in_flight: int
    seed: int
    advanced: JsonObject

    @property
    def samples(self) -> int:
        """Rollouts per row."""
        return int(self.training["n_samples_per_prompt"])

    @property
    def batch_rows(self) -> int:
        """Rows per step."""
        return int(self.training["rollout_batch_size"])

    @property
    def max_prompt(self) -> int:
        """The maximum length of a prompt, in tokens."""
        return int(self.training["max_prompt_length"])

    @property
    def max_response(self) -> int:
        """The maximum number of tokens after the prompt, including tool results."""
        return int(self.training["max_response_length"])

    def held_out_of(self, rows: int) -> int:
        """Return how many rows to hold out for evaluation, given the number of usable rows."""
        if self.eval_interval is None:
            return 0
        wanted = min(MOST_HELD_OUT, max(1, round(rows * HELD_OUT_SHARE))) if self.held_out is None else self.held_out
        # At least one row must remain to train on.
        return min(wanted, rows - 1)

    def rollouts(self, policy: Policy, rows: Sequence[int], n: int, **options: Any) -> RunConfig:
        """Return the config of a run with `n` rollouts of the policy per row; `options` are further run options."""
        param: JsonObject = {"top_p": self.top_p, MAX_RESPONSE: self.max_response}
        if self.reply_form is not None:
            param[REPLY_FORM] = self.reply_form
        return self.run_config(
            rows,
            n=n,
            # The name under which every trainer serves its policy: see docs/training-protocol.md.
            model="policy",
            base_url=policy.url,
            api_key=policy.token,
            tokenizer=self.model,
            temperature=self.temperature,
            param=param,
            batch_size=self.in_flight,
            **options,
        )

    def run_config(self, rows: Sequence[int] | None = None, **options: Any) -> RunConfig:
        """Return the config of a run of this agent on `rows`, or on the whole dataset if None."""
        chosen = {} if rows is None else {"rows": str(RowNumbers(",".join(map(str, rows))))}
        # Only a rollout server has an environment of its own.
        variables = {"rollout_env": self.env} if "rollout" in self.agent else {}
        return RunConfig.of(
            "eval", **self.agent, **variables, dataset=self.dataset, **self.timeouts, **chosen, **options
        )


def read_training_config(
    text: str, cwd: Path, *, model: str | None = None, dataset: str | None = None
) -> TrainingConfig:
    """Read and check a training config.

    Args:
        text: The config file, as given on the command line.
        cwd: The folder that relative paths start from.
        model: A model folder that overrides the config's.
        dataset: A dataset file that overrides the config's.

    Raises:
        UsageError: The config is unusable; the message lists every reason with its line.
    """
    path = given_path(text, cwd)
    if not path.is_file():
        raise UsageError(f"no training config at {path}")
    root = _workspace(path)
    if found := check_config(path, root, "training"):
        said = [f"{path}:{each.line}: {each.message}" if each.line else f"{path}: {each.message}" for each in found]
        raise UsageError("\n".join(said))
    document = parse_toml(read_toml_text(path, root))
    return training_config_of(document, path, cwd, model=model, dataset=dataset)


def read_order(text: str, cwd: Path) -> tuple[TrainingConfig, TrainingOrder]:
    """Read the order file that a platform starts its trainer with; raise UsageError if it is unusable."""
    path = given_path(text, cwd)
    try:
        order = msgspec.json.decode(read_bounded(path, MAX_ORDER_BYTES, "too large"), type=TrainingOrder)
    except (UnreadableError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} is not a training order: {error}") from error
    tables = {name: getattr(order, name) for name in ("training", "sampling", "checkpoints", "advanced", "env")}
    experiment = {
        "rollout": order.rollout,
        "entrypoint": order.entrypoint,
        "model_path": order.model,
        "dataset": order.dataset,
    }
    document = {**tables, "experiment": experiment, "secrets": {"required": order.secrets}}
    # The file needn't exist: its place tells where the workspace is, and errors name it.
    config = Path(order.code, "configs", "training", f"{order.name}.toml")
    return training_config_of(document, config, cwd, dataset=order.dataset), order


def training_config_of(
    document: JsonObject, path: Path, cwd: Path, *, model: str | None = None, dataset: str | None = None
) -> TrainingConfig:
    """Read a parsed training config as if it came from `path`; raise UsageError if it is unusable."""
    if "experiment" not in document:
        raise UsageError(f"{path}: no [experiment]; it names rollout, entrypoint, model_path and dataset")
    experiment = document["experiment"]
    root, agent = find_experiment(path, experiment["rollout"], experiment["entrypoint"])
    file = find_dataset_file(root, experiment["dataset"]) if dataset is None else str(given_path(dataset, cwd))
    if file is None:
        raise UsageError(
            f"{path}: the dataset {experiment['dataset']!r} is not a file in {root / 'data'}; "
            "name one with --dataset-file FILE"
        )
    given, sampling = document.get("training", {}), document.get("sampling", {})
    checkpoints, advanced = document.get("checkpoints", {}), dict(document.get("advanced", {}))
    config = TrainingConfig(
        path=str(path),
        root=str(root),
        agent=agent,
        dataset=file,
        model=str(_model_folder(experiment["model_path"], root) if model is None else given_path(model, cwd)),
        training={name: given.get(name, default) for name, default in DEFAULTS.items()},
        temperature=sampling.get("rollout_temperature", 1.0),
        top_p=sampling.get("rollout_top_p", 1.0),
        eval_interval=checkpoints.get("eval_interval", EVAL_INTERVAL),
        save_frequency=checkpoints.get("checkpoint_save_freq", SAVE_FREQUENCY),
        timeouts={
            option: given[name]
            for option, name in (("timeout", "agent_workflow_timeout_s"), ("reward_timeout", "grader_timeout_s"))
            if name in given
        },
        env=document.get("env", {}),
        secrets=document.get("secrets", {}).get("required", []),
        trainer=_taken(advanced, "trainer", str, "trl", path),
        reply_form=_taken(advanced, REPLY_FORM, str, None, path),
        held_out=_taken(advanced, "eval_rows", int, None, path),
        in_flight=_taken(advanced, "batch_size", int, IN_FLIGHT, path),
        seed=_taken(advanced, "seed", int, 0, path),
        advanced=advanced,
    )
    _check(config)
    return config


def _check(config: TrainingConfig) -> None:
    """Raise UsageError for unusable values in `[advanced]`."""
    if config.trainer not in TRAINERS:
        raise UsageError(f"{config.path}: [advanced] trainer is {config.trainer!r}; it must be {' or '.join(TRAINERS)}")
    if config.held_out is not None and config.held_out < 0:
        raise UsageError(f"{config.path}: [advanced] eval_rows is {config.held_out}; it can't be negative")
    if config.in_flight < 1:
        raise UsageError(f"{config.path}: [advanced] batch_size is {config.in_flight}; it must be 1 or more")


def _workspace(path: Path) -> Path:
    """Return the folder that contains `configs/training`, or the config's own folder if it is elsewhere."""
    folder = path.resolve().parent
    return folder.parents[1] if folder.parts[-2:] == ("configs", "training") else folder


def _model_folder(name: str, root: Path) -> Path:
    """Return a model's folder: a path relative to the workspace, or the snapshot of `main` in the Hugging Face cache.

    Never downloads anything.
    """
    for folder in (Path(name).expanduser(), root / name):
        if folder.is_dir():
            return folder.resolve()
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    head = cache / "refs" / "main"
    if head.is_file():
        return cache / "snapshots" / head.read_text(encoding="utf-8").strip()
    raise UsageError(
        f"the model {name!r} is neither a folder nor in the Hugging Face cache ({cache.parent}). Download it with "
        f"`hf download {name}`, or name its folder in model_path."
    )


def _taken(advanced: dict[str, Any], name: str, kind: type, default: Any, path: Path) -> Any:
    """Remove one of the runtime's own options from `[advanced]`; raise UsageError if its type is wrong."""
    value = advanced.pop(name, default)
    # bool is a subclass of int: `eval_rows = true` isn't a number of rows.
    if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
        raise UsageError(f"{path}: [advanced] {name} is {value!r}; it must be {_KINDS[kind]}")
    return value


_KINDS: Mapping[type, str] = {str: "a string", int: "an integer"}
