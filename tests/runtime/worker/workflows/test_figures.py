"""The figures of model calls reach the trajectory that a rollout server writes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from osmosis_ai.records import Completion, JsonObject, Logprobs, TokenIds, TokenLogprob, Usage
from osmosis_ai.rollout.trajectory import convert_sample_to_trajectory, report_from_response
from osmosis_ai.rollout.types import RolloutSample
from osmosis_ai.runtime.worker.workflows.figures import CallFigures


class Answer:
    def __init__(self, body: JsonObject) -> None:
        self._body = msgspec.json.encode(body)

    def json(self) -> Any:
        return msgspec.json.decode(self._body)


def reply(*logprobs: float, **fields: Any) -> Completion:
    tokens = [TokenLogprob(token="x", logprob=each) for each in logprobs]
    given = {"usage": Usage(7, 3, 10), "model": "m", "cost_usd": 0.5, **fields}
    return Completion({"role": "assistant", "content": "42"}, logprobs=Logprobs(tokens), **given)


def test_each_call_is_a_step_of_the_trajectory() -> None:
    figures = CallFigures("r1")
    figures.add(None, reply(-0.5, -1.0, token_ids=TokenIds([1, 2], [3])))
    figures.add(None, reply(-math.inf, cached=True))
    report = report_from_response(Answer(figures.acknowledgement()))
    assert report is not None
    messages = [{"role": "user", "content": "6 × 7?"}, *[{"role": "assistant", "content": "42"}] * 2]
    written = convert_sample_to_trajectory(
        RolloutSample(messages=messages), rollout_id="r1", report=report.samples["r1"]
    ).to_json_dict()
    first, second = (step["metrics"] for step in written["steps"][1:])
    assert first == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "cost_usd": 0.5,
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3],
        "logprobs": [-0.5, -1.0],
    }
    assert second == {"prompt_tokens": 7, "completion_tokens": 3, "cost_usd": 0.0}
    assert written["final_metrics"]["total_prompt_tokens"] == 14


@pytest.mark.parametrize(("samples", "names"), [((), []), (("a", "b", "a"), ["a", "b"])])
def test_calls_are_kept_by_sample(samples: tuple[str, ...], names: list[str]) -> None:
    figures = CallFigures("r1")
    for sample in samples:
        figures.add(sample, reply())
    report = report_from_response(Answer(figures.acknowledgement()))
    assert [*(report.samples if report else ())] == names
