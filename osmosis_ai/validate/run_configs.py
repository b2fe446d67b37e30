"""Check run configs (`configs/eval/*.toml`, `configs/training/*.toml`) by the rules of the platform's reference."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, TypeAlias, TypeGuard

from osmosis_ai.discovery.eval_configs import MAIN, MCP
from osmosis_ai.records import JsonObject
from osmosis_ai.toml_files import KeyLines, TomlError, parse_toml, read_toml_text
from osmosis_ai.validate.check import Check
from osmosis_ai.validate.findings import Finding, Place, codes, finding
from osmosis_ai.validate.secrets import kind_of_secret, secret_finding

__all__ = ["CHECKS", "TABLES", "Kind", "check_config", "check_configs", "check_document"]

Kind: TypeAlias = Literal["eval", "training"]

ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
RESERVED = "_OSMOSIS_"
COMMIT = re.compile(r"[0-9a-fA-F]{7,40}")
BRANCH = re.compile(r"[^\s-]\S*")
"""Git would take a leading dash for an option."""


class Field(NamedTuple):
    """One key: its type, whether it is required, and its plausible range (`exclusive`: above `least`)."""

    type: Literal["str", "int", "number"]
    required: bool = False
    least: float | None = None
    most: float | None = None
    exclusive: bool = False


_REQUIRED = ("rollout", "entrypoint", "model_path", "dataset")
_EXPERIMENT = {
    **dict.fromkeys(_REQUIRED, Field("str", required=True)),
    **dict.fromkeys(("commit_sha", "branch"), Field("str")),
}
_COUNT = Field("int", least=1)
_SECONDS = dict.fromkeys(("agent_workflow_timeout_s", "grader_timeout_s"), Field("number", least=0, exclusive=True))
_SIZES = ("n_samples_per_prompt", "rollout_batch_size", "max_prompt_length", "max_response_length")
TABLES: dict[Kind, dict[str, dict[str, Field]]] = {
    "eval": {
        "experiment": _EXPERIMENT,
        "evaluation": {
            **dict.fromkeys(("limit", "n", "batch_size"), _COUNT),
            "pass_threshold": Field("number"),
            **_SECONDS,
        },
    },
    "training": {
        "experiment": _EXPERIMENT,
        "training": {
            "lr": Field("number", least=0, exclusive=True),
            **dict.fromkeys(("total_epochs", *_SIZES), _COUNT),
            **_SECONDS,
        },
        "sampling": {
            "rollout_temperature": Field("number", least=0),
            "rollout_top_p": Field("number", least=0, most=1, exclusive=True),
        },
        "checkpoints": {"eval_interval": _COUNT, "checkpoint_save_freq": _COUNT},
    },
}
"""The keys of each table, by kind of config."""
# Tables whose keys are the user's own, or that pass through unchanged.
_OPEN = ("advanced", "env", "secrets")
_TYPES = {"str": "a string", "int": "an integer", "number": "a number"}


def check_configs(root: Path) -> Iterator[Finding]:
    """Check every run config of a repository."""
    folder = root / "configs"
    if not folder.is_dir():
        return
    kinds: dict[Path, Kind] = {folder / "eval": "eval", folder / "training": "training"}
    for path in sorted(folder.rglob("*.toml")):
        kind = kinds.get(path.parent)
        if kind is not None:
            yield from check_config(path, root, kind)
        else:
            message = "only configs in configs/eval/ and configs/training/ are read"
            yield finding("OSM513", message, Place(path.relative_to(root).as_posix()), "Move it there.")


def check_config(path: Path, root: Path, kind: Kind) -> list[Finding]:
    """Check one run config."""
    file = path.relative_to(root).as_posix()
    try:
        text = read_toml_text(path, root)
        document = parse_toml(text)
    except TomlError as error:
        return [finding("OSM501", error.message, Place(file, error.line))]
    return _Config(document, KeyLines(text), kind, root, file).check()


def check_document(document: JsonObject, kind: Kind) -> list[Finding]:
    """Check the content of a run config whose file and repository aren't at hand."""
    return _Config(document, KeyLines(""), kind, None, None).check()


