"""Write a run as a single HTML file that opens from disk, without a server, a network or scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from osmosis_ai.conversation import steps
from osmosis_ai.errors import StoreError, UsageError
from osmosis_ai.store.browsing import RowFilter, Selected
from osmosis_ai.store.compare import compare_row
from osmosis_ai.store.queries import RolloutFilter, RunInfo
from osmosis_ai.store.views import ComparedRuns, run_view
from osmosis_ai.viewer.addresses import Address
from osmosis_ai.viewer.cells import table_row
from osmosis_ai.viewer.pages.compare import blocks_of
from osmosis_ai.viewer.site import Site
from osmosis_ai.viewer.stores import Repository

__all__ = ["MAX_BYTES", "Wanted", "parse_rows", "write_report"]

MAX_BYTES = 50_000_000
PART = 500
"""Rows to read at a time."""
STYLE = Path(__file__).parent / "static" / "view.css"


class Wanted(NamedTuple):
    """The rows of a run to write (None for all), and the run to compare it with."""

    status: Selected | None = None
    rows: Sequence[range] | None = None
    against: RunInfo | None = None
    flipped: bool = False


def parse_rows(given: str) -> list[range]:
    """Parse ranges of rows such as `0-49,60`; raises UsageError."""
    found = []
    for part in given.split(","):
        match = re.fullmatch(r"\s*(\d{1,15})(?:\s*-\s*(\d{1,15}))?\s*", part, re.ASCII)
        if match is None:
            raise UsageError(f"--rows {given}: write rows and ranges of rows, for example 0-49,60")
        first = int(match[1])
        found.append(range(first, int(match[2] or first) + 1))
    return found


def write_report(sink: IO[bytes], site: Site, repository: Repository, run: RunInfo, wanted: Wanted) -> int:
    """Write the file and return the number of rows in it.

    Raises:
        UsageError: It would have more than `MAX_BYTES`.
        StoreError: The store can't be read.
    """
    compared = None if wanted.against is None else site.compared(repository, wanted.against, run)
    rows = list(_rows(site, repository, run, wanted, compared))
    written = 0
    for part in _parts(site, repository, run, wanted, compared, rows):
        data = part.encode("utf-8")
        written += len(data)
        if written > MAX_BYTES:
            raise UsageError(
                f"the page would have more than {MAX_BYTES // 1_000_000} MB with {len(rows):,} rows; choose fewer with "
                "--failed, --rows 0-49 or, beside --against RUN, --flipped"
            )
        sink.write(data)
    return len(rows)


def _rows(
    site: Site, repository: Repository, run: RunInfo, wanted: Wanted, compared: ComparedRuns | None
) -> Iterator[int]:
    flipped = {flip.row_id for each in compared.functions.values() for flip in each.flips} if compared else set()
    for index in site.select(repository, run, RowFilter(status=wanted.status)).rows:
        if wanted.rows is not None and not any(index in part for part in wanted.rows):
            continue
        if wanted.flipped and repository.runs.page(run.id, [index])[0].row.id not in flipped:
            continue
        yield index


def _parts(
    site: Site,
    repository: Repository,
    run: RunInfo,
    wanted: Wanted,
    compared: ComparedRuns | None,
    rows: Sequence[int],
) -> Iterator[str]:
    parts = (rows[start : start + PART] for start in range(0, len(rows), PART))
    listed = (each for part in parts for each in repository.runs.page(run.id, part))
    yield site.render(
        "report.html",
        style=STYLE.read_text(encoding="utf-8"),
        run=run,
        view=run_view(run),
        figures=site.figures_of(repository, run),
        compared=compared,
        here=_Here("", {}),
        rows=[table_row(each, run, {}, _Here("", {})) for each in listed],
    )
    for index in rows:
        for scored in repository.runs.scored(run.id, RolloutFilter(row=index), with_trajectory=True):
            rollout = scored.stored.rollout
            yield site.render(
                "report_rollout.html",
                scored=scored,
                rollout=rollout,
                anchor=_anchor(index, rollout.run_index, rollout.policy),
                threshold=run.pass_threshold,
                steps=list(steps(rollout.messages, rollout.turns, rollout.tool_calls)),
            )
    if wanted.against is not None and compared is not None:
        chosen = set(rows)
        for index in sorted({flip.row_index for each in compared.functions.values() for flip in each.flips}):
            # An interrupted run may lack this attempt.
            with suppress(StoreError):
                aligned, _, after = compare_row(repository.runs, wanted.against, run, index)
                if after.row.index in chosen:
                    yield site.render("report_change.html", index=index, blocks=blocks_of(aligned.steps))
    yield "</main>\n</body>\n</html>\n"


class _Here(Address):
    """Makes links to anchors in the file, where the viewer links to other pages."""

    def but(self, **changes: object) -> str:
        return "#rows"

    def at(self, path: str, **changes: object) -> str:
        policy = changes.get("policy")
        return _anchor(path.rpartition("/")[2], changes.get("attempt") or 0, str(policy or "policy"), "#")


def _anchor(row: object, run_index: object, policy: str, before: str = "") -> str:
    return f"{before}row-{row}-{run_index}" + ("-baseline" if policy == "baseline" else "")
