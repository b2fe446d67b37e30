"""Roll out a training step's rows with the policy, as a run in the store, and turn the rollouts into samples."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from osmosis_ai.errors import OsmosisError, StartError
from osmosis_ai.exports.base import LeftOut
from osmosis_ai.exports.rollouts import ExportedRollout, Selection, exported_rollouts
from osmosis_ai.exports.tokens import sequences_of
from osmosis_ai.runtime.run.session import open_run
from osmosis_ai.store.queries import RolloutFilter
from osmosis_ai.text import counted
from osmosis_ai.training.config import Policy, TrainingConfig
from osmosis_ai.training.contract import Batch, BatchRequest, Evaluation, EvaluationRequest, Group, Sample
from osmosis_ai.training.record import evaluation_run, step_run

__all__ = ["NothingToLearnError", "StepRunner", "sample_of"]

LOST = ("worker:", "model:", "setup:")
"""Origins of rollout errors that say nothing about the policy; such rollouts are retried once."""


class NothingToLearnError(OsmosisError):
    """All rollouts of a step were left out."""


class StepRunner:
    """Rolls out the rows of each step of a training run.

    Args:
        config: The training config.
        name: The training run's name; the names of its runs start with it.
        store: The store's folder.
        environ: The environment of the workers.
        held_out: The rows to evaluate on.
        token: The policy's bearer token.
        reusable: True if the first step may continue an earlier run of the same name, because the same policy sampled
            it.
        say: Called with notices for the user.
    """

    def __init__(
        self,
        config: TrainingConfig,
        name: str,
        store: str,
        environ: Mapping[str, str],
        held_out: Sequence[int],
        token: str | None,
        *,
        reusable: bool = False,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._name = name
        self._store = store
        self._environ = environ
        self._held_out = held_out
        self._token = token
        self._reusable = reusable
        self._say = say

    async def batch(self, request: BatchRequest) -> Batch:
        """Roll out and score a step's rows, and return the samples by row.

        Raises:
            NothingToLearnError: No rollout can be learned from.
            StartError: The run can't start.
        """
        began = monotonic()
        policy = Policy(request.policy_url, self._token)
        name = step_run(self._name, request.step)
        # Only the first step after a resume has the same policy as the interrupted attempt; later ones were updated.
        reusable, self._reusable = self._reusable, False
        try:
            rollouts = await self._rolled_out(policy, request.rows, request.samples, name, fresh=not reusable)
        except StartError as error:
            if not reusable:
                raise
            self._say(f"sampling {name} again from the start: {error}")
            rollouts = await self._rolled_out(policy, request.rows, request.samples, name, fresh=True)
        groups = [self._group(row, rollouts, request.samples) for row in request.rows]
        samples = [sample for group in groups for sample in group.samples]
        if all(sample.reward is None for sample in samples):
            reasons = Counter(sample.left_out for sample in samples)
            said = "; ".join(f"{count} times: {reason}" for reason, count in reasons.most_common(3))
            raise NothingToLearnError(
                f"no rollout of step {request.step} can be learned from: {said}. The run is {name}"
            )
        return Batch(request.step, groups, {**_metrics(rollouts, groups), "rollout_seconds": monotonic() - began})

    def _group(self, row: int, rollouts: Sequence[ExportedRollout], samples: int) -> Group:
        found = [sample_of(rollout, self._config) for rollout in rollouts if rollout.row_index == row]
        # The contract promises `samples` samples for each row, even if a rollout left nothing in the store.
        missing = Sample("", [], [], [], None, None, "the rollout wasn't recorded")
        return Group(row, [*found, *[missing] * (samples - len(found))])

    async def evaluation(self, request: EvaluationRequest) -> Evaluation:
        """Roll out each held-out row once, with training's sampling parameters; raise StartError."""
        if not self._held_out:
            return Evaluation(request.step, None, {})
        began = monotonic()
        policy = Policy(request.policy_url, self._token)
        name = evaluation_run(self._name, request.step)
        rollouts = await self._rolled_out(policy, self._held_out, 1, name, fresh=True)
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None and rollout.error is None]
        metrics = {
            "rows": float(len(rollouts)),
            "failed": float(sum(rollout.error is not None for rollout in rollouts)),
            "seconds": monotonic() - began,
        }
        return Evaluation(request.step, statistics.fmean(rewards) if rewards else None, metrics)

    async def _rolled_out(
        self, policy: Policy, rows: Sequence[int], n: int, name: str, *, fresh: bool
    ) -> list[ExportedRollout]:
        found, run_id = await self._run(policy, rows, n, name=name, fresh=fresh)
        if any((rollout.error or "").startswith(LOST) for rollout in found):
            found, _ = await self._run(policy, rows, n, resume_run=run_id, retry_failed=True)
        return found

    async def _run(
        self, policy: Policy, rows: Sequence[int], n: int, **options: object
    ) -> tuple[list[ExportedRollout], str]:
        config = self._config.rollouts(policy, rows, n, store=self._store, **options)
        async with open_run(config, directory=self._config.root, environ=self._environ) as session:
            await session.report()
            run = session.store.find_run(session.id)
            return list(exported_rollouts(session.store, run, Selection(), RolloutFilter())), session.id


