"""A rollout server's reports on one rollout: the end of its workflow, and its grading.

Released servers report in two forms: `sample` holds a rollout's only sample, `samples` holds several by id.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import anyio
import msgspec

from osmosis_ai.bounds import MAX_DEPTH, too_deep
from osmosis_ai.errors import OsmosisError
from osmosis_ai.records import Record
from osmosis_ai.rollout.vocabulary import NOT_GRADED

__all__ = ["Callbacks", "Category", "Ending", "RefusedReportError", "Sample", "Trouble", "graded", "read_report"]

Trouble: TypeAlias = Literal[
    "workflow_failed",
    "grader_failed",
    "not_graded",
    "callback_timeout",
    "missing_grader_callback",
    "rollout_protocol_error",
]
"""Why a rollout failed, in the rollout protocol's terms; `not_graded`, our own, means that no grader was called."""

Category: TypeAlias = str
"""The error category that a server gives: `timeout`, `validation_error`, `agent_error`, …"""

TERMINAL = ("success", "failure", "cancelled")
ONLY = ""
"""The key of a sample without an id."""


class Sample(Record, frozen=True):
    """One graded conversation of a rollout. `remove_sample` excludes it from all statistics."""

    id: str | None = None
    messages: list[dict[str, Any]] = []
    label: str | None = None
    reward: float | None = None
    remove_sample: bool = False
    metrics: dict[str, Any] = {}
    extra_fields: dict[str, Any] = {}


class Ending(Record, frozen=True):
    """How a rollout ended: its samples by id, and the problem, if any, with the server's own message."""

    samples: dict[str, Sample] = {}
    trouble: Trouble | None = None
    message: str = ""
    category: Category | None = None

    @property
    def removed(self) -> bool:
        """True if grading has removed every sample."""
        return bool(self.samples) and self.trouble is None and all(each.remove_sample for each in self.samples.values())


class Report(Record, frozen=True):
    """A callback's body, or a polled result. Unknown fields are ignored."""

    status: str
    rollout_id: str | None = None
    sample: Sample | None = None
    samples: dict[str, Sample] | None = None
    err_message: str | None = None
    err_category: Category | None = None

    @property
    def all_samples(self) -> dict[str, Sample]:
        if self.samples is not None:
            return self.samples
        return {} if self.sample is None else {ONLY: self.sample}


class RefusedReportError(OsmosisError):
    """An unusable report; the message gives the reason."""


def read_report(body: bytes, rollout_id: str) -> Report:
    """Read a report about a rollout; raise RefusedReportError if it isn't one."""
    try:
        decoded = _decoded(body)
    except (ValueError, RecursionError) as error:
        raise RefusedReportError(f"not JSON: {error}") from error
    if too_deep(decoded):
        raise RefusedReportError(f"nested more than {MAX_DEPTH} levels deep")
    try:
        report = msgspec.convert(decoded, Report)
    except msgspec.ValidationError as error:
        raise RefusedReportError(str(error)) from error
    except SystemError as error:
        # msgspec 0.18 fails this way on a number beyond the range of floats.
        raise RefusedReportError("a number is out of range") from error
    if report.rollout_id is not None and report.rollout_id != rollout_id:
        raise RefusedReportError(f"it is about rollout {report.rollout_id!r}, not {rollout_id!r}")
    return report


def _decoded(body: bytes) -> object:
    """Decode JSON, tolerating what Python's own encoder writes against the standard: NaN and lone surrogates."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = json.dumps(json.loads(body), ensure_ascii=False)
        # Keep NaN, so that the grading can report it as the reward.
        return json.loads(text.encode("utf-8", "replace"))


def graded(report: Report) -> Ending:
    """Judge a finished grading: every sample that isn't removed needs a finite reward."""
    samples, message, category = report.all_samples, report.err_message or "", report.err_category
    if report.status != "success":
        if not (samples or message or category):
            return Ending(
                trouble="not_graded",
                message="the server called no grader: it has none, or the row has neither a ground truth nor metadata",
            )
        if message.startswith(NOT_GRADED):
            return Ending(samples, "not_graded", message)
        # A failed grading's reward is meaningless.
        kept = {name: msgspec.structs.replace(sample, reward=None) for name, sample in samples.items()}
        return Ending(kept, "grader_failed", message or "grading failed without a message", category)
    if not samples:
        return Ending(trouble="grader_failed", message="grading ended without a sample", category="validation_error")
    for name, sample in samples.items():
        where = f" for sample {name!r}" if name != ONLY else ""
        if sample.remove_sample:
            continue
        if sample.reward is None:
            problem = f"the grader set no reward{where}"
        elif not math.isfinite(sample.reward):
            problem = f"the grader set {sample.reward} as the reward{where}"
        else:
            continue
        return Ending(samples, "grader_failed", problem, "validation_error")
    return Ending(samples)


class Callbacks:
    """The callbacks of one rollout. They may arrive in any order, and more than once; the first of each kind counts.

    Attributes:
        completion, grading: The reports; None until they arrive.
        refused: Why the latest unusable callback was refused.
    """

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.completion: Report | None = None
        self.grading: Report | None = None
        self.refused: str | None = None
        self._changed = anyio.Event()

    def completed(self, body: bytes) -> None:
        """Accept the report that the workflow has ended; raise RefusedReportError."""
        report = self._read(body)
        if self.completion is None:
            self.completion = report
            self._notify()

    def graded(self, body: bytes) -> None:
        """Accept the report that grading has ended; raise RefusedReportError."""
        report = self._read(body)
        if self.grading is None:
            self.grading = report
            self._notify()

    async def until(self, arrived: Callable[[], bool]) -> None:
        """Wait until `arrived` returns True; check it after every callback."""
        while not arrived():
            await self._changed.wait()

    def _read(self, body: bytes) -> Report:
        try:
            report = read_report(body, self.rollout_id)
            if report.status not in TERMINAL:
                raise RefusedReportError(f"the status {report.status!r} isn't final")
        except RefusedReportError as error:
            self.refused = str(error)
            raise
        return report

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
