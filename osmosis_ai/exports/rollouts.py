"""Select a run's rollouts for export, and convert them to exported objects."""

from __future__ import annotations

from collections.abc import Iterator

from osmosis_ai.records import (
    FinishReason,
    JsonObject,
    Logprobs,
    Message,
    Record,
    TokenIds,
    TokenUsage,
    Tool,
    Turn,
    reward,
)
from osmosis_ai.store.queries import Queries, RolloutFilter, RunInfo, ScoredRollout
from osmosis_ai.text import failure_line

__all__ = ["ExportedRollout", "ExportedTurn", "Selection", "exported_rollouts"]


class Selection(Record, frozen=True):
    """A filter for the rollouts of a run.

    `policy` is `policy`, `baseline` or `all`. `min_score` is a lower bound for every function's score, `min_reward` for
    their mean; either excludes rollouts that failed or lack a score.
    """

    policy: str = "policy"
    min_score: float | None = None
    min_reward: float | None = None

    def wants(self, scored: ScoredRollout) -> bool:
        """Return True if a rollout passes the filter."""
        rollout = scored.stored.rollout
        # A workflow excludes a sample itself by removing it.
        if self.policy not in ("all", rollout.policy) or rollout.finish_reason == "removed":
            return False
        if self.min_score is None and self.min_reward is None:
            return True
        mean = reward(scored.scores)
        if rollout.failure is not None or mean is None:
            return False
        # There is at least one, or there would be no mean.
        values = [score.value for score in scored.scores.values() if score.value is not None]
        return (self.min_score is None or min(values) >= self.min_score) and (
            self.min_reward is None or mean >= self.min_reward
        )


class ExportedTurn(Record, frozen=True):
    """One model call of a rollout."""

    finish_reason: str
    """Why the reply ended, as the endpoint puts it."""
    model: str | None
    """Model that answered, according to the endpoint."""
    params: JsonObject
    """Request parameters."""
    prompt_tokens: int
    completion_tokens: int
    duration_ms: float
    """Duration in milliseconds."""
    attempts: int
    """Requests, retries included."""
    logprobs: Logprobs | None
    """Log probabilities of the reply's tokens, null if the endpoint returned none."""
    prompt_token_ids: list[int] | None
    """Token ids of the request, null if the endpoint returned none."""
    token_ids: list[int] | None
    """Token ids of the reply, null if the endpoint returned none."""


class ExportedRollout(Record, frozen=True):
    """One stored rollout, as training code reads it."""

    id: str
    """Id of the rollout, unique in its run."""
    run_id: str
    """Id of the run."""
    row_id: str
    """Hash of the row's content and its occurrence number."""
    row_index: int
    """Position of the row in the dataset, from 0."""
    run_index: int
    """Attempt of the row, from 0."""
    policy: str
    """`policy` or `baseline`."""
    model: str | None
    """Name of the model."""
    messages: list[Message]
    """The conversation in the OpenAI chat format."""
    tools: list[Tool] | None
    """The tools' schemas, as the model saw them."""
    reward: float | None
    """Mean of the functions' scores, null if one is missing."""
    rewards: dict[str, float | None]
    """Score by function, null if it could not be computed."""
    scoring_errors: dict[str, str]
    """Error by function, for scores that could not be computed."""
    finish_reason: FinishReason
    """Why the rollout ended."""
    error: str | None
    """The failure, with its origin first: `model: …`, `timeout: …`, `worker: …`."""
    human: int | None
    """A person's verdict: 1 if the rollout is good, 0 if not, null without one."""
    human_note: str | None
    """The note of that verdict, null without one."""
    ground_truth: str | None
    """Ground truth of the row."""
    metadata: JsonObject
    """Other columns of the row."""
    token_usage: TokenUsage
    """Tokens of all model calls."""
    cost_usd: float | None
    """Cost in US dollars, null if no price is known."""
    duration_ms: float
    """Duration in milliseconds."""
    turns: list[ExportedTurn]
    """The model calls, in order."""


def exported_rollouts(
    store: Queries, run: RunInfo, selection: Selection, wanted: RolloutFilter
) -> Iterator[ExportedRollout]:
    """Stream the rollouts of a run that pass both filters, ordered by row, run index and policy; raise StoreError."""
    for scored in store.scored(run.id, wanted, with_trajectory=True):
        if selection.wants(scored):
            yield _exported(run, scored)


def _exported(run: RunInfo, scored: ScoredRollout) -> ExportedRollout:
    rollout, row, usage = scored.stored.rollout, scored.row, scored.stored.rollout.usage
    return ExportedRollout(
        id=rollout.id,
        run_id=run.id,
        row_id=rollout.row_id,
        row_index=rollout.row_index,
        run_index=rollout.run_index,
        policy=rollout.policy,
        model=run.config.get("model" if rollout.policy == "policy" else "baseline_model"),
        messages=rollout.messages,
        tools=run.config.get("tools"),
        reward=reward(scored.scores),
        rewards={name: score.value for name, score in scored.scores.items()},
        scoring_errors={name: failure_line(score.failure) for name, score in scored.scores.items() if score.failure},
        finish_reason=rollout.finish_reason,
        error=None if rollout.failure is None else failure_line(rollout.failure),
        human=None if scored.verdict is None else scored.verdict.value,
        human_note=None if scored.verdict is None else scored.verdict.note,
        ground_truth=row.ground_truth,
        metadata=row.extra,
        token_usage=usage.as_object(),
        cost_usd=rollout.cost_usd,
        duration_ms=rollout.duration_ms,
        turns=[_turn(turn) for turn in rollout.turns],
    )


def _turn(turn: Turn) -> ExportedTurn:
    ids = turn.token_ids or TokenIds()
    return ExportedTurn(
        finish_reason=turn.finish_reason,
        model=turn.model,
        params=turn.params,
        prompt_tokens=turn.usage.prompt_tokens,
        completion_tokens=turn.usage.completion_tokens,
        duration_ms=turn.duration_ms,
        attempts=turn.attempts,
        logprobs=turn.logprobs,
        prompt_token_ids=ids.prompt_token_ids,
        token_ids=ids.token_ids,
    )
