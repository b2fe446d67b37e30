"""Read run configs for submission: check them with line numbers, and convert them to the request's body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.folders import UnreadableError, given_path, read_bounded
from osmosis_ai.platform.client import ClientError
from osmosis_ai.records import JsonObject
from osmosis_ai.toml_files import parse_toml, read_toml_text
from osmosis_ai.validate.findings import Finding
from osmosis_ai.validate.run_configs import Kind, check_config

__all__ = ["RunConfigFile", "provided_secrets", "read_config"]

FOLDERS: Mapping[Kind, str] = {"eval": "configs/eval", "training": "configs/training"}
MAX_SECRETS_BYTES = 1 << 20


class RunConfigFile(NamedTuple):
    """The tables of a checked config."""

    document: JsonObject

    @property
    def secrets(self) -> list[str]:
        """Names of the secrets that the run requires."""
        required: list[str] = self.document.get("secrets", {}).get("required", [])
        return required

    @property
    def pinned(self) -> bool:
        """True if the config names a commit or a branch."""
        return bool({"commit_sha", "branch"} & self.document["experiment"].keys())

    def submission(self, provided: Mapping[str, str], commit: str | None = None) -> JsonObject:
        """Return the body of the submission; `commit` replaces the config's own."""
        experiment = dict(self.document["experiment"])
        if commit is not None:
            experiment.pop("branch", None)
            experiment["commit_sha"] = commit
        tables = {
            f"{name}_config": self.document.get(name)
            for name in ("evaluation", "training", "sampling", "checkpoints", "advanced", "env")
        }
        secrets = {"required": self.secrets, **({"provided": dict(provided)} if provided else {})}
        return {
            "experiment_config": experiment,
            **{name: table for name, table in tables.items() if table},
            "secrets": secrets,
        }


def read_config(text: str, kind: Kind, root: Path) -> RunConfigFile:
    """Read a config of the workspace; raise ClientError with all of its problems.

    A relative path starts from the workspace, and the file must be in the folder of its kind.
    """
    folder = (root / FOLDERS[kind]).resolve()
    path = given_path(text, root)
    if path.suffix != ".toml":
        raise ClientError(f"{text}: a run config is a .toml file in {FOLDERS[kind]}/")
    if not path.is_file():
        there = sorted(one.relative_to(root).as_posix() for one in folder.glob("*.toml"))
        known = f"; the workspace has {', '.join(there[:10])}" if there else ""
        raise ClientError(f"{text}: there is no such file in {root}{known}")
    # A link in the folder may lead out of it.
    path = path.resolve()
    if not path.is_relative_to(folder):
        raise ClientError(f"{text}: the configs of `osmosis {_command(kind)} submit` are in {FOLDERS[kind]}/")
    root = root.resolve()
    # Warnings count as errors here, because the platform rejects such values too.
    errors = check_config(path, root, kind)
    if errors:
        header = f"Invalid {kind} config:"
        issues = [{"key": each.subject or "", "message": each.message, "line": each.line} for each in errors]
        said = "\n".join(f"  - {_described(each)}" for each in errors)
        raise ClientError(f"{header}\n{said}", "VALIDATION", {"error": header, "issues": issues})
    return RunConfigFile(parse_toml(read_toml_text(path, root)))


def provided_secrets(names: Sequence[str], file: str | None, cwd: Path, stdin: StringIO) -> dict[str, str]:
    """Return the values of required secrets from a dotenv file, or from stdin if `file` is `-`; raise ClientError."""
    if file is None:
        return {}
    from dotenv import dotenv_values

    if file == "-":
        text = stdin.read(MAX_SECRETS_BYTES)
    else:
        try:
            data = read_bounded(given_path(file, cwd), MAX_SECRETS_BYTES, "larger than 1 MiB")
            text = data.decode("utf-8-sig")
        except (UnreadableError, UnicodeDecodeError) as error:
            raise ClientError(f"--secrets-file {file}: {error}") from None
    values = dotenv_values(stream=StringIO(text))
    return {name: value for name in names if (value := values.get(name))}


def _described(each: Finding) -> str:
    place = f"{each.file}:{each.line}: " if each.line else ""
    return f"{place}{each.message}{f'. {each.hint}' if each.hint else ''}"


def _command(kind: Kind) -> str:
    return "eval" if kind == "eval" else "train"
