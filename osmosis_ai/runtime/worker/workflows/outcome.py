"""Convert a rollout server's report on the end of a rollout to the failures and scores of a record."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from osmosis_ai.failures import FailureKind, Origin
from osmosis_ai.records import AgentReport, Failure, JsonObject, Score
from osmosis_ai.runtime.worker.workflows.callbacks import ONLY, Ending, Sample, Trouble
from osmosis_ai.runtime.worker.workflows.raised import Raised
from osmosis_ai.text import cut

__all__ = ["TROUBLES", "Judged", "check_samples", "error_type", "judged"]

MESSAGE_CHARACTERS = 2000


class Meaning(NamedTuple):
    """How a record represents a server's kind of trouble; `late` replaces it if the error's category is `timeout`."""

    origin: Origin
    kind: FailureKind
    late: tuple[Origin, FailureKind] | None = None


TROUBLES: dict[Trouble, Meaning] = {
    "workflow_failed": Meaning("agent", "exception", late=("timeout", "rollout")),
    "callback_timeout": Meaning("timeout", "no_report"),
    "rollout_protocol_error": Meaning("agent", "error"),
    # The rollout itself is complete; only its score is missing.
    "grader_failed": Meaning("reward", "exception", late=("reward", "timeout")),
    "missing_grader_callback": Meaning("reward", "no_report"),
    "not_graded": Meaning("reward", "no_ground_truth"),
}
"""Every kind of trouble. Those with the origin `reward` fail the score, the others the rollout."""

_WORDS: dict[tuple[str, str], str] = {
    **{(meaning.origin, meaning.kind): word for word, meaning in TROUBLES.items() if word != "not_graded"},
    **{meaning.late: "timeout" for meaning in TROUBLES.values() if meaning.late is not None},
    ("timeout", "blocked"): "callback_timeout",
}
_OF_ORIGIN: dict[str, str] = {"reward": "grader_failed", "rubric": "grader_failed", "worker": "supervisor_error"}


def error_type(failure: Failure) -> str:
    """Return the rollout protocol's term for a recorded failure, for files that the protocol's tools read."""
    return _WORDS.get((failure.origin, failure.kind)) or _OF_ORIGIN.get(failure.origin, "workflow_failed")


class Judged(NamedTuple):
    """The outcome for a record: the rollout's failure, or its report with the grader's score."""

    failure: Failure | None
    report: AgentReport | None


def check_samples(ending: Ending, called: set[str]) -> Ending:
    """Compare the graded samples with those that called the model, if samples have names.

    Return the ending; it is a failure if a sample without model calls has a reward, or one with calls has none.
    """
    named = ending.samples.keys() - {ONLY}
    if ending.trouble is not None or not named or not called or named == called:
        return ending
    unknown, missing = sorted(named - called), sorted(called - named)
    problem = (
        f"the grading has a sample {unknown[0]!r}, which made no model call"
        if unknown
        else f"the grading has no sample {missing[0]!r}, which made model calls"
    )
    return msgspec.structs.replace(ending, trouble="grader_failed", message=problem, category="validation_error")


def judged(ending: Ending, name: str, raised: Raised | None = None) -> Judged:
    """Judge the end of a rollout.

    Args:
        ending: The end, as the server reported it.
        name: The name to report scores and metrics under.
        raised: Where the error was raised, if known.
    """
    failure = None
    if ending.trouble is not None:
        meaning = TROUBLES[ending.trouble]
        late = meaning.late if ending.category == "timeout" else None
        origin, kind = late or (meaning.origin, meaning.kind)
        failure = Failure(origin, cut(ending.message, MESSAGE_CHARACTERS), kind=kind)
        if raised is not None:
            message = f"{raised.type}: {failure.message}"
            place = {"file": raised.file, "line": raised.line, "detail": raised.detail}
            failure = msgspec.structs.replace(failure, message=message, **place)
        if origin != "reward":
            return Judged(failure, None)
    metrics = _metrics(ending.samples)
    if failure is not None:
        return Judged(None, AgentReport(name, score=Score(name, failure=failure), metrics=metrics))
    rewards = [sample.reward for sample in ending.samples.values() if not sample.remove_sample]
    kept = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    # Divide before adding, because the sum of large rewards can overflow.
    score = Score(name, sum(reward / len(kept) for reward in kept)) if kept else None
    return Judged(None, AgentReport(name, score=score, metrics=metrics))


def _metrics(samples: dict[str, Sample]) -> JsonObject:
    """Return the samples' own data. Several samples are listed by name, with their rewards."""
    if samples.keys() == {ONLY}:
        return _of_sample(samples[ONLY])
    listed = {name: {"reward": sample.reward, **_of_sample(sample)} for name, sample in samples.items()}
    return {"samples": listed} if listed else {}


def _of_sample(sample: Sample) -> JsonObject:
    given: JsonObject = dict(sample.metrics)
    if sample.extra_fields:
        given["extra_fields"] = sample.extra_fields
    if sample.remove_sample:
        given["remove_sample"] = True
    return given
