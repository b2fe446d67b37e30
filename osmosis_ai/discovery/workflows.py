"""Find the rollout server that `--rollout` names, without importing it."""

from __future__ import annotations

from pathlib import Path

from osmosis_ai.code_hashes import file_hash, python_files
from osmosis_ai.discovery.repository import root_above
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.records import Record

__all__ = ["WorkflowSource", "resolve_workflow", "workflow_root", "workflow_sources"]

ENTRYPOINT = "main.py"
PARENT = "rollouts"
DECLARATIONS = ("pyproject.toml", "uv.lock", ".python-version")


class WorkflowSource(Record, frozen=True):
    """A rollout server that is named but not started: the script `entrypoint`, in the rollout's `folder`.

    With `own_sdk`, it runs on the current interpreter: it declares no environment, or isn't to have it. `artifacts` is
    the folder in which it may write a folder for each rollout.
    """

    folder: str
    entrypoint: str
    artifacts: str
    own_sdk: bool = False

    @property
    def name(self) -> str:
        """The rollout's name."""
        return Path(self.folder).name


def workflow_root(text: str, cwd: Path) -> Path:
    """Return the root of the workspace that a `--rollout` value belongs to; raise UsageError if there is no rollout."""
    folder = _locate(text, cwd).parent
    return folder.parent.parent if folder.parent.name == PARENT else root_above(folder)


def resolve_workflow(text: str, cwd: Path, artifacts: Path, *, own_sdk: bool) -> WorkflowSource:
    """Resolve a `--rollout` value: a folder with main.py, or the script itself. Raises UsageError."""
    entrypoint = _locate(text, cwd)
    own = own_sdk or not (entrypoint.parent / DECLARATIONS[0]).is_file()
    return WorkflowSource(str(entrypoint.parent), str(entrypoint), str(artifacts), own)


def workflow_sources(source: WorkflowSource, root: Path) -> dict[str, str]:
    """Hash the files that decide what a rollout does: its Python files, and what declares its environment."""
    folder = Path(source.folder)
    found = python_files(folder, root)
    for name in DECLARATIONS:
        if (folder / name).is_file():
            found[(folder / name).resolve().relative_to(root.resolve()).as_posix()] = file_hash(folder / name)
    return found


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
