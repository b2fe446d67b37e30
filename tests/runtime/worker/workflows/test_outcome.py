"""The end of a rollout in its server's words becomes the failures and scores of a record."""

from __future__ import annotations

from typing import get_args

import pytest

from osmosis_ai.failures import FAILURE_KINDS
from osmosis_ai.runtime.worker.workflows.callbacks import Ending, Sample, Trouble
from osmosis_ai.runtime.worker.workflows.outcome import TROUBLES, check_samples, judged


def score(*samples: Sample) -> float | None:
    ending = Ending({sample.id or "": sample for sample in samples})
    report = judged(ending, "raw").report
    assert report is not None
    return None if report.score is None else report.score.value


def test_every_kind_of_trouble_maps_to_a_known_failure() -> None:
    assert set(TROUBLES) == set(get_args(Trouble))
    for meaning in TROUBLES.values():
        for origin, kind in [(meaning.origin, meaning.kind), *([meaning.late] if meaning.late else [])]:
            assert origin in FAILURE_KINDS[kind].origins


def test_several_samples_count_with_their_mean_and_removed_ones_not_at_all() -> None:
    assert score(Sample(reward=0.5)) == 0.5
    assert score(Sample("a", reward=1.0), Sample("b", reward=0.0)) == 0.5
    assert score(Sample("a", reward=1.0), Sample("b", remove_sample=True)) == 1.0
    assert score(Sample(remove_sample=True)) is None


def test_metrics_are_those_of_the_samples() -> None:
    one = judged(Ending({"": Sample(metrics={"turns": 2}, extra_fields={"seed": 7})}), "raw").report
    assert one is not None
    assert one.metrics == {"turns": 2, "extra_fields": {"seed": 7}}
    two = judged(Ending({"a": Sample("a", reward=1.0), "b": Sample("b", remove_sample=True)}), "raw").report
    assert two is not None
    assert two.metrics == {"samples": {"a": {"reward": 1.0}, "b": {"reward": None, "remove_sample": True}}}


@pytest.mark.parametrize(
    ("ending", "failed", "missing"),
    [
        (Ending(trouble="workflow_failed", message="boom"), ("agent", "exception"), None),
        (Ending(trouble="workflow_failed", message="late", category="timeout"), ("timeout", "rollout"), None),
        (Ending(trouble="callback_timeout", message="late"), ("timeout", "no_report"), None),
        (Ending(trouble="rollout_protocol_error", message="odd"), ("agent", "error"), None),
        (Ending(trouble="grader_failed", message="boom"), None, ("reward", "exception")),
        (Ending(trouble="grader_failed", message="late", category="timeout"), None, ("reward", "timeout")),
        (Ending(trouble="missing_grader_callback", message="late"), None, ("reward", "no_report")),
        (Ending(trouble="not_graded", message="no"), None, ("reward", "no_ground_truth")),
    ],
)
def test_a_workflow_fails_the_rollout_and_a_grader_its_score(
    ending: Ending, failed: tuple[str, str] | None, missing: tuple[str, str] | None
) -> None:
    failure, report = judged(ending, "raw")
    assert (failure and (failure.origin, failure.kind)) == failed
    lost = report.score.failure if report is not None and report.score is not None else None
    assert (lost and (lost.origin, lost.kind)) == missing


@pytest.mark.parametrize(
    ("graded", "called", "said"),
    [
        (["a", "b"], ["a", "b"], ""),
        (["a"], ["a", "b"], "no sample 'b'"),
        (["a", "b"], ["a"], "a sample 'b', which made no model call"),
        (["a"], [], ""),
        ([""], ["a"], ""),
    ],
)
def test_samples_are_those_that_called_the_model(graded: list[str], called: list[str], said: str) -> None:
    ending = check_samples(Ending({name: Sample(name or None, reward=1.0) for name in graded}), set(called))
    assert (ending.trouble is None) is (said == "")
    assert said in ending.message
