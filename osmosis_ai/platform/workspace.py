"""The workspace of the working directory: a Git repository with a workspace's folders, and its identity."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from osmosis_ai.platform.client import ClientError
from osmosis_ai.records import JsonObject

__all__ = ["REQUIRED", "LocalWorkspace", "find_workspace", "git_notes", "snapshot", "top_of"]

REQUIRED = ("rollouts", "configs/training", "configs/eval", "data")
"""The folders of a workspace, the same as on the hosted platform."""
_SCP = re.compile(r"(?:[\w.-]+@)?([\w.-]+):(?!/)(\S+)")
"""Git's short form of an SSH address: `git@host:path`."""
_UNSAFE = re.compile(r"[^a-z0-9._-]+")
SECONDS = 60
"""Time limit for a git command; a snapshot may hash many files."""


class LocalWorkspace(NamedTuple):
    """A workspace on this machine. `identity` is its name on platforms; `remote` its origin, without credentials."""

    root: Path
    identity: str
    remote: str | None

    @property
    def headers(self) -> dict[str, str]:
        """Headers that tell a platform the workspace and where its code is."""
        found = {"X-Osmosis-Git": self.identity, "X-Osmosis-Path": quote(os.fsencode(self.root))}
        return {**found, "X-Osmosis-Remote": self.remote} if self.remote else found

    def shown(self) -> JsonObject:
        """Return the workspace as commands print it."""
        git = {"identity": self.identity, "remote_url": self.remote}
        return {"git": git, "workspace_directory": str(self.root)}


def top_of(cwd: Path) -> Path:
    """Return the repository's root; raise ClientError."""
    top = _git(cwd, "rev-parse", "--show-toplevel")
    if top is None:
        raise ClientError(
            f"{cwd} isn't in a Git repository: platform commands submit the code of a workspace; create one with "
            "`git init`",
            "WORKSPACE_REQUIRED",
        )
    return Path(top)


def find_workspace(cwd: Path) -> LocalWorkspace:
    """Return the workspace that a folder is in; raise ClientError if there is none."""
    root = top_of(cwd)
    missing = [name for name in REQUIRED if not (root / name).is_dir()]
    if missing:
        folders = ", ".join(f"{name}/" for name in missing)
        raise ClientError(
            f"{root} isn't a workspace yet, it has no {folders}: `osmosis doctor --fix` creates them",
            "WORKSPACE_REQUIRED",
        )
    remote = _git(root, "config", "--get", "remote.origin.url")
    identity = None if not remote else _identity(remote)
    if identity is None:
        # The digest keeps folders of the same name apart.
        digest = hashlib.blake2b(os.fsencode(root), digest_size=4).hexdigest()
        identity = f"local/{_UNSAFE.sub('-', root.name.lower()).strip('-.') or 'workspace'}-{digest}"
    return LocalWorkspace(root, identity, _public(remote))


def git_notes(workspace: LocalWorkspace, *, pinned: bool) -> list[str]:
    """Return notes about the working tree's changes that a run won't include."""
    root, notes = workspace.root, []
    if _git(root, "status", "--porcelain"):
        notes.append("uncommitted changes aren't in the run's code; --snapshot submits the working tree as it is")
    if workspace.remote is not None:
        upstream = _git(root, "rev-parse", "--abbrev-ref", "@{upstream}")
        ahead = None if upstream is None else _git(root, "rev-list", "--count", "@{upstream}..HEAD")
        if upstream is None:
            notes.append("this branch has no upstream: the platform may not find its commits at the origin")
        elif ahead not in (None, "0"):
            notes.append(f"{ahead} commits aren't pushed to {upstream}")
        if not pinned:
            notes.append("the config names neither commit_sha nor branch: the run uses the origin's default branch")
    return [*notes, "the config's values are those of the local file"] if notes else []


def snapshot(workspace: LocalWorkspace) -> str:
    """Commit the working tree as it is, outside any branch, and return the commit; raise ClientError."""
    root = workspace.root
    with tempfile.TemporaryDirectory() as folder:
        # An index of its own, so that the user's staged changes stay as they are.
        own = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        tree = commit = None
        # As in any commit, ignored files are left out.
        if _git(root, "add", "--all", more=own) is not None:
            tree = _git(root, "write-tree", more=own)
        if tree:
            # `commit-tree` fails without a name and an address, which the user may not have set.
            author = {f"GIT_{who}_{what}": "osmosis" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
            # A new repository has no commit yet.
            parents = ["-p", "HEAD"] if _git(root, "rev-parse", "--verify", "HEAD") else []
            commit = _git(root, "commit-tree", tree, *parents, "-m", "snapshot", more=author)
    if not commit or _git(root, "update-ref", f"refs/osmosis/snapshots/{commit}", commit) is None:
        raise ClientError(f"git can't make a snapshot of {root}: see `git status`")
    return commit


def _identity(remote: str) -> str | None:
    """Return `owner/repo` for a GitHub repository, `host/path` (with - for /) for others, None for a folder."""
    if "://" in remote:
        host, path = urlsplit(remote).hostname or "", urlsplit(remote).path
    elif scp := _SCP.fullmatch(remote):
        host, path = scp[1], scp[2]
    else:
        return None
    parts = [part for part in path.removesuffix("/").removesuffix(".git").lower().split("/") if part]
    if not host or not parts or any(_UNSAFE.search(part) for part in (host.lower(), *parts)):
        return None
    if host.lower() == "github.com" and len(parts) == 2:
        return "/".join(parts)
    return f"{host.lower()}/{'-'.join(parts)}"


def _public(remote: str | None) -> str | None:
    """Return a remote's URL without credentials; None for a path."""
    if not remote or ("://" not in remote and _SCP.fullmatch(remote) is None) or remote.startswith("file:"):
        return None
    if "://" not in remote:
        return remote
    parts = urlsplit(remote)
    host = parts.netloc.rpartition("@")[2]
    # The user name of an ssh URL isn't a credential.
    user = f"{parts.username}@" if parts.scheme == "ssh" and parts.username else ""
    return parts._replace(netloc=f"{user}{host}", query="", fragment="").geturl()


def _git(root: Path, *arguments: str, more: dict[str, str] | None = None) -> str | None:
    """Return git's output, or None if it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - git, in the user's own repository
            ["git", *arguments],  # noqa: S607 - found as the user's shell finds it
            cwd=root,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", **(more or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape").strip() if done.returncode == 0 else None
