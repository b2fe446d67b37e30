"""What a rollout server reports: whatever it sends is refused, or becomes a record that can be stored."""

from __future__ import annotations

import msgspec
import pytest

from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.worker.workflows.callbacks import RefusedReportError, graded, read_report
from osmosis_ai.runtime.worker.workflows.outcome import Judged, judged


def judge(report: str | bytes) -> Judged:
    """Judge a report, and encode the record as the worker's event and as the store's JSON."""
    body = report if isinstance(report, bytes) else report.encode()
    found = judged(graded(read_report(body, "r1")), "raw")
    done = protocol.RolloutDone("r1", "stop", 1.0, found.failure, agent=found.report)
    assert protocol.encode(done)
    assert msgspec.json.encode(done)
    return found


@pytest.mark.parametrize(
    "report",
    [
        "",
        "null",
        "[]",
        "<html>",
        b"\xff",
        '{"status": "success"',
        '{"status": 1}',
        '{"status": null}',
        '{"status": "success", "sample": []}',
        '{"status": "success", "samples": [{"reward": 1}]}',
        '{"status": "success", "sample": {"reward": true}}',
        '{"status": "success", "sample": {"reward": "1"}}',
        '{"status": "success", "sample": {"reward": 1, "remove_sample": 1}}',
        '{"status": "success", "sample": {"reward": 1, "metrics": null}}',
        f'{{"status": "success", "sample": {{"reward": 1{"0" * 400}}}}}',
        f'{{"status": "success", "sample": {{"reward": 1, "metrics": {{"x": {"[" * 300}{"]" * 300}}}}}}}',
        f'{{"status": "success", "sample": {{"reward": NaN, "metrics": {{"x": {"[" * 9000}{"]" * 9000}}}}}}}',
    ],
)
def test_reports_without_their_form_are_refused(report: str | bytes) -> None:
    with pytest.raises(RefusedReportError):
        judge(report)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_reward_that_is_not_finite_is_no_score(number: str) -> None:
    report = judge(f'{{"status": "success", "sample": {{"reward": {number}, "metrics": {{"x": {number}}}}}}}').report
    assert report is not None
    assert report.score is not None
    assert report.score.failure is not None
    assert "the grader set" in report.score.failure.message


def test_large_rewards_have_a_mean() -> None:
    report = judge('{"status": "success", "samples": {"a": {"reward": 1.6e308}, "b": {"reward": 1.6e308}}}').report
    assert report is not None
    assert report.score is not None
    assert report.score.value == 1.6e308


def test_data_that_json_cannot_hold_is_left_out_and_the_reward_stays() -> None:
    odd = r'"\ud800"'
    sample = f'{{"reward": 1, "metrics": {{{odd}: {odd}, "big": 1{"0" * 30}}}, "messages": [{{"content": {odd}}}]}}'
    report = judge(f'{{"status": "success", "samples": {{{odd}: {sample}}}}}').report
    assert report is not None
    assert report.score is not None
    assert report.score.value == 1.0
    report = judge(f'{{"status": "failure", "err_message": {odd}}}').report
    assert report is not None
    assert report.score is not None
    assert report.score.failure is not None
    assert report.score.failure.message == "?"


def test_a_message_of_any_length_is_cut() -> None:
    found = judge(f'{{"status": "failure", "err_message": "{"x" * 100_000}"}}').report
    assert found is not None
    assert found.score is not None
    assert found.score.failure is not None
    assert len(found.score.failure.message) == 2000
