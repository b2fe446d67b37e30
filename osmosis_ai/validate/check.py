"""Define a check and its subject, and run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from osmosis_ai import tracebacks
from osmosis_ai.discovery.scan import Component
from osmosis_ai.discovery.source import relative_to_root
from osmosis_ai.errors import OsmosisError
from osmosis_ai.validate.findings import Finding, finding

if TYPE_CHECKING:
    from osmosis_ai.runtime.protocol import Ready

__all__ = ["FOLDERS", "Check", "ComponentKind", "Subject", "could_not_run", "run_check"]

ComponentKind: TypeAlias = Literal["tool", "reward", "rubric"]
FOLDERS: dict[str, Literal["reward", "rubric"]] = {"reward_fn": "reward", "reward_rubric": "rubric"}


@dataclass
class Subject:
    """A repository under check.

    `dataset` may not exist. `loaded` is what the server offers, None if it wasn't or can't be loaded.
    """

    root: Path
    environ: Mapping[str, str]
    dataset: Path
    components: dict[ComponentKind, list[Component]] = field(
        default_factory=lambda: {"tool": [], "reward": [], "rubric": []}
    )
    loaded: Ready | None = None

    def shown(self, path: Path) -> str:
        """Return a path as findings show it: relative to the root if it is inside."""
        return relative_to_root(path, self.root)


class Check(NamedTuple):
    """The check of one area: the codes it may report, separated by spaces, and the function that finds them.

    An exception in it becomes a finding (OSM009); the other checks still run.
    """

    area: str
    codes: str
    run: Callable[[Subject], Iterable[Finding]]


def run_check(check: Check, subject: Subject) -> Iterator[Finding]:
    """Run one check; an exception in it becomes a finding."""
    try:
        for found in check.run(subject):
            assert found.code in check.codes, f"{found.code} isn't registered for {check.area}"
            yield found
    except Exception as error:  # noqa: BLE001 - an area's failure must not cost the report of the others
        yield could_not_run(check.area, error)


def could_not_run(area: str, error: Exception) -> Finding:
    """Return the finding for an area whose check failed."""
    said = str(error) if isinstance(error, OsmosisError) else tracebacks.describe(error, 300)
    return finding("OSM009", f"the checks of {area} could not run: {said}")
