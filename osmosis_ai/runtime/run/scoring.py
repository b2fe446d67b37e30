"""Score durable rollouts and store the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import groupby, islice
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol
from uuid import uuid4

import anyio

from osmosis_ai.code_hashes import function_code
from osmosis_ai.masking import Masker
from osmosis_ai.records import Failure, FunctionRef, Message, Rollout, Row, Score, StoredInput
from osmosis_ai.runtime.pool.base import Pool
from osmosis_ai.runtime.pool.group import HaltError
from osmosis_ai.runtime.protocol import MAX_FRAME, ScoreJob
from osmosis_ai.store.codec import Encoder
from osmosis_ai.store.queries import RolloutKey, Unscored
from osmosis_ai.store.reading import ScoringReader
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.tasks import task_group

__all__ = ["Scored", "Scoring", "ScoringListener", "judges_usd", "rescore", "score_conversations", "to_be_scored"]

BATCH_SECONDS = 0.1
"""Target duration of a batch; slower functions get one rollout at a time."""

MAX_BATCH = 256
GATHER_SECONDS = 0.03
"""How long a batch waits for more rollouts, if the functions are fast enough for several."""

RESCORING_SLOTS = 4

READ_AT_ONCE = 16
"""Conversations read by one query; each can be megabytes."""

JOB_BYTES = 32 * 1024 * 1024
"""How much stored data a job may hold before it is sent."""

MAX_INPUT = MAX_FRAME // 2
"""The largest stored conversation that fits into a job, in bytes."""


class Scored(NamedTuple):
    """A rollout with durable scores; none if it could not be scored."""

    rollout: Unscored
    scores: list[Score]


class ScoringListener(Protocol):
    """Notified of scores once they are durable."""

    def scores_done(self, scored: list[Scored]) -> None:
        """Called once these rollouts are scored."""


class Scoring:
    """Scores a run's rollouts, added and stored ones, in batches of about `BATCH_SECONDS`.

    The pool's workers have loaded the functions; `root` is the repository, for the hashes of the functions'
    code. If a lost worker can't be replaced, `halt` is called and the remaining rollouts stay unscored. With `partial`,
    rollouts that ran out of time are scored too. `add` waits while more than `room` added rollouts are pending.
    `spent_usd` is the judges' cost.
    """

    def __init__(
        self,
        run_id: str,
        pool: Pool,
        store: RunStore,
        listener: ScoringListener,
        functions: list[FunctionRef],
        root: Path,
        halt: Callable[[HaltError], None],
        *,
        partial: bool = False,
        room: int = 0,
    ) -> None:
        self.spent_usd = 0.0
        self._functions = pool.loaded.functions
        self._kinds = {ref.name: ref.kind for ref in functions}
        code = function_code(functions, pool.loaded.function_sources, root)
        self._code = {name: code[name] for name in self._functions}
        self._run_id = run_id
        self._pool = pool
        self._store = store
        self._reader = ScoringReader(store.path)
        self._listener = listener
        self._halt = halt
        self._partial = partial
        self._send, self._receive = anyio.create_memory_object_stream[Unscored](room)
        self._gathering = anyio.Lock()
        self._complete = anyio.Event()
        self._seconds_each = math.inf

    def stored(self) -> Iterator[Unscored]:
        """Return the stored rollouts not yet scored by the functions' current code."""
        return self._store.unscored(self._run_id, self._code, partial=self._partial) if self._code else iter(())

    async def add(self, key: int, rollout: Rollout) -> None:
        """Queue a rollout for scoring, by its key in the store; a failed one goes straight to the listener."""
        place = RolloutKey(rollout.policy, rollout.row_id, rollout.run_index)
        functions = self._functions if to_be_scored(rollout, partial=self._partial) else []
        await self._send.send(Unscored(key, place, rollout.row_index, functions))

    def complete(self) -> None:
        """Note that no more rollouts will be added, so that batches stop waiting for them."""
        self._send.close()
        self._complete.set()

    async def run(self, stored: Iterator[Unscored], slots: int) -> None:
        """Score, `slots` batches at a time, until all stored rollouts are scored and `complete` was called."""
        with self._receive, closing(self._reader):
            async with task_group() as group:
                for _ in range(slots):
                    group.start_soon(self._slot, stored)

    async def _slot(self, stored: Iterator[Unscored]) -> None:
        while batch := await self._next_batch(stored):
            # One group as a rule; only resumed rollouts may lack different functions.
            for functions, alike in groupby(batch, key=lambda unscored: unscored.functions):
                await self._score(functions, list(alike))

    async def _next_batch(self, stored: Iterator[Unscored]) -> list[Unscored]:
        # One slot at a time; otherwise all slots would wait with one rollout each.
        async with self._gathering:
            size = max(1, int(BATCH_SECONDS / max(self._seconds_each, BATCH_SECONDS / MAX_BATCH)))
            # New rollouts first; stored ones fill up the batch.
            batch = self._added(size)
            batch += islice(stored, size - len(batch))
            if not batch:
                with suppress(anyio.EndOfStream):
                    batch.append(await self._receive.receive())
                    batch += self._added(size - 1)
            if batch and len(batch) < size:
                with anyio.move_on_after(GATHER_SECONDS):
                    await self._complete.wait()
                batch += self._added(size - len(batch))
            return batch

    def _added(self, most: int) -> list[Unscored]:
        added: list[Unscored] = []
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while len(added) < most:
                added.append(self._receive.receive_nowait())
        return added

    async def _score(self, functions: list[str], batch: Sequence[Unscored]) -> None:
        if not functions:
            self._listener.scores_done([Scored(unscored, []) for unscored in batch])
            return
        rollouts: list[Unscored] = []
        inputs: list[StoredInput] = []
        size = 0
        for unscored, given in self._read(batch):
            this = len(given.row) + len(given.trajectory)
            if this > MAX_INPUT:
                message = f"the conversation is too large to be scored: {this >> 20:,} MiB as stored"
                scores = [Score(name, failure=Failure(self._kinds[name], message)) for name in functions]
                await self._save([unscored], [scores])
                continue
            rollouts.append(unscored)
            inputs.append(given)
            size += this
            if size > JOB_BYTES:
                await self._score_inputs(functions, rollouts, inputs)
                rollouts, inputs, size = [], [], 0
        if rollouts:
            await self._score_inputs(functions, rollouts, inputs)

    def _read(self, batch: Sequence[Unscored]) -> Iterator[tuple[Unscored, StoredInput]]:
        for start in range(0, len(batch), READ_AT_ONCE):
            part = batch[start : start + READ_AT_ONCE]
            yield from zip(part, self._reader.read([unscored.key for unscored in part]), strict=True)

    async def _score_inputs(self, functions: list[str], rollouts: list[Unscored], inputs: list[StoredInput]) -> None:
        started = monotonic()
        try:
            scores = await self._pool.score(ScoreJob(uuid4().hex, inputs, functions))
        except HaltError as error:
            self._halt(error)
            return
        # Any slot's last batch predicts the duration of the next ones. What the functions took themselves, because a
        # cluster's node is asked and answers in batches of its own; unless one of them took its worker along.
        took = [score.duration_ms / 1000 for each in scores for score in each]
        self._seconds_each = (sum(took) if all(took) else monotonic() - started) / len(inputs)
        self.spent_usd += sum(map(judges_usd, scores))
        await self._save(rollouts, scores)

    async def _save(self, rollouts: list[Unscored], scores: list[list[Score]]) -> None:
        keys = [unscored.key for unscored in rollouts]
        await self._store.save_scores(dict(zip(keys, scores, strict=True)), code=self._code)
        self._listener.scores_done(list(map(Scored, rollouts, scores)))


