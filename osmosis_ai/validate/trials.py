"""Run the controls of reward functions: score right, wrong, empty and odd answers in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from time import monotonic

from osmosis_ai.masking import Masker
from osmosis_ai.records import FunctionRef, Row, Score, Tool
from osmosis_ai.runtime.pool.base import Pool
from osmosis_ai.runtime.run.scoring import score_conversations
from osmosis_ai.validate.check import Subject
from osmosis_ai.validate.controls import (
    ControlledFunction,
    ControlReport,
    Trial,
    judge,
    judge_together,
    judges_trajectories,
    tells_rows_apart,
)
from osmosis_ai.validate.findings import Finding, Place, finding
from osmosis_ai.validate.functions import is_about_form, reads_ground_truth
from osmosis_ai.validate.probes import MAX_ROWS, PLAIN, Form, Probe, answer_forms, conversation, probes
from osmosis_ai.validate.rows import first_rows
from osmosis_ai.validate.trajectories import MAX_TRAJECTORY_ROWS, Trajectory, trajectories

__all__ = ["Trials", "run_controls"]

FUNCTION_SECONDS = 20.0
CONTROL_SECONDS = 120.0
"""Time limits for the controls of one function, and of all functions together; probes left over are skipped."""

ONE_BY_ONE = 12
BATCH = 16
QUICK_SECONDS = 0.02
"""The first calls run one at a time; if a call takes less than this on average, the rest run in batches."""

GIVE_UP_AFTER = 2
"""Number of timeouts or lost processes after which a function isn't called again."""

MAX_PROMPT = 50_000
"""Characters of a row that is tried: its text is sent to the worker with each of its probes."""


async def run_controls(
    subject: Subject, trials: Trials, given: Sequence[Form], tools: Sequence[Tool]
) -> tuple[list[ControlReport], list[Finding]]:
    """Score the probes and judge each function by its scores; `tools` are those that trajectories call."""
    rows = first_rows(subject.dataset, _can_be_tried, MAX_ROWS)
    if not rows:
        message = "the controls need rows with a ground truth; there are none"
        at = Place(subject.shown(subject.dataset))
        return [], [finding("OSM309", message, at, "The reward functions were loaded but not run.")]
    tried = await trials.run(rows, answer_forms([row.system_prompt for row in rows], given))
    functions: list[ControlledFunction] = []
    reports: list[ControlReport] = []
    findings: list[Finding] = []
    components = {f"{found.module}:{found.name}": found for found in subject.components["reward"]}
    full_form = [name for name, component in components.items() if component.parameters[:1] == ("messages",)]
    varied = await trials.vary(list(trajectories(rows[:MAX_TRAJECTORY_ROWS], tools)), full_form)
    others = len(subject.components["rubric"])
    for ref in trials.refs:
        component = components[ref.name]
        reads = reads_ground_truth(component, subject.root) or tells_rows_apart(tried[ref.name])
        function = ControlledFunction(ref, reads, is_about_form(component, subject.root))
        report, found = judge(function, tried[ref.name], varied.get(ref.name, ()))
        functions.append(function)
        reports.append(report)
        findings += found
        # Like a rubric, it may be right without a ground truth.
        others += judges_trajectories(varied.get(ref.name, ()))
    return reports, [*findings, *judge_together(functions, reports, others)]


def _can_be_tried(row: Row) -> bool:
    truth = row.ground_truth or ""
    return bool(truth.strip()) and len(row.system_prompt) + len(row.user_prompt) + len(truth) <= MAX_PROMPT


class Trials:
    """A run of probes: every function scores each answer twice in one batch; conversations call `tool`."""

    def __init__(self, pool: Pool, masker: Masker, refs: Sequence[FunctionRef], tool: str | None) -> None:
        self.refs = refs
        self._pool = pool
        self._masker = masker
        self._tool = tool
        self._trials: dict[str, list[Trial]] = {ref.name: [] for ref in refs}
        self._seconds = dict.fromkeys(self._trials, 0.0)
        self._strikes = dict.fromkeys(self._trials, 0)

    async def run(self, rows: Sequence[Row], forms: Sequence[Form]) -> dict[str, list[Trial]]:
        """Try probes until time runs out; return each function's trials in order."""
        deadline = monotonic() + CONTROL_SECONDS
        waiting = probes(rows, forms)
        while names := [name for name in self._trials if self._goes_on(name)]:
            tried = list(islice(waiting, self._at_once(names)))
            if not tried or monotonic() > deadline:
                break
            await self._try(tried, names)
        return self._trials

    async def vary(self, varied: Sequence[Trajectory], names: Sequence[str]) -> dict[str, list[Trial]]:
        """Score trajectories with the named functions, unless they took too long before."""
        names = [name for name in names if name in self._trials and self._goes_on(name)]
        if not names or not varied:
            return {}
        said = [(one.row, one.messages) for one in varied]
        scores = await score_conversations(self._pool, self._masker, said, names)
        found: dict[str, list[Trial]] = {name: [] for name in names}
        for one, its_scores in zip(varied, scores, strict=True):
            probe = Probe("trajectory", one.row, PLAIN.name, one.row.ground_truth or "", odd=one.what)
            for score in its_scores:
                found[score.function].append(Trial(probe, score))
        return found

    def _goes_on(self, name: str) -> bool:
        return self._seconds[name] < FUNCTION_SECONDS and self._strikes[name] < GIVE_UP_AFTER

    def _at_once(self, names: list[str]) -> int:
        """Return how many probes to send together: one, until all functions have proved quick."""
        quick = all(
            len(self._trials[name]) >= ONE_BY_ONE and self._seconds[name] / len(self._trials[name]) < QUICK_SECONDS
            for name in names
        )
        return BATCH if quick else 1

    async def _try(self, tried: Sequence[Probe], names: list[str]) -> None:
        said = [(probe.row, conversation(probe, self._tool)) for probe in tried]
        # Twice, because determinism is checked with every answer.
        scores = await score_conversations(self._pool, self._masker, said, names, times=2)
        for number, probe in enumerate(tried):
            again = {score.function: score for score in scores[2 * number + 1]}
            for first in scores[2 * number]:
                self._count(first)
                # Repeating a failure says nothing about determinism.
                repeated = again[first.function] if first.failure is None else None
                if repeated is not None:
                    self._count(repeated)
                self._trials[first.function].append(Trial(probe, first, repeated))

    def _count(self, score: Score) -> None:
        self._seconds[score.function] += score.duration_ms / 1000
        if score.failure is not None and score.failure.kind in ("timeout", "died", "blocked"):
            self._strikes[score.function] += 1
