"""ATIF: Harbor's trajectory format, a document per line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

from osmosis_ai.exports.base import ExportFormat, ExportOptions, Written, write_lines
from osmosis_ai.exports.tokens import turn_logprobs
from osmosis_ai.records import JsonObject

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["FORMAT", "trajectory"]


def trajectory(rollout: ExportedRollout) -> JsonObject:
    """Return the document of a rollout."""
    # Imported late: they need pydantic.
    from osmosis_ai.rollout.trajectory.conversion import convert_sample_to_trajectory
    from osmosis_ai.rollout.trajectory.report import LlmCallMetrics, SampleReport
    from osmosis_ai.rollout.types import RolloutSample

    calls = [
        LlmCallMetrics(
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            prompt_token_ids=turn.prompt_token_ids,
            completion_token_ids=turn.token_ids,
            logprobs=turn_logprobs(turn),
            model_name=turn.model,
        )
        for turn in rollout.turns
    ]
    return convert_sample_to_trajectory(
        RolloutSample(messages=rollout.messages, label=rollout.ground_truth, reward=rollout.reward),
        rollout_id=rollout.id,
        request_metadata=rollout.metadata or None,
        report=SampleReport(model_name=rollout.model, llm_call_metrics=calls),
    ).to_json_dict()


def _write(rollouts: Iterable[ExportedRollout], sink: IO[bytes], options: ExportOptions) -> Written:
    return write_lines(rollouts, sink, options, lambda rollout: [trajectory(rollout)])


FORMAT = ExportFormat(
    name="atif",
    suffix=".jsonl",
    text=True,
    description="ATIF 1.7, Harbor's trajectories: a document per line.",
    read_with=("harbor.models.trajectories.Trajectory.model_validate_json(line)",),
    write=_write,
)
