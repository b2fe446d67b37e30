"""Build the Python environment that a rollout's own pyproject.toml declares, with uv.

Environments are shared between runs, in the user's cache folder, keyed by the hash of their declaration. Building one
removes those that have been unused for a month. Nothing is written into the user's tree: the rollout's folder is put on
the path, not installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from time import monotonic, time
from typing import TextIO

from platformdirs import user_cache_path

from osmosis_ai.discovery.workflows import WorkflowSource
from osmosis_ai.errors import RepositoryError
from osmosis_ai.folders import UnreadableError, read_bounded
from osmosis_ai.process_tree import end_descendants
from osmosis_ai.toml_files import parse_toml, read_toml_text

__all__ = ["environments_folder", "interpreter_of", "prepare_environment", "uv_command"]

UV_SECONDS = 900.0
SHOWN_LINES = 12
MAX_LOCK_BYTES = 16 * 1024 * 1024
POLL_SECONDS = 0.1
UNUSED_SECONDS = 30 * 24 * 3600.0
COMPLETE = "osmosis-complete"
"""Marks a completely installed environment; its modification time is that of the last use."""


def environments_folder() -> Path:
    """Return the folder of all environments."""
    return user_cache_path("osmosis", appauthor=False) / "environments"


def prepare_environment(
    rollout: Path,
    *,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    stopped: Event | None = None,
) -> Path:
    """Return the interpreter of a rollout's environment, after building the environment if needed.

    Without a pyproject.toml in the rollout's folder, return the current interpreter. If several processes need the same
    environment, one builds it while the others wait.

    Args:
        rollout: The rollout's folder.
        folder: Where to keep environments; `environments_folder()` by default.
        environ: The environment variables for uv; this process's by default.
        stopped: Set by another thread to abort the preparation.

    Raises:
        RepositoryError: The environment can't be built; the message has uv's last lines.
    """
    stopped = stopped or Event()
    declaration, lock = rollout / "pyproject.toml", rollout / "uv.lock"
    if not declaration.is_file():
        return Path(sys.executable)
    try:
        text = read_toml_text(declaration, rollout)
        project = parse_toml(text)
        locked = read_bounded(lock, MAX_LOCK_BYTES, "larger than 16 MiB") if lock.is_file() else None
        uv = _Uv(rollout, project, environ, stopped)
        name = f"{rollout.resolve().name}-{_key(rollout, text.encode(), locked, local=uv.has_local_sources)}"
    except UnreadableError as error:
        raise RepositoryError(f"{declaration}: {error.message}") from error
    home = environments_folder() if folder is None else folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        target = home / name
        python = target / "bin" / "python"
        with _locked(target, stopped):
            made = python.exists() and (target / COMPLETE).exists()
            if not made:
                # An interrupted installation may have left a partial environment.
                shutil.rmtree(target, ignore_errors=True)
                uv.run("venv", "--quiet", str(target))
            # Local sources may have changed, unlike packages of an index.
            if not made or uv.has_local_sources:
                uv.install(target, python, locked=locked is not None)
            (target / COMPLETE).touch()
        if not made:
            _remove_unused(home)
    except OSError as error:
        raise RepositoryError(
            f"can't make the environment of {rollout} in {home}: {error.strerror or error}"
        ) from error
    return python


def interpreter_of(source: WorkflowSource, stopped: Event | None = None) -> Path:
    """Return the interpreter for a rollout server, building its environment if needed; raise RepositoryError."""
    return Path(sys.executable) if source.own_sdk else prepare_environment(Path(source.folder), stopped=stopped)


def uv_command(path: str | None, *, installed: bool) -> list[str]:
    """Return the command that runs uv: the installed package's, else the PATH's; raise RepositoryError if neither."""
    if installed:
        return [sys.executable, "-m", "uv"]
    found = shutil.which("uv", path=path)
    if found is None:
        raise RepositoryError(
            "uv, which builds the rollout's environment, is missing: pip install 'osmosis-ai[workflows]'"
        )
    return [found]


class _Uv:
    """Runs uv for one rollout."""

    def __init__(
        self, rollout: Path, project: Mapping[str, object], environ: Mapping[str, str] | None, stopped: Event
    ) -> None:
        self._rollout = rollout
        self._stopped = stopped
        given = dict(os.environ if environ is None else environ)
        for name in ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT"):
            given.pop(name, None)
        # Once here, instead of at each start of a server that may not write it.
        given.setdefault("UV_COMPILE_BYTECODE", "1")
        # uv looks for interpreters on the PATH, where pyenv has only the chosen ones.
        given["PATH"] = os.pathsep.join([given.get("PATH", os.defpath), *_pyenv_folders(given)])
        self._environ = given
        tool = project.get("tool")
        own = tool.get("uv") if isinstance(tool, dict) else None
        self.has_local_sources = bool(own.get("sources")) if isinstance(own, dict) else False

    def install(self, target: Path, python: Path, *, locked: bool) -> None:
        """Install what the rollout declares, at the exact versions of its lock file if it has one."""
        if locked:
            self._environ["UV_PROJECT_ENVIRONMENT"] = str(target)
            self.run("sync", "--quiet", "--frozen", "--no-install-project", "--python", str(python))
        else:
            declaration = str(self._rollout / "pyproject.toml")
            self.run("pip", "install", "--quiet", "--python", str(python), "-r", declaration)

    def run(self, *arguments: str) -> None:
        """Run a uv command; raise RepositoryError if it fails."""
        command = uv_command(self._environ["PATH"], installed=find_spec("uv") is not None)
        process = subprocess.Popen(  # noqa: S603 - arguments without a shell
            [*command, *arguments],
            cwd=self._rollout,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output = self._wait(process)
        if process.returncode != 0:
            lines = [line.rstrip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
            said = "\n".join(f"  {line}" for line in lines[-SHOWN_LINES:]) or "  (no output)"
            raise RepositoryError(f"{self._what}; `uv {' '.join(arguments[:2])}` said:\n{said}")

    def _wait(self, process: subprocess.Popen[bytes]) -> bytes:
        """Wait until a command ends, and return its output."""
        deadline = monotonic() + UV_SECONDS
        while True:
            try:
                return process.communicate(timeout=POLL_SECONDS)[0]
            except subprocess.TimeoutExpired:
                late = monotonic() > deadline
                if late or self._stopped.is_set():
                    end_descendants(process.pid)
                    process.kill()
                    process.communicate()
                    reason = f"uv took longer than {UV_SECONDS:g} s" if late else "stopped"
                    raise RepositoryError(f"{self._what}: {reason}") from None

    @property
    def _what(self) -> str:
        return f"can't make the environment that {self._rollout / 'pyproject.toml'} declares"


def _pyenv_folders(environ: Mapping[str, str]) -> list[str]:
    """Return the folders of pyenv's interpreters that uv can use, newest version first."""
    versions = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = []
    for folder in versions.glob("3.*/bin"):
        numbers = folder.parent.name.split(".")
        if all(number.isdecimal() for number in numbers):
            found.append(([int(number) for number in numbers], str(folder)))
    return [folder for _, folder in sorted(found, reverse=True)]


def _key(rollout: Path, declared: bytes, locked: bytes | None, *, local: bool) -> str:
    digest = hashlib.blake2b(digest_size=12)
    place = os.fsencode(rollout.resolve()) if local else b""
    pinned = rollout / ".python-version"
    python = read_bounded(pinned, MAX_LOCK_BYTES, "too large") if pinned.is_file() else b""
    for part in (declared, locked or b"", python, place, f"{sys.platform} {platform.machine()}".encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _remove_unused(home: Path) -> None:
    """Remove environments unused for a month, except those that a process is building."""
    for stamp in home.glob(f"*/{COMPLETE}"):
        with Path(f"{stamp.parent}.lock").open("a", encoding="utf-8") as file:
            if _lock(file) and time() - stamp.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(stamp.parent, ignore_errors=True)


@contextmanager
def _locked(target: Path, stopped: Event) -> Iterator[None]:
    """Wait for an environment's lock, and hold it during the block."""
    with Path(f"{target}.lock").open("a", encoding="utf-8") as file:
        while not _lock(file):
            if stopped.wait(POLL_SECONDS):
                raise RepositoryError(f"stopped while another process was building the environment {target}")
        yield


def _lock(file: TextIO) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
