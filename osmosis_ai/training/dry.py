"""Predict whether a training config would learn anything, before you pay for a GPU."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from osmosis_ai.records import Record
from osmosis_ai.runtime.run.session import open_run
from osmosis_ai.training.config import TrainingConfig
from osmosis_ai.training.contract import BatchRequest
from osmosis_ai.training.record import LeftOutRow, step_run
from osmosis_ai.training.rollouts import StepRunner
from osmosis_ai.training.rows import Rows

__all__ = ["Controls", "DryReport", "PolicyReport", "Spread", "look_at", "try_controls", "try_policy"]

CONTROL_ROWS = 20
"""Rows to score the controls on."""
POLICY_ROWS = 8
"""Rows to roll out with the untrained model."""


class Spread(Record, frozen=True, omit_defaults=False):
    """The minimum, median and maximum of a set of numbers."""

    least: float
    median: float
    most: float


class Controls(Record, frozen=True, omit_defaults=False):
    """Rewards of known answers, which show that the reward is attainable and tells right from wrong."""

    rows: int
    references: float | None
    """Mean reward of the reference solutions, or of the ground truth as the answer; null if no score was computed."""
    empty: float | None
    """Mean reward of an empty answer."""


class PolicyReport(Record, frozen=True, omit_defaults=False):
    """How the untrained model does on a few rows."""

    rows: int
    samples: int
    reward: float
    groups_with_variance: int
    """Rows whose rollouts differ in reward; the other rows have no advantage to learn from."""
    left_out: dict[str, int]
    """The number of rollouts left out of training, by reason."""
    prompt_tokens: Spread
    response_tokens: Spread
    sampled_share: float
    """Share of the response tokens that the model sampled; the rest are tool results and the chat template."""
    seconds_per_rollout: float
    """Wall seconds for all rollouts divided by their number, so concurrency is included."""
    run: str


class DryReport(Record, frozen=True, omit_defaults=False):
    """A preview of a training run."""

    rows: int
    held_out: int
    left_out: list[LeftOutRow]
    steps: int
    rollouts: int
    tools: list[str]
    functions: list[str]
    prompt_tokens: Spread | None
    """Null if the agent builds its prompts only at run time."""
    controls: Controls
    policy: PolicyReport | None = None
    tokens: int | None = None
    """Estimated tokens of the whole training run, prompts and responses."""
    rollout_seconds: float | None = None
    """Estimated seconds for all rollouts on this machine, without the updates."""

    @property
    def problems(self) -> list[str]:
        """Reasons why training would learn little or nothing."""
        found = []
        controls = self.controls
        if controls.references is None or controls.empty is None:
            found.append("the controls could not be scored")
        elif controls.references <= controls.empty:
            found.append(
                f"the reward doesn't tell reference solutions ({controls.references:.3f}) from an empty answer "
                f"({controls.empty:.3f})"
            )
        if self.policy is not None:
            if self.policy.groups_with_variance == 0:
                found.append("no row's rollouts differ in their reward, so nothing would be learned at the start")
            # As `rollouts.sample_of` words it.
            if any("token sequence" in reason for reason in self.policy.left_out):
                found.append("the agent rewrites its conversation, and such rollouts can't be learned from")
        return found


async def look_at(config: TrainingConfig, rows: Rows, steps: int, store: str, environ: Mapping[str, str]) -> DryReport:
    """Report everything that needs no model; raise StartError if the repository or dataset is unusable."""
    lengths = [rows.prompt_tokens[number] for number in rows.trained if number in rows.prompt_tokens]
    return DryReport(
        rows=len(rows.trained),
        held_out=len(rows.held_out),
        left_out=rows.left_out,
        steps=steps,
        rollouts=steps * config.batch_rows * config.samples,
        tools=[tool["function"]["name"] for tool in rows.tools],
        functions=rows.functions,
        prompt_tokens=_spread(lengths) if lengths else None,
        controls=await try_controls(config, rows.trained[:CONTROL_ROWS], store, environ),
    )


async def try_controls(config: TrainingConfig, rows: Sequence[int], store: str, environ: Mapping[str, str]) -> Controls:
    """Score reference solutions and empty answers on `rows`; raise StartError if a run can't start."""

    async def reward(model: str) -> float | None:
        run = config.run_config(rows, model=model, store=store, batch_size=config.in_flight)
        async with open_run(run, directory=config.root, environ=environ) as session:
            report = await session.report()
        means = [function.mean_scored for function in report.functions.values() if function.mean_scored is not None]
        return statistics.fmean(means) if means else None

    return Controls(len(rows), await reward("offline/oracle"), await reward("offline/empty"))


async def try_policy(
    config: TrainingConfig,
    report: DryReport,
    rows: Rows,
    policy_url: str,
    token: str | None,
    name: str,
    store: str,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> DryReport:
    """Roll out a few rows with the untrained model and add the results to `report`.

    Args:
        config: The training config.
        report: The report so far, from `look_at`.
        rows: The chosen rows; the first `POLICY_ROWS` of those to train on are rolled out.
        policy_url: The base URL of the served model.
        token: The bearer token of the served model.
        name: The name that the run's name starts with.
        store: The store's folder.
        environ: The environment of the workers.
        say: Called with notices for the user.

    Raises:
        OsmosisError: The run can't start, or no rollout can be learned from.
    """
    runner = StepRunner(config, name, store, environ, [], token, say=say)
    chosen = rows.trained[:POLICY_ROWS]
    batch = await runner.batch(BatchRequest(0, chosen, config.samples, policy_url))
    samples = [sample for group in batch.groups for sample in group.samples]
    good = [sample for sample in samples if sample.reward is not None]
    policy = PolicyReport(
        rows=len(chosen),
        samples=config.samples,
        reward=batch.metrics["reward"],
        groups_with_variance=round(batch.metrics["groups_with_variance"] * len(chosen)),
        left_out=dict(Counter(sample.left_out for sample in samples if sample.left_out is not None)),
        prompt_tokens=_spread([len(sample.prompt_ids) for sample in good]),
        response_tokens=_spread([len(sample.completion_ids) for sample in good]),
        sampled_share=batch.metrics["sampled_share"],
        seconds_per_rollout=batch.metrics["rollout_seconds"] / len(samples),
        run=step_run(name, 0),
    )
    each = statistics.fmean(len(sample.prompt_ids) + len(sample.completion_ids) for sample in good)
    return msgspec.structs.replace(
        report,
        policy=policy,
        tokens=round(each * report.rollouts),
        rollout_seconds=policy.seconds_per_rollout * report.rollouts,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), statistics.median(values), max(values))
