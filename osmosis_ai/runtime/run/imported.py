"""Import another tool's file as a run."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from osmosis_ai import __version__
from osmosis_ai.data.dataset import RowIds
from osmosis_ai.errors import UsageError
from osmosis_ai.importers.base import Attempt, ImportFormat, Left, Problem, RunFile
from osmosis_ai.records import CallSummary, JsonObject, Outcome, Row
from osmosis_ai.runtime.run.report import summary_of
from osmosis_ai.store.queries import RunInfo
from osmosis_ai.store.run_store import AddedRun, Finished, RunStore

__all__ = ["Imported", "import_run"]

ALL = 2**31


class Imported(NamedTuple):
    """A run from a file; `new` is False if the store already had it. `left_out` counts what was left out, by reason."""

    run: RunInfo
    new: bool
    problems: list[Problem]
    left_out: dict[str, int]
    notes: list[str]


async def import_run(store: RunStore, format_: ImportFormat, path: Path, name: str | None = None) -> Imported:
    """Import the run in a file into the store, or return the run that was imported from it before.

    Raises:
        UsageError: The file can't be read, or has no rollout that can be.
        StoreError: The run can't be written.
    """
    digest = _sha256(path)
    for run in store.list_runs(ALL):
        known = run.config.get("imported") or {}
        if known.get("sha256") == digest and known.get("format") == format_.name:
            return Imported(run, False, [], {}, [])
    reading = _Reading(format_, path, digest, name)
    # A first pass before the store is locked, so that an unusable file leaves nothing behind and blocks no other
    # writer.
    if not any(True for _ in reading.rollouts()):
        where = [f"{each.where}: {each.reason}" if each.where else each.reason for each in reading.problems[:3]]
        raise UsageError(f"{path}: {'; '.join(where) or 'there are no samples'}")
    run_id = await store.add_run(reading.rollouts, reading.about)
    left_out, notes = dict(reading.left_out), list(reading.run.notes)
    return Imported(store.find_run(run_id), True, reading.problems, left_out, notes)


class _Reading:
    """A repeatable pass over the file, and its results."""

    def __init__(self, format_: ImportFormat, path: Path, digest: str, name: str | None) -> None:
        self._format = format_
        self._path = path
        self._digest = digest
        self._name = name
        self.restart()

    def restart(self) -> None:
        """Discard the results of an earlier pass."""
        self.run = RunFile(self._format.name)
        self.problems: list[Problem] = []
        self.left_out: Counter[str] = Counter()
        self._ids = RowIds()
        self._rows: dict[str, Row] = {}
        self._places: set[tuple[str, int]] = set()
        self._rollout_ids: set[str] = set()
        self._outcomes: list[Outcome] = []

    def rollouts(self) -> Iterator[Finished]:
        """Yield the rollouts with their rows, from the beginning."""
        self.restart()
        assert self._format.read_run is not None
        for item in self._format.read_run(self._path, self.run):
            if isinstance(item, Problem):
                self.problems.append(item)
            elif isinstance(item, Left):
                self.left_out[item.reason] += 1
            else:
                yield self._placed(item)

    def _placed(self, attempt: Attempt) -> Finished:
        row = self._rows.get(attempt.key)
        if row is None:
            row = self._rows[attempt.key] = self._ids.row(
                len(self._rows), attempt.system_prompt, attempt.user_prompt, attempt.ground_truth, attempt.extra
            )
        run_index = attempt.run_index or 0
        while (row.id, run_index) in self._places:
            run_index += 1
        self._places.add((row.id, run_index))
        rollout_id = attempt.rollout.id
        if rollout_id in self._rollout_ids:
            rollout_id = f"{rollout_id}-{len(self._rollout_ids)}"
        self._rollout_ids.add(rollout_id)
        rollout = msgspec.structs.replace(
            attempt.rollout, id=rollout_id, row_index=row.index, row_id=row.id, run_index=run_index
        )
        self.run.scorers |= dict.fromkeys(score.function for score in attempt.scores)
        self._outcomes.append(
            Outcome(
                id=rollout.id,
                row_index=row.index,
                row_id=row.id,
                run_index=run_index,
                policy=rollout.policy,
                finish_reason=rollout.finish_reason,
                duration_ms=rollout.duration_ms,
                failure=rollout.failure,
                usage=rollout.usage,
                cost_usd=rollout.cost_usd,
                calls=[
                    CallSummary(call.name, call.duration_ms, call.error, call.failure) for call in rollout.tool_calls
                ],
                scores={score.function: score for score in attempt.scores},
            )
        )
        return Finished(rollout, row, attempt.scores, attempt.finished_at)

    def about(self) -> AddedRun:
        """Return the file's description of the run."""
        run = self.run
        config = self._config()
        scored = {name for outcome in self._outcomes for name in outcome.scores}
        functions = [name for name in run.scorers if name in scored]
        outcomes = sorted(self._outcomes, key=lambda each: (each.row_index, each.run_index))
        summary = summary_of(config, len(self._rows), functions, outcomes)
        return AddedRun(
            status="finished" if run.ended else "interrupted",
            created_at=run.created_at,
            finished_at=run.finished_at,
            config=config,
            summary={**summary, "planned": config["planned"]},
        )

    def _config(self) -> JsonObject:
        run = self.run
        return {
            "version": __version__,
            "dataset": str(self._path),
            "model": ", ".join(run.models),
            "base_url": run.base_url,
            "stand_in": run.stand_in,
            "params": run.params,
            "baseline_model": None,
            "n": 1 + max(outcome.run_index for outcome in self._outcomes),
            "pass_threshold": run.pass_threshold,
            "planned": max(run.planned or 0, len(self._outcomes) + len(self.problems)),
            "functions": list(run.scorers),
            "tools": list(run.tools.values()),
            "agent": None,
            "name": self._name,
            "options": {},
            "imported": {
                "format": self._format.name,
                "file": str(self._path),
                "sha256": self._digest,
                "tool": run.tool,
                "task": run.task,
                "scorers": list(run.scorers),
                "unreadable": len(self.problems),
                "left_out": dict(self.left_out),
            },
        }


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from None
    return digest.hexdigest()
