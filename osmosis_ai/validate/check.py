"""A check, and the repository that it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from osmosis_ai.discovery.scan import Component
from osmosis_ai.runtime.protocol import Ready
from osmosis_ai.validate.findings import Finding

__all__ = ["FOLDERS", "Check", "ComponentKind", "Subject"]

ComponentKind: TypeAlias = Literal["tool", "reward", "rubric"]
FOLDERS: dict[str, Literal["reward", "rubric"]] = {"reward_fn": "reward", "reward_rubric": "rubric"}


@dataclass
class Subject:
    """A repository while it is checked.

    Args:
        root: Its root, absolute.
        environ: Variables, `.env` included.
        dataset: The file with the rows, which may not exist.
        components: The tools and functions found in the source.
        loaded: What the server offers; None when it wasn't, or can't be, loaded.
    """

    root: Path
    environ: Mapping[str, str]
    dataset: Path
    components: dict[ComponentKind, list[Component]] = field(
        default_factory=lambda: {"tool": [], "reward": [], "rubric": []}
    )
    loaded: Ready | None = None

    def shown(self, path: Path) -> str:
        """A path as findings name it: relative to the root if it is in it."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)


class Check(NamedTuple):
    """One area's check: the codes that it may give, separated by blanks, and what runs it.

    Whatever goes wrong in it is a finding (OSM009), and the other checks go on.
    """

    area: str
    codes: str
    run: Callable[[Subject], Iterable[Finding]]
