"""Find a repository's root and the files and folders that exist by convention."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from osmosis_ai.errors import UsageError
from osmosis_ai.records import Record
from osmosis_ai.urls import UrlError, has_scheme, http_url, show_url

__all__ = ["McpSource", "Repository", "find_repository", "parse_mcp_source", "repository_at", "root_above"]

_PARTS = ("mcp/main.py", "reward_fn", "reward_rubric")
_LEFTOVERS = (".osmosis/runs.db", "test_data.jsonl")
"""Weaker signs of a root than its parts, tried only if no folder upwards has a part."""


@dataclass(frozen=True)
class Repository:
    """A git-sync repository on disk. Every path is absolute, or None if it doesn't exist.

    `mcp_dir` is the folder with the tools' entry point, None if the tools come from a URL or an `mcp.json`.
    """

    root: Path
    mcp_dir: Path | None = None
    reward_dir: Path | None = None
    rubric_dir: Path | None = None
    dataset: Path | None = None


class McpSource(Record, frozen=True):
    """The source of the tools.

    `kind` is `directory` (`path` is the entry point: `main.py` or the file given), `config` (`path` is the `mcp.json`),
    `url`, or `none`: no tools. `server_name` is the variable after the colon in `mcp/main.py:name`.
    """

    kind: Literal["directory", "url", "config", "none"]
    path: str | None = None
    url: str | None = None
    server_name: str | None = None

    def __repr__(self) -> str:
        """Hide a URL's query, which may contain a key that must not reach a log."""
        url = None if self.url is None else show_url(self.url)
        return f"McpSource(kind={self.kind!r}, path={self.path!r}, url={url!r}, server_name={self.server_name!r})"


def find_repository(mcp: str | None, cwd: Path) -> Repository:
    """Find the repository that an `--mcp` value belongs to.

    Its root is the parent of the tools' folder, or the one above the working directory (`root_above`) if `mcp` is None,
    a URL or an `mcp.json`. Raises UsageError; see `parse_mcp_source`.
    """
    if mcp is None:
        return repository_at(root_above(cwd))
    source = parse_mcp_source(mcp, cwd)
    mcp_dir = Path(source.path).parent if source.kind == "directory" and source.path is not None else None
    return dataclasses.replace(repository_at(root_above(cwd) if mcp_dir is None else mcp_dir.parent), mcp_dir=mcp_dir)


def repository_at(root: Path) -> Repository:
    """Return the repository whose root is known."""
    dataset = root / "test_data.jsonl"
    return Repository(
        root=root,
        mcp_dir=_folder(root / "mcp"),
        reward_dir=_folder(root / "reward_fn"),
        rubric_dir=_folder(root / "reward_rubric"),
        dataset=dataset if dataset.is_file() else None,
    )


def root_above(cwd: Path) -> Path:
    """Return the root of the repository that a folder is in: the nearest folder upwards that has a part of one.

    The search ends at a git working copy's top and at the home folder. Without any part, the folder itself is the root.
    """
    cwd = _absolute(cwd)
    above = [cwd]
    while not (above[-1] / ".git").exists() and above[-1] not in (Path.home(), above[-1].parent):
        above.append(above[-1].parent)
    for parts in (_PARTS, _LEFTOVERS):
        for folder in above:
            if any((folder / part).exists() for part in parts):
                return folder
    return cwd


def parse_mcp_source(text: str, cwd: Path) -> McpSource:
    """Parse an `--mcp` value: `DIR` or `DIR/main.py`, with or without `:name`, a URL, or an `mcp.json` file.

    Raises UsageError; its message omits names and keys in a URL.
    """
    if not text.strip():
        raise UsageError("--mcp is empty: name a folder with main.py, a URL or an mcp.json file")
    if has_scheme(text):
        _check_url(text)
        return McpSource("url", url=text)
    try:
        return _on_disk(text, cwd)
    except (OSError, ValueError) as error:
        # A null byte in a path is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--mcp {_shown(text)} can't be read: {reason}") from None


def _on_disk(text: str, cwd: Path) -> McpSource:
    path, name = _absolute(cwd, text), None
    # An existing path comes first, even if its own name contains a colon.
    if not path.exists():
        before, _, after = text.rpartition(":")
        # A single letter before the colon is a Windows drive.
        if len(before) > 1 and after.isidentifier():
            path, name = _absolute(cwd, before), after
    if path.is_dir():
        if not (path / "main.py").is_file():
            raise UsageError(_no_main(text if name is None else before, path))
        return McpSource("directory", path=str(path / "main.py"), server_name=name)
    if not path.exists():
        missing = f"there is no {path}" if _shown(text) == text else "there is no such path"
        wanted = "name a folder with main.py, a Python file, a URL or an mcp.json file"
        raise UsageError(f"--mcp {_shown(text)}: {missing}; {wanted}")
    if not path.is_file():
        raise UsageError(f"--mcp {_shown(text)} is neither a folder nor a file")
    if path.suffix == ".py":
        return McpSource("directory", path=str(path), server_name=name)
    if path.suffix == ".json":
        if name is not None:
            raise UsageError(f"--mcp {_shown(text)}: a name after the colon goes with a Python file, not with .json")
        return McpSource("config", path=str(path))
    raise UsageError(
        f"--mcp {_shown(text)} is neither a Python file (the one that creates the server, usually main.py) "
        "nor a .json file (an mcp.json)"
    )


def _no_main(text: str, path: Path) -> str:
    entries = sorted(path.iterdir())
    python = [entry.name for entry in entries if entry.suffix == ".py" and entry.is_file()]
    start = f"--mcp {_shown(text)}: the folder has no main.py, which creates the MCP server"
    if (path / "mcp" / "main.py").is_file():
        return f"{start}; its subfolder has one: --mcp {Path(text, 'mcp')}"
    if python:
        listed = ", ".join(python[:5]) + (", …" if len(python) > 5 else "")
        return f"{start}; found {listed}. Name the file that does, as in --mcp {Path(text, python[0])}"
    names = [entry.name + "/" * entry.is_dir() for entry in entries]
    found = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{start}; {f'found {found}' if names else 'it is empty'}"


def _check_url(url: str) -> None:
    try:
        http_url(url)
    except UrlError as error:
        if error.problem == "scheme":
            raise UsageError(f"--mcp {show_url(url)!r}: only http:// and https:// URLs can be used") from None
        example = "it looks like http://localhost:8000/mcp"
        raise UsageError(f"--mcp {show_url(url)!r} is not a valid URL; {example}") from None


def _shown(text: str) -> str:
    """Drop credentials before an @: a URL without its scheme looks like a path."""
    if re.match(r"[^/\\@]*:[^@]*@", text):
        return re.split(r"[?#]", text.rpartition("@")[2], maxsplit=1)[0]
    return text


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _absolute(cwd: Path, text: str = "") -> Path:
    # Not resolve(): a linked mcp folder belongs to the repository that has the link. Not absolute(): it keeps "..".
    return Path(os.path.abspath(cwd / text))  # noqa: PTH100 - see above
