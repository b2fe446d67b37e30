"""The version of the repository's code that a pool runs, so that a replaced worker never brings another one in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from osmosis_ai.code_hashes import file_hash
from osmosis_ai.imports import content_hash

__all__ = ["LoadedCode"]


class LoadedCode:
    """The files under `root` that the first workers loaded.

    Attributes:
        sources: Their content, for the workers that replace the first ones; without files that could not be read in
            the version that was loaded.
    """

    def __init__(self, root: Path) -> None:
        self.sources: dict[str, bytes] = {}
        self._root = root
        self._hashes: dict[str, str] = {}

    def note(self, loaded: Mapping[str, str]) -> set[str]:
        """Take the hashes of what a worker has loaded; return the files of which another has loaded another version."""
        for path, content in loaded.items():
            if path not in self._hashes:
                self._hashes[path] = content
                self._keep(path, content)
        return {path for path, content in loaded.items() if self._hashes[path] != content}

    def changed(self) -> list[str]:
        """Return the files that now differ from what was loaded."""
        return sorted(path for path, content in self._hashes.items() if file_hash(self._root / path) != content)

    def _keep(self, path: str, content: str) -> None:
        try:
            data = (self._root / path).read_bytes()
        except OSError:
            return
        if content_hash(data) == content:
            self.sources[path] = data
