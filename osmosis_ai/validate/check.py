"""A check, the repository that it looks at, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from osmosis_ai import tracebacks
from osmosis_ai.discovery.scan import Component
from osmosis_ai.errors import OsmosisError
from osmosis_ai.runtime.protocol import Ready
from osmosis_ai.validate.findings import Finding, finding

__all__ = ["FOLDERS", "Check", "ComponentKind", "Subject", "could_not_run", "run_check"]

ComponentKind: TypeAlias = Literal["tool", "reward", "rubric"]
FOLDERS: dict[str, Literal["reward", "rubric"]] = {"reward_fn": "reward", "reward_rubric": "rubric"}


@dataclass
class Subject:
    """A repository while it is checked.

    The file `dataset` may not exist. `loaded` is what the server offers, None when it wasn't, or can't be, loaded.
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


def run_check(check: Check, subject: Subject) -> Iterator[Finding]:
    """Run one check. Whatever goes wrong in it is a finding, and the others go on."""
    try:
        for found in check.run(subject):
            assert found.code in check.codes, f"{found.code} isn't registered for {check.area}"
            yield found
    except Exception as error:  # noqa: BLE001 - an area's failure must not cost the report of the others
        yield could_not_run(check.area, error)


def could_not_run(area: str, error: Exception) -> Finding:
    """The finding of an area whose check failed."""
    said = str(error) if isinstance(error, OsmosisError) else tracebacks.describe(error, 300)
    return finding("OSM009", f"the checks of {area} could not run: {said}")
