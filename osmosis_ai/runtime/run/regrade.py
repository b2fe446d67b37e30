"""Grade a run's stored rollouts again: their workflows run on the recorded replies, and only the grading is kept."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import msgspec

from osmosis_ai.records import AgentReport, Failure, Rollout, Score
from osmosis_ai.runtime.protocol import RolloutJob
from osmosis_ai.runtime.run.run import Run

__all__ = ["Regrading"]


class Regrading(Run):
    """Replaces the gradings of a run's rollouts, except failed ones, and scores them with changed functions.

    A rollout whose model calls differ from the recorded ones gets no score, with that as the reason.
    """

    def jobs(self) -> Iterator[RolloutJob]:
        """Yield a job for each stored rollout that has not failed."""
        self._stored: dict[str, Rollout] = {}
        for stored, row, *_ in self.store.scored(self.id, with_trajectory=True):
            if self.stopping:
                return
            rollout = stored.rollout
            if rollout.failure is None:
                earlier = [] if rollout.agent is None else rollout.agent.conversations
                repeat = [*earlier, rollout.messages]
                job = RolloutJob(uuid4().hex, row, rollout.run_index, rollout.policy, repeat=repeat)
                self._stored[job.id] = rollout
                yield job

    async def record(self, job: RolloutJob, rollout: Rollout) -> None:
        """Store the new grading of a rollout."""
        stored = self._stored.pop(job.id)
        # A rollout that the grader removed before may count now, or the other way round.
        ended = rollout.finish_reason if rollout.failure is None else stored.finish_reason
        regraded = msgspec.structs.replace(stored, agent=_report(stored, rollout), finish_reason=ended)
        await self.store.save_report(self.id, regraded)
        self.listener.rollout_done(regraded)


def _report(stored: Rollout, again: Rollout) -> AgentReport | None:
    failed = again.failure
    earlier = [] if stored.agent is None else stored.agent.conversations
    if failed is None or stored.agent is None:
        return None if again.agent is None else msgspec.structs.replace(again.agent, conversations=earlier)
    name = stored.agent.name
    if failed.kind != "unrecorded":
        message = f"graded again, the rollout failed: {failed.message}"
        failed = Failure("reward", message, "exception", failed.file, failed.line, failed.detail)
    score = Score(name, failure=msgspec.structs.replace(failed, origin="reward"))
    return AgentReport(name, score=score, conversations=earlier)