def sample_of(rollout: ExportedRollout, config: TrainingConfig) -> Sample:
    """Return a rollout as a sample to learn from, or with the reason why it is left out."""
    prompt: list[int] = []
    try:
        if rollout.error is not None:
            raise LeftOut(rollout.error)
        sequences = sequences_of(rollout).all
        if len(sequences) > 1:
            raise LeftOut(f"{counted(len(sequences), 'token sequence')}: the conversation was rewritten or branched")
        ids, mask, logprobs = sequences[0].ids, sequences[0].mask, sequences[0].logprobs
        if 1 not in mask:
            raise LeftOut("the model sampled nothing")
        opening, end = mask.index(1), len(mask) - mask[::-1].index(1)
        prompt = ids[:opening]
        if opening > config.max_prompt:
            raise LeftOut(f"the prompt has {opening:,} tokens; max_prompt_length is {config.max_prompt:,}")
        if end - opening > config.max_response:
            raise LeftOut(f"the response has {end - opening:,} tokens; max_response_length is {config.max_response:,}")
        if rollout.reward is None:
            raise LeftOut(_unscored(rollout))
    except LeftOut as reason:
        return Sample(rollout.id, prompt, [], [], None, None, str(reason))
    # The policy never read what follows the last token it sampled.
    values = None if logprobs is None else logprobs[opening:end]
    return Sample(rollout.id, prompt, ids[opening:end], mask[opening:end], values, rollout.reward)


def _unscored(rollout: ExportedRollout) -> str:
    for name, error in rollout.scoring_errors.items():
        return f"no score by {name}: {error}"
    return "no reward function or grader scored it"


def _metrics(rollouts: Sequence[ExportedRollout], groups: Sequence[Group]) -> dict[str, float]:
    rewards = [[sample.reward for sample in group.samples if sample.reward is not None] for group in groups]
    flat = [reward for group in rewards for reward in group]
    samples = [sample for group in groups for sample in group.samples if sample.reward is not None]
    tokens = [len(sample.completion_ids) for sample in samples]
    return {
        "reward": statistics.fmean(flat),
        "groups_with_variance": sum(len(set(group)) > 1 for group in rewards) / len(rewards),
        "left_out": float(sum(sample.reward is None for group in groups for sample in group.samples)),
        "turns": statistics.fmean(len(rollout.turns) for rollout in rollouts),
        "completion_tokens": statistics.fmean(tokens),
        "sampled_share": sum(sum(sample.mask) for sample in samples) / max(1, sum(tokens)),
    }