class _Config:
    """The check of one config."""

    def __init__(self, document: JsonObject, lines: KeyLines, kind: Kind, root: Path | None, file: str | None) -> None:
        self._document = document
        self._lines = lines
        self._kind = kind
        self._root = root
        self._file = file
        self._found: list[Finding] = []

    def check(self) -> list[Finding]:
        tables = TABLES[self._kind]
        known = [*tables, *_OPEN]
        for name in self._document:
            if name not in known:
                self._unknown(name, known, (name,))
        for name, fields in tables.items():
            if name in self._document or name == "experiment":
                self._check_table(name, fields)
        experiment = self._document.get("experiment")
        if isinstance(experiment, dict):
            self._check_revision(experiment.get("commit_sha"), experiment.get("branch"))
            self._check_rollout(experiment.get("rollout"), experiment.get("entrypoint"))
        self._check_learnable()
        variables = self._check_env()
        self._check_secrets(variables)
        return self._found

    def _add(self, code: str, message: str, *path: str, hint: str = "") -> None:
        at = Place(self._file, self._lines.of(*path) if path else None, ".".join(path) or None)
        self._found.append(finding(code, message, at, hint))

    def _add_secret(self, kind: str, *path: str) -> None:
        self._found.append(secret_finding(kind, Place(self._file, self._lines.of(*path), ".".join(path))))

    def _unknown(self, name: str, known: list[str], path: tuple[str, ...]) -> None:
        close = difflib.get_close_matches(name, known, n=1)
        where = f" in [{path[0]}]" if len(path) > 1 else ""
        what = "key" if len(path) > 1 or not isinstance(self._document[name], dict) else "table"
        suggestion = f"; did you mean {close[0]}?" if close else ""
        self._add("OSM503", f"unknown {what} {name}{where}{suggestion}", *path, hint=f"Known here: {', '.join(known)}.")

    def _is_table(self, value: object, name: str) -> TypeGuard[JsonObject]:
        if not isinstance(value, dict):
            self._add("OSM504", f"{name} is {_found(value)}, not a table: write [{name}]", name)
        return isinstance(value, dict)

    def _check_table(self, name: str, fields: dict[str, Field]) -> None:
        table = self._document.get(name, {})
        if not self._is_table(table, name):
            return
        for key in table:
            if key not in fields:
                self._unknown(key, list(fields), (name, key))
        for key, field in fields.items():
            if key in table:
                self._check_value(name, key, table[key], field)
            elif field.required:
                missing = f"[{name}] has no {key}" if name in self._document else f"there is no [{name}] with {key}"
                self._add("OSM502", f"{missing}, which is required", name, key, hint=f'Write {key} = "…".')

    def _check_value(self, table: str, key: str, value: object, field: Field) -> None:
        wanted = {"str": str, "int": int, "number": (int, float)}[field.type]
        # In Python, a bool is an int.
        if not isinstance(value, wanted) or isinstance(value, bool):  # type: ignore[arg-type]
            message = f"{key} is {_found(value)}, not {_TYPES[field.type]}"
            self._add("OSM504", message, table, key)
        elif isinstance(value, str):
            if field.required and not value.strip():
                self._add("OSM502", f"{key} is required, but empty", table, key)
        elif isinstance(value, (int, float)) and not _in_range(value, field):
            if field.most is not None:
                allowed = f"{'more than ' if field.exclusive else ''}{field.least:g} to {field.most:g}"
            else:
                allowed = f"{'more than' if field.exclusive else 'at least'} {field.least:g}"
            self._add("OSM512", f"{key} is {value}; it should be {allowed}", table, key)

    def _check_revision(self, commit: object, branch: object) -> None:
        if isinstance(commit, str) and not COMMIT.fullmatch(commit):
            message = f"commit_sha is {commit[:60]!r}; a commit has 7 to 40 hexadecimal digits"
            hint = 'Copy it from git log, or write branch = "…" for the latest commit of a branch.'
            self._add("OSM509", message, "experiment", "commit_sha", hint=hint)
        if isinstance(branch, str) and not BRANCH.fullmatch(branch):
            message = f"branch is {branch[:60]!r}; a branch's name holds no spaces and doesn't begin with -"
            self._add("OSM509", message, "experiment", "branch")
        if commit is not None and branch is not None:
            message = "commit_sha and branch both say which code to run; keep one of them"
            self._add("OSM509", message, "experiment", "branch")

    def _check_rollout(self, rollout: object, entrypoint: object) -> None:
        if not isinstance(rollout, str) or not rollout.strip():
            return
        if "/" in rollout or "\\" in rollout or rollout in (".", ".."):
            message = f"rollout is {rollout!r}; it must be the name of a folder in rollouts/, not a path"
            self._add("OSM510", message, "experiment", "rollout")
            return
        rollouts = None if self._root is None else self._root / "rollouts"
        if self._root is not None and rollout == MCP and (self._root / MCP / MAIN).is_file():
            # The repository's own tools, in the built-in loop.
            rollouts = self._root
        if rollouts is not None and not (rollouts / rollout).is_dir():
            there = sorted(entry.name for entry in rollouts.glob("*/"))
            close = difflib.get_close_matches(rollout, there, n=1)
            suggestion = f"; did you mean {close[0]}?" if close else ""
            hint = f"Available: {', '.join(there[:20])}." if there else "There is no rollouts/ folder, or it is empty."
            message = f"the folder rollouts/{rollout} doesn't exist{suggestion}"
            self._add("OSM510", message, "experiment", "rollout", hint=hint)
            return
        if not isinstance(entrypoint, str) or not entrypoint.strip():
            return
        parts = PurePosixPath(entrypoint)
        if parts.is_absolute() or ".." in parts.parts:
            message = f"entrypoint is {entrypoint!r}; it must be a relative path inside rollouts/{rollout}"
            self._add("OSM511", message, "experiment", "entrypoint")
        elif rollouts is not None and not (rollouts / rollout / entrypoint).is_file():
            message = f"the entrypoint rollouts/{rollout}/{entrypoint} doesn't exist"
            self._add("OSM511", message, "experiment", "entrypoint")

    def _check_learnable(self) -> None:
        """A rollout is compared with others of its row, so there must be others, and they must differ."""
        training, sampling = self._document.get("training"), self._document.get("sampling")
        if isinstance(training, dict) and training.get("n_samples_per_prompt") == 1:
            message = "n_samples_per_prompt is 1; a rollout is compared with others of its row: there must be 2 or more"
            self._add("OSM514", message, "training", "n_samples_per_prompt")
        if isinstance(sampling, dict) and sampling.get("rollout_temperature") == 0:
            message = "rollout_temperature is 0; all rollouts of a row would be equal, and nothing would be learned"
            self._add("OSM514", message, "sampling", "rollout_temperature")

    def _check_env(self) -> set[str]:
        env = self._document.get("env", {})
        if not self._is_table(env, "env"):
            return set()
        for name, value in env.items():
            if name.startswith(RESERVED):
                self._add("OSM506", f"[env] {name}: the platform reserves names beginning with {RESERVED}", "env", name)
            elif not ENV_NAME.fullmatch(name):
                message = f"[env] {name}: use capital letters, digits and _, and don't begin with a digit"
                hint = f"Write {name.upper()}." if ENV_NAME.fullmatch(name.upper()) else ""
                self._add("OSM505", message, "env", name, hint=hint)
            if not isinstance(value, str):
                message = f"[env] {name} is {_found(value)}, not a string"
                hint = f'Write {name} = "{value}".' if isinstance(value, (int, float)) else ""
                self._add("OSM504", message, "env", name, hint=hint)
            elif (kind := kind_of_secret(value)) is not None:
                self._add_secret(kind, "env", name)
        return set(env)

    def _check_secrets(self, variables: set[str]) -> None:
        if "secrets" not in self._document:
            # The hosted platform refuses an eval config without the table; a training config may leave it out.
            if self._kind == "eval":
                hint = 'Write [secrets] with required = ["OPENAI_API_KEY"], or required = [] if it needs none.'
                self._add("OSM508", "an eval config must have [secrets]", hint=hint)
            return
        secrets = self._document["secrets"]
        if not self._is_table(secrets, "secrets"):
            return
        for key in secrets:
            if key != "required":
                self._unknown(key, ["required"], ("secrets", key))
        if "required" not in secrets:
            self._add("OSM508", "[secrets] has no required", "secrets", hint="Write required = [] if it needs none.")
            return
        required = secrets["required"]
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            message = f"required is {_found(required)}, not a list of names"
            self._add("OSM504", message, "secrets", "required")
            return
        seen: set[str] = set()
        for name in required:
            # A value in place of a name. The other messages quote the name, so they would show it.
            if (kind := kind_of_secret(name)) is not None:
                self._add_secret(kind, "secrets", "required")
                continue
            if not SECRET_NAME.fullmatch(name):
                message = f"[secrets] {name!r}: use capital letters, digits and _, and begin with a letter"
                self._add("OSM505", message, "secrets", "required", hint="Write the secret's name, never its value.")
            if name in variables:
                message = f"{name} is in both [env] and [secrets].required"
                self._add("OSM507", message, "env", name, hint="Remove it from [env] if it is secret.")
            if name in seen:
                self._add("OSM505", f"{name} is listed twice", "secrets", "required")
            seen.add(name)


def _in_range(value: float, field: Field) -> bool:
    # TOML has nan and inf.
    if value != value or value in (float("inf"), float("-inf")):
        return False
    if field.least is not None and (value < field.least or (field.exclusive and value == field.least)):
        return False
    return field.most is None or value <= field.most


def _found(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return f"the number {str(value)[:40]}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        wrong = [item for item in value if not isinstance(item, str)]
        return f"a list with {_found(wrong[0])} in it" if wrong else "a list"
    return "a table" if isinstance(value, dict) else "a date or time"


CHECKS = (Check("configs", f"OSM208 {codes(501, 514)}", lambda subject: check_configs(subject.root)),)