async def rescore(
    run_id: str, pool: Pool, store: RunStore, listener: ScoringListener, functions: list[FunctionRef], root: Path
) -> None:
    """Score a stored run's trajectories with the pool's functions, without any model call.

    Skips rollouts already scored by the functions' current code. Raises HaltError, after storing the other
    scores, if a lost worker can't be replaced.
    """
    errors: list[HaltError] = []
    scoring = Scoring(run_id, pool, store, listener, functions, root, errors.append)
    scoring.complete()
    await scoring.run(scoring.stored(), RESCORING_SLOTS)
    if errors:
        raise errors[0]


async def score_conversations(
    pool: Pool,
    masker: Masker,
    conversations: Sequence[tuple[Row, list[Message]]],
    functions: list[str],
    *,
    times: int = 1,
    first_attempt: int = 0,
) -> list[list[Score]]:
    """Score conversations outside a run, each with its row; return each one's scores in the functions' order.

    Known keys in a conversation are masked, as in a run. Each is scored `times` times, as attempts from
    `first_attempt` on, and has as many lists.
    """
    encoder = Encoder(masker)
    inputs = [
        encoder.scoring_input(row, messages, first_attempt + time)
        for row, messages in conversations
        for time in range(times)
    ]
    return await pool.score(ScoreJob(uuid4().hex, inputs, functions))


def to_be_scored(rollout: Rollout, *, partial: bool) -> bool:
    """Return True unless the rollout failed or was removed; with `partial`, also if it ran out of time."""
    failure = rollout.failure
    if rollout.finish_reason == "removed":
        return False
    return failure is None or (partial and failure.origin == "timeout")


def judges_usd(scores: Iterable[Score]) -> float:
    """Return the known cost of the scores' judge calls, in USD."""
    return sum(call.cost_usd or 0.0 for score in scores for call in score.judge_calls)
