"""A pool without processes and user code, for tests of the code that uses a pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from osmosis_ai.errors import ModelStartError
from osmosis_ai.records import Failure, JsonObject, Rollout, Score, Tool, Turn, Usage
from osmosis_ai.runtime.pool.base import InFlight
from osmosis_ai.runtime.pool.trajectory import TrajectoryBuilder
from osmosis_ai.runtime.protocol import (
    Inspected,
    Progress,
    Ready,
    Resume,
    RolloutDone,
    RolloutJob,
    ScoreJob,
    ToolsDone,
    TurnDone,
)

__all__ = ["FakePool"]


async def _ground_truth(job: RolloutJob) -> str | Failure:
    return job.row.ground_truth or ""


def _full_reward(function: str, row_index: int) -> float | Failure:
    return 1.0


class FakePool:
    """A `Pool` that plays a script.

    Args:
        reply: Returns the model's only reply in a rollout, or the rollout's failure; by default the row's ground truth.
        score: Returns a score, or the score's failure, given the function's name and the row's index; 1.0 by default.
        functions: Names of the scoring functions.
        tools: The repository's tools.
        cost_usd: Cost of each reply, in USD.
        refused: Reason why the model can't be used; None if it can.

    Attributes:
        rollouts: The started jobs, in order.
        scored: Each scored function and row index, in order.
    """

    ahead = 0
    where = ""
    mixed = False
    shortage = None

    def __init__(
        self,
        *,
        reply: Callable[[RolloutJob], Awaitable[str | Failure]] = _ground_truth,
        score: Callable[[str, int], float | Failure] = _full_reward,
        functions: Sequence[str] = ("reward",),
        tools: Sequence[Tool] = (),
        cost_usd: float = 0.0,
        refused: str | None = None,
    ) -> None:
        self.loaded = Ready(tools=list(tools), functions=list(functions))
        self.spent_usd = 0.0
        self.changed: list[str] = []
        self.rollouts: list[RolloutJob] = []
        self.scored: list[tuple[str, int]] = []
        self._reply = reply
        self._score = score
        self._cost_usd = cost_usd
        self._refused = refused
        self._running: dict[str, TrajectoryBuilder] = {}

    async def probe(self, policy: str, *, price: bool) -> None:
        if self._refused is not None:
            raise ModelStartError(self._refused)

    async def rollout(self, job: RolloutJob, listen: Callable[[Progress], None] | None = None) -> Rollout:
        self.rollouts.append(job)
        builder = self._running[job.id] = TrajectoryBuilder(job)
        try:
            reply = await self._reply(job)
        finally:
            del self._running[job.id]
        if isinstance(reply, Failure):
            return builder.abandon(reply)
        self.spent_usd += self._cost_usd
        turn = Turn(0, "stop", Usage(10, 5, 15), 1.0, cost_usd=self._cost_usd)
        event = TurnDone(job.id, turn, {"role": "assistant", "content": reply})
        builder.add(event)
        if listen is not None:
            listen(event)
        return builder.finish(RolloutDone(job.id, "stop", 1.0))

    def resume(self, order: Resume) -> None:
        """Do nothing: rollouts never pause here."""

    async def score(self, job: ScoreJob) -> list[list[Score]]:
        return [[self._score_of(function, given.row_index) for function in job.functions] for given in job.inputs]

    async def serve(self, request: JsonObject) -> JsonObject:
        return {
            "rollout_id": request["rollout_id"],
            "status": "COMPLETED",
            "final_messages": request["messages"],
            "finish_reason": "stop",
        }

    async def tools(self, request: JsonObject) -> ToolsDone:
        return ToolsDone("", self.loaded.tools)

    async def inspect(self) -> Inspected:
        return Inspected("", self.loaded.agent, self.loaded.tools)

    def oldest(self) -> InFlight | None:
        return next(iter(self.in_flight()), None)

    def in_flight(self) -> list[InFlight]:
        return [
            InFlight(builder.job.row.index, builder.job.run_index, builder.elapsed_ms / 1000, builder.waiting_on)
            for builder in self._running.values()
        ]

    def news(self) -> list[str]:
        return []

    def kill(self) -> None:
        """Do nothing: there are no workers."""

    def _score_of(self, function: str, row_index: int) -> Score:
        self.scored.append((function, row_index))
        value = self._score(function, row_index)
        return Score(function, failure=value) if isinstance(value, Failure) else Score(function, value)
