"""Check the git working copy for files that a sync would miss or must not carry. Runs only reading git commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from osmosis_ai.validate.check import Check
from osmosis_ai.validate.findings import Finding, Place, codes, examples, finding

__all__ = ["CHECKS", "check_working_copy"]

GIT_SECONDS = 20.0
"""Time limit for one git command, which may wait for a slow disk or a lock."""
LARGE_BYTES = 50_000_000  # GitHub warns
TOO_LARGE_BYTES = 100_000_000  # GitHub refuses
MAX_FILES = 100_000
"""Files looked at where there is no git to list them; a folder given by mistake may hold a whole disk."""
_NEEDED = ("mcp", "reward_fn", "reward_rubric", "configs", "rollouts", "test_data.jsonl", "pyproject.toml")
_TEMPLATES = (".example", ".sample", ".template", ".dist")
"""Suffixes of .env files that are meant to be committed, because they hold no values."""


class GitError(Exception):
    """Git isn't installed, or its command failed."""


def check_working_copy(root: Path) -> Iterator[Finding]:
    """Check for uncommitted, unpushed, oversized and secret files."""
    try:
        _git(root, "rev-parse", "--is-inside-work-tree")
    except GitError as error:
        yield finding("OSM601", str(error), hint="The platform syncs a git repository: git init, commit, push.")
        yield from _check_sizes(root, _walk(root))
        return
    tracked = set(_paths(root, "ls-files", "-z"))
    others = set(_paths(root, "ls-files", "-z", "--others", "--exclude-standard"))
    yield from _check_uncommitted(root)
    yield from _check_ignored(root)
    yield from _check_unpushed(root)
    yield from _check_sizes(root, tracked | others)
    yield from _check_env_files(tracked, others)


def _check_uncommitted(root: Path) -> Iterator[Finding]:
    # With -z, a rename would print two paths for one change.
    entries = _git(root, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--", ".")
    # Porcelain paths start at the top of the working copy, which may be above the repository.
    prefix = _git(root, "rev-parse", "--show-prefix").rstrip("\n")
    changed = [entry[3:].removeprefix(prefix) for entry in entries.split("\0") if len(entry) > 3]
    if changed:
        message = f"{_counted(len(changed), 'change')} not committed, which a sync would miss: {examples(changed)}"
        yield finding("OSM602", message, Place(changed[0]), "Commit and push them.")


def _check_ignored(root: Path) -> Iterator[Finding]:
    there = [name for name in _NEEDED if (root / name).exists()]
    if not there:
        return
    ignored = _paths(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--", *there)
    needed = [path for path in ignored if PurePosixPath(path).suffix in (".py", ".toml", ".jsonl", ".yaml", ".yml")]
    hidden = {".venv", "venv", "node_modules", "__pycache__", "site-packages", ".osmosis"}
    needed = [path for path in needed if not hidden.intersection(PurePosixPath(path).parts)]
    if needed:
        message = f"git ignores files that the repository seems to need, so a sync would miss them: {examples(needed)}"
        yield finding("OSM608", message, Place(needed[0]), "Change .gitignore, or add them with git add --force.")


def _check_unpushed(root: Path) -> Iterator[Finding]:
    try:
        _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    except GitError:
        return  # nothing is committed yet, which OSM602 reports
    if not _git(root, "remote").strip():
        return
    count = int(_git(root, "rev-list", "--count", "HEAD", "--not", "--remotes", "--", ".").strip() or 0)
    if count:
        yield finding("OSM603", f"{_counted(count, 'commit')} not pushed, which a sync would miss", hint="git push")


def _check_sizes(root: Path, files: set[str]) -> Iterator[Finding]:
    for file in sorted(files):
        try:
            size = os.lstat(root / file).st_size
        except OSError:
            continue  # deleted: git status reports it
        if size > LARGE_BYTES:
            code = "OSM605" if size > TOO_LARGE_BYTES else "OSM604"
            limit = "GitHub refuses files over 100 MB" if code == "OSM605" else "GitHub advises against more than 50 MB"
            message = f"the file is {size / 1e6:.0f} MB; {limit}"
            yield finding(code, message, Place(file), "Keep it out of git, or use Git LFS.")


def _check_env_files(tracked: set[str], others: set[str]) -> Iterator[Finding]:
    for file in sorted(filter(_is_env_file, tracked)):
        hint = f"git rm --cached {file}, add it to .gitignore, and revoke its keys."
        message = "git tracks this file, so every copy of the repository contains its keys"
        yield finding("OSM606", message, Place(file), hint)
    for file in sorted(filter(_is_env_file, others)):
        message = "git doesn't ignore this file, so it could be committed by accident"
        yield finding("OSM607", message, Place(file), "Add .env to .gitignore.")


def _is_env_file(file: str) -> bool:
    name = PurePosixPath(file).name
    return (name == ".env" or name.startswith(".env.")) and not name.endswith(_TEMPLATES)


def _walk(root: Path) -> set[str]:
    found: set[str] = set()
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "node_modules"]
        found |= {os.path.relpath(os.path.join(folder, name), root) for name in files}  # noqa: PTH118 - os.walk's texts
        if len(found) > MAX_FILES:
            break
    return found


def _paths(root: Path, *arguments: str) -> list[str]:
    return [path for path in _git(root, *arguments).split("\0") if path]


def _git(root: Path, *arguments: str) -> str:
    """Run a git command and return its output, without running programs that the repository's git config names."""
    return _run_git(root, *_without_filters(root), *arguments)


def _without_filters(root: Path) -> list[str]:
    """Return options that turn off the filters of the repository's own config, which `git status` would run."""
    try:
        listed = _run_git(root, "config", "--null", "--show-scope", "--name-only", "--get-regexp", r"^filter\.")
    except GitError:
        return []  # there are none, and what else is wrong the command itself reports
    parts = listed.split("\0")
    own = {
        name.rpartition(".")[0]
        for scope, name in zip(parts[::2], parts[1::2], strict=False)
        # The user's own filters, such as Git LFS's, are theirs to trust.
        if scope in ("local", "worktree")
    }
    return [
        option
        for driver in sorted(own)
        # A `required` filter that is empty would make git fail instead of leaving the file as it is.
        for value in ("clean=", "smudge=", "process=", "required=false")
        for option in ("-c", f"{driver}.{value}")
    ]


def _run_git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *arguments]
    # Without optional locks, `git status` doesn't write to the index.
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(  # noqa: S603 - git with fixed arguments
            command, cwd=root, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS
        )
    except FileNotFoundError:
        raise GitError("git isn't installed, so Osmosis can't tell what is committed") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]} took longer than {GIT_SECONDS:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        if said and "not a git repository" in said[0]:
            raise GitError("not a git repository")
        raise GitError(f"git {arguments[0]} failed: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout.decode("utf-8", "replace")


def _counted(count: int, noun: str) -> str:
    return f"1 {noun} is" if count == 1 else f"{count:,} {noun}s are"


CHECKS = (Check("working copy", codes(601, 608), lambda subject: check_working_copy(subject.root)),)
