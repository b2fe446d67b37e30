"""Find the rollout server that `--rollout` names, without importing it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from osmosis_ai.code_hashes import file_hash, python_files
from osmosis_ai.discovery.repository import root_above
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.toml_files import TomlError, read_toml

__all__ = [
    "ENTRYPOINT",
    "PARENT",
    "ListedRollout",
    "WorkflowSource",
    "find_workflow",
    "list_rollouts",
    "resolve_workflow",
    "workflow_root",
    "workflow_sources",
    "workspace_above",
]

ENTRYPOINT = "main.py"
PARENT = "rollouts"
DECLARATIONS = ("pyproject.toml", "uv.lock", ".python-version")
"""The files that declare a rollout's environment. Without the first, it has none of its own."""


class WorkflowSource(Record, frozen=True):
    """A rollout server that is named but not started: the script `entrypoint`, in the rollout's `folder`.

    With `own_sdk`, it runs on the current interpreter: it declares no environment, or isn't to have it. `artifacts` is
    the folder in which it may write a folder for each rollout. `env` has variables for its environment alone.
    """

    folder: str
    entrypoint: str
    artifacts: str
    own_sdk: bool = False
    env: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The rollout's name."""
        return Path(self.folder).name


class ListedRollout(Record, frozen=True, omit_defaults=False):
    """A rollout of a workspace. `requires` is the SDK that its pyproject.toml declares; `configs` name the rollout."""

    name: str
    entrypoint: str
    sdk: str
    requires: str | None
    configs: list[str]


def workspace_above(cwd: Path) -> Path:
    """Return the workspace that a folder is in.

    That is the nearest folder upwards with `rollouts`, within a git working copy. If there is none, it is the
    repository's root, found as for other commands.
    """
    for folder in (cwd, *cwd.parents):
        if (folder / PARENT).is_dir():
            return folder
        # A folder `rollouts` further up belongs to something else.
        if (folder / ".git").exists() or folder == Path.home():
            break
    return root_above(cwd)


def find_workflow(name: str, cwd: Path, artifacts: Path, *, own_sdk: bool = False) -> WorkflowSource:
    """Resolve the name of a folder in `rollouts`, or a path to a rollout; raise UsageError."""
    folder = workspace_above(cwd) / PARENT / name
    if Path(name).name == name and (folder / ENTRYPOINT).is_file():
        return resolve_workflow(str(folder), cwd, artifacts, own_sdk=own_sdk)
    if not given_path(name, cwd).exists():
        others = _others(folder) or f" in {folder.parent}"
        raise UsageError(f"there is no rollout {name!r} with {ENTRYPOINT}{others}")
    return resolve_workflow(name, cwd, artifacts, own_sdk=own_sdk)


def list_rollouts(root: Path) -> list[ListedRollout]:
    """List the rollouts of a workspace, by name; those whose pyproject.toml can't be read declare nothing."""
    named: dict[str, list[str]] = {}
    for config in sorted((root / "configs").glob("*/*.toml")):
        # `osmosis validate` reports unreadable configs; the list shows what it can.
        with suppress(TomlError):
            experiment = read_toml(config, root).get("experiment") or {}
            named.setdefault(str(experiment.get("rollout")), []).append(config.relative_to(root).as_posix())
    found = []
    for script in sorted((root / PARENT).glob(f"*/{ENTRYPOINT}")):
        folder, requires, own = script.parent, None, True
        with suppress(TomlError, UsageError):
            project = _declaration(folder).get("project") or {}
            requires = next((text for text in project.get("dependencies", []) if _is_sdk(text)), None)
            own = _declares_own(folder) or not (folder / "pyproject.toml").is_file()
        entrypoint = script.relative_to(root).as_posix()
        sdk = "own" if own else "declared"
        found.append(ListedRollout(folder.name, entrypoint, sdk, requires, named.get(folder.name, [])))
    return found


def workflow_root(text: str, cwd: Path) -> Path:
    """Return the root of the workspace that a `--rollout` value belongs to; raise UsageError if there is no rollout."""
    folder = _locate(text, cwd).parent
    return folder.parent.parent if folder.parent.name == PARENT else root_above(folder)


def resolve_workflow(
    text: str, cwd: Path, artifacts: Path, *, own_sdk: bool = False, env: dict[str, str] | None = None
) -> WorkflowSource:
    """Resolve a `--rollout` value: a folder with main.py, or the script itself. Raises UsageError.

    A rollout also runs on the current interpreter if its pyproject.toml says so: `sdk = "own"` in `[tool.osmosis]`.
    """
    entrypoint = _locate(text, cwd)
    own = own_sdk or not (entrypoint.parent / DECLARATIONS[0]).is_file() or _declares_own(entrypoint.parent)
    return WorkflowSource(str(entrypoint.parent), str(entrypoint), str(artifacts), own, env or {})


def workflow_sources(source: WorkflowSource, root: Path) -> dict[str, str]:
    """Hash the files that decide what a rollout does: its Python files, and what declares its environment."""
    folder = Path(source.folder)
    found = python_files(folder, root)
    for name in DECLARATIONS:
        if (folder / name).is_file():
            found[(folder / name).resolve().relative_to(root.resolve()).as_posix()] = file_hash(folder / name)
    return found


def _is_sdk(requirement: str) -> bool:
    # Neither `osmosis-ai-extra` nor another distribution that begins alike.
    return re.match(r"osmosis[-_.]ai(?![\w.-])", requirement, re.IGNORECASE) is not None


def _declaration(folder: Path) -> JsonObject:
    file = folder / "pyproject.toml"
    return read_toml(file, folder) if file.is_file() else {}


def _declares_own(folder: Path) -> bool:
    file = folder / "pyproject.toml"
    try:
        tool = _declaration(folder).get("tool")
    except TomlError as error:
        raise UsageError(f"{file}: {error.message}") from error
    table = tool.get("osmosis") if isinstance(tool, dict) else None
    sdk = table.get("sdk", "declared") if isinstance(table, dict) else "declared"
    if sdk not in ("declared", "own"):
        raise UsageError(f"{file}: [tool.osmosis] sdk is {sdk!r}; write declared or own")
    return bool(sdk == "own")


def _locate(text: str, cwd: Path) -> Path:
    if not text.strip():
        raise UsageError(f"--rollout is empty: name a folder with {ENTRYPOINT}, for example {PARENT}/my-rollout")
    path = given_path(text, cwd)
    script = path / ENTRYPOINT if path.is_dir() else path
    if script.suffix != ".py" or not script.is_file():
        what = f"there is no {ENTRYPOINT} in {path}" if path.is_dir() else f"there is no script {path}"
        raise UsageError(f"--rollout {text}: {what}; name a folder with {ENTRYPOINT}, or the script{_others(path)}")
    return script.resolve()


def _others(path: Path) -> str:
    found = sorted(script.parent.name for script in path.parent.glob(f"*/{ENTRYPOINT}"))
    return f". The rollouts there: {', '.join(found[:10])}." if found else ""
