"""Fetch a run's code from its repository and write it to a folder, without running any of it.

Hooks, filters and submodules of the repository have no effect, and no link may lead out of the folder.
"""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.errors import RepositoryError

__all__ = ["Checkout", "Revision", "check_out", "has_file", "resolve"]

MAX_CODE_BYTES = 2 << 30
MAX_FILES = 200_000
MAX_PACK_BYTES = 4 << 30
FETCH_SECONDS = 600
GIT_SECONDS = 120
"""Bounds on untrusted code: bytes and number of its files, bytes of a file that git writes, and git's time."""
SUBMODULE, LINK = "160000", "120000"
"""Modes of git's tree entries."""

_UNTRUSTED = {
    # Git must neither prompt nor run anything from the repository: no hooks, no filters, no `ext::` transports.
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
    "SSH_ASKPASS": "true",
    "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=20",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
    "GIT_ADVICE": "0",
    "LC_ALL": "C",
}


class Revision(NamedTuple):
    """The code that a run requests: a commit, else a branch's head, else the default branch's head."""

    commit: str | None
    branch: str | None


class Checkout(NamedTuple):
    """A run's code in its folder. `left_out` lists the submodules, which aren't fetched."""

    commit: str
    source: str
    left_out: list[str]


def check_out(
    revision: Revision, sources: Sequence[str], repository: Path, folder: Path, environ: dict[str, str]
) -> Checkout:
    """Fetch a revision into a repository that runs share, and write its files to a folder.

    Args:
        revision: The code to write.
        sources: URLs or folders to fetch from; the first that has the revision is used.
        repository: A bare repository, created if it doesn't exist.
        folder: The folder to write; its old content is removed.
        environ: The environment for git.

    Raises:
        RepositoryError: No source has the revision, or its files can't be used.
    """
    commit, source = resolve(revision, sources, repository, environ)
    git = _Git(repository, {**environ, **_UNTRUSTED})
    left_out, links = _check_tree(git, commit)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # An index of its own, because runs share the repository and may check out at the same time.
    index = folder.with_name(f"{folder.name}.index")
    try:
        # Without the operator's own config, whose filters the repository's attributes could start.
        plain = {"GIT_INDEX_FILE": str(index), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        git.run("read-tree", commit, more=plain)
        # Not `checkout`, which runs hooks and moves HEAD, which other runs share.
        git.run(f"--work-tree={folder}", "checkout-index", "--all", "--force", more=plain, seconds=FETCH_SECONDS)
    finally:
        index.unlink(missing_ok=True)
    _check_links(folder, links)
    return Checkout(commit, source, left_out)


def resolve(
    revision: Revision,
    sources: Sequence[str],
    repository: Path,
    environ: dict[str, str],
    *,
    seconds: float = FETCH_SECONDS,
) -> tuple[str, str]:
    """Fetch a revision as `check_out` does, and return its commit and source; raise RepositoryError."""
    git = _Git(repository, {**environ, **_UNTRUSTED})
    repository.parent.mkdir(parents=True, exist_ok=True)
    # Concurrent fetches would overwrite each other's refs/osmosis/branch before it is read.
    with _locked(repository.with_suffix(".lock")):
        if not (repository / "HEAD").is_file():
            # Without a template, which may hold hooks.
            git.run("init", "--quiet", "--bare", "--template=", str(repository))
        commit, source = _fetch(git, revision, sources, seconds)
        # A ref keeps git's garbage collection from deleting the commit.
        git.run("update-ref", f"refs/osmosis/runs/{commit}", commit)
    return commit, source


def has_file(repository: Path, commit: str, name: str, environ: dict[str, str]) -> bool:
    """Return True if a fetched commit has a file of this name."""
    git = _Git(repository, {**environ, **_UNTRUSTED})
    return any("\t" in line for line in git.lines("ls-tree", "-z", commit, "--", name))


class _Git:
    """Runs git commands in one repository."""

    def __init__(self, repository: Path, environ: dict[str, str]) -> None:
        self._repository = repository
        self._environ = environ

    def run(self, *arguments: str, more: dict[str, str] | None = None, seconds: float = GIT_SECONDS) -> str:
        """Run a git command for at most `seconds` and return its output; raise RepositoryError."""
        try:
            with _limited_files():
                process = subprocess.Popen(  # noqa: S603 - git, with arguments that can't be options
                    self._command(*arguments),
                    env={**self._environ, **(more or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
        except FileNotFoundError:
            raise RepositoryError("git isn't installed") from None
        with process:
            try:
                stdout, stderr = process.communicate(timeout=seconds)
            except BaseException as error:
                process.kill()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RepositoryError(f"git {arguments[0]} took more than {seconds:.0f} s") from None
                raise
        if process.returncode:
            said = stderr.decode("utf-8", "replace").strip().splitlines()
            # Git prints hints and progress around the line that gives the reason.
            reason = next((line for line in said if line.startswith(("fatal:", "error:"))), (said or ["no reason"])[-1])
            raise RepositoryError(reason.partition(": ")[2] or reason)
        return stdout.decode("utf-8", "surrogateescape")

    def lines(self, *arguments: str) -> Generator[str, None, None]:
        """Run a git command and yield its NUL-terminated lines. Closing the generator ends the command."""
        with subprocess.Popen(  # noqa: S603 - as above
            self._command(*arguments),
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            rest = b""
            try:
                while chunk := process.stdout.read(1 << 16):
                    *complete, rest = (rest + chunk).split(b"\0")
                    for line in complete:
                        yield line.decode("utf-8", "surrogateescape")
            finally:
                process.kill()

    def _command(self, *arguments: str) -> list[str]:
        safe = ("-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0")
        return ["git", *safe, f"--git-dir={self._repository}", *arguments]

    def find(self, name: str) -> str | None:
        """Return the commit that a name refers to, or None if it is unknown or ambiguous."""
        try:
            return self.run("rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}").strip()
        except RepositoryError:
            return None


def _fetch(git: _Git, revision: Revision, sources: Sequence[str], seconds: float) -> tuple[str, str]:
    if revision.commit is not None and (known := git.find(revision.commit)) is not None:
        return known, "the clone of an earlier run"
    if revision.commit is not None:
        # Servers may refuse to send a commit by its hash, so fetch all branches.
        wanted, name = "+refs/heads/*:refs/osmosis/heads/*", revision.commit
    elif revision.branch is not None:
        wanted, name = f"+refs/heads/{revision.branch}:refs/osmosis/branch", "refs/osmosis/branch"
    else:
        wanted, name = "+HEAD:refs/osmosis/branch", "refs/osmosis/branch"
    reasons = []
    for source in sources:
        try:
            also = ["+refs/osmosis/snapshots/*:refs/osmosis/snapshots/*"] if revision.commit is not None else []
            git.run(
                "fetch",
                "--quiet",
                "--no-tags",
                "--no-recurse-submodules",
                "--",
                source,
                wanted,
                *also,
                seconds=seconds,
            )
        except RepositoryError as error:
            reasons.append(f"{source}: {error}")
            continue
        found = git.find(name)
        if found is not None:
            return found, source
        reasons.append(f"{source}: no commit {name}; push it first")
    raise RepositoryError("; ".join(reasons) or "the workspace has no repository to fetch from; submit from its folder")


def _check_tree(git: _Git, commit: str) -> tuple[list[str], list[str]]:
    """Check that a commit's files aren't too many or too large; return its submodules and its links.

    A few git objects can describe billions of files, so reading stops at the limit.
    """
    submodules, links, files, size = [], [], 0, 0
    with closing(git.lines("ls-tree", "-r", "-z", commit)) as lines:
        for line in lines:
            described, _, name = line.partition("\t")
            if described.startswith(SUBMODULE):
                submodules.append(name)
            elif described.startswith(LINK):
                links.append(name)
            files += 1
            if files > MAX_FILES:
                raise RepositoryError(f"the repository has more than {MAX_FILES:,} files, the limit for a run")
    # A second pass, because git takes much longer for sizes than for names.
    with closing(git.lines("ls-tree", "-r", "-l", "-z", commit)) as lines:
        for line in lines:
            length = line.partition("\t")[0].split()[3]
            size += int(length) if length != "-" else 0
            if size > MAX_CODE_BYTES:
                most = f"{MAX_CODE_BYTES >> 20:,} MiB"
                raise RepositoryError(f"the repository's files are larger than {most}, the limit for a run")
    return submodules, links


def _check_links(folder: Path, links: Sequence[str]) -> None:
    root = folder.resolve()
    for name in links:
        try:
            inside = (folder / name).resolve().is_relative_to(root)
        except (OSError, RuntimeError):
            # A loop of links.
            inside = False
        if not inside:
            raise RepositoryError(f"{name} is a link that leads out of the repository")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_LIMITING = threading.Lock()


@contextmanager
def _limited_files() -> Iterator[None]:
    """Limit the size of files that a process started in the block can write."""
    # The limit is this whole process's for that moment: of two overlapping blocks, the second would take the first's
    # for what was there before, and leave it.
    with _LIMITING:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        soft = MAX_PACK_BYTES if before[1] == resource.RLIM_INFINITY else min(MAX_PACK_BYTES, before[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
