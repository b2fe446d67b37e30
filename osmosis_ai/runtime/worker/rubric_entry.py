"""An entry of a rubric file as a function that scores rollouts."""

from __future__ import annotations

from typing import Any

from osmosis_ai.reward_rubric.configs import Rubric

__all__ = ["RubricEntry"]


class RubricEntry:
    """Scores a text as an entry of a rubric file says. What the row says itself comes before what the entry says.

    Args:
        rubric: The entry.
    """

    def __init__(self, rubric: Rubric) -> None:
        self._rubric = rubric

    async def __call__(self, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]) -> float:
        from osmosis_ai.reward_rubric.judge import aevaluate_rubric

        rubric = self._rubric
        result = await aevaluate_rubric(
            rubric.rubric,
            solution_str,
            {**rubric.model_info, "system_prompt": rubric.system_prompt or rubric.model_info.get("system_prompt")},
            ground_truth=rubric.ground_truth if ground_truth is None else ground_truth,
            original_input=extra_info["original_input"] or rubric.original_input,
            score_min=rubric.score_min,
            score_max=rubric.score_max,
        )
        assert isinstance(result, float)
        return result
