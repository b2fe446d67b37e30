"""Step through rollouts: start one, pause it at each step, let the user edit it, and record it.

The caller uses its own thread, where a prompt may block; the workers' event loop runs in another thread.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anyio.from_thread
import msgspec

from osmosis_ai.code_hashes import function_code
from osmosis_ai.errors import OsmosisError
from osmosis_ai.records import Message, Record, Rollout, Row, Score
from osmosis_ai.runtime.protocol import Called, Paused, Progress, Resume, RolloutJob
from osmosis_ai.runtime.run.plan import POLICY
from osmosis_ai.runtime.run.scoring import judges_usd, score_conversations, to_be_scored
from osmosis_ai.runtime.run.session import RunSession
from osmosis_ai.text import json_text

__all__ = ["Debugger", "Ended", "RefusedError"]


class RefusedError(OsmosisError):
    """The user's request can't be carried out now; the message says why, and what to do instead."""


class Ended(Record, frozen=True):
    """A rollout has ended and is recorded. `scores` is empty if it could not be scored, or there are no functions."""

    rollout: Rollout
    scores: list[Score]


class Debugger:
    """Runs one rollout at a time, and pauses it at every step. Methods raise RefusedError if they can't be used now.

    `run` must have begun; `portal` leads to the event loop of its workers.

    Attributes:
        rows: The rows that can be run, by absolute index.
        row: The current row, or else the last one.
        paused: The current pause, as reported by the worker; None if no rollout is paused.
        ended: The last rollout, once it has ended.
        edited: True if the user has changed the current rollout.
    """

    def __init__(self, portal: anyio.from_thread.BlockingPortal, run: RunSession) -> None:
        self.plan = run.plan
        self.pool = run.pool
        self.row: Row | None = None
        self.paused: Paused | None = None
        self.ended: Ended | None = None
        self.edited = False
        self._portal = portal
        self.rows = run.rows
        self._row = run.row
        self._store = run.store
        self._masker = run.masker
        self._run_id = run.id
        self._started = 0
        self._judges_usd = 0.0
        self._recorded: dict[int, int] = {}
        self._job: RolloutJob | None = None
        self._task: Future[None] | None = None
        self._events: queue.SimpleQueue[Paused | Called | Ended | None] = queue.SimpleQueue()
        self._replaced: list[Message] | None = None

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, including the user's changes."""
        if self.paused is not None:
            return self.paused.messages
        return [] if self.ended is None else self.ended.rollout.messages

    def start(self, index: int) -> Paused | Ended:
        """Start the rollout of the row with this absolute index; drop a paused one without a record."""
        if index not in self.rows:
            raise RefusedError(f"there is no row {index}; the rows are {self.rows.start} to {self.rows.stop - 1}")
        limit = self.plan.config.limits.max_cost
        if limit is not None and self.pool.spent_usd + self._judges_usd >= limit:
            raise RefusedError(f"the budget of ${limit:g} (--max-cost) is spent")
        self.leave()
        self.row = self._row(index)
        self._started += 1
        # A row recorded before gets the next run index.
        self._job = RolloutJob(
            f"{self._run_id}.p{index}.{self._started}", self.row, self._recorded.get(index, 0), POLICY, stepping=True
        )
        self.ended, self.edited = None, False
        # A new queue, so that late events of a dropped rollout don't arrive here.
        self._events = queue.SimpleQueue()
        self._task = self._portal.start_task_soon(self._run, self._job, self._events)
        return self._stop()

    def go_on(self) -> Paused | Ended:
        """Continue the paused rollout with the user's changes; return its next pause or its end."""
        paused = self._require()
        replaced, self._replaced = self._replaced, None
        self.paused = None
        self._portal.call(self.pool.resume, Resume(paused.job, replaced=replaced))
        return self._stop()

    def call(self, tool: str, arguments: str) -> Called | Ended:
        """Call a tool in the paused rollout's session with a JSON object, without adding the call to the trajectory.

        Returns the tool's result, or the rollout's end if the tool killed the worker.
        """
        paused = self._require()
        self._portal.call(self.pool.resume, Resume(paused.job, "call", tool=tool, arguments=arguments))
        event = self._next()
        assert not isinstance(event, Paused)
        return event

    def score(self) -> list[Score]:
        """Score the conversation so far with every function. The scores aren't recorded."""
        if self.row is None or not self.messages:
            raise RefusedError("there is no trajectory yet; r N starts row N")
        if not self.pool.loaded.functions:
            raise RefusedError("nothing to score with: no reward function was found")
        return self._portal.call(self._score, self.row, self.messages)

    def editable(self) -> list[Message]:
        """Return the messages that can be changed now: a request's new messages, the reply, or the results."""
        paused = self._require()
        return paused.messages[_first_editable(paused) :]

    def edit(self, messages: Any) -> bool:
        """Replace the `editable` messages when the rollout continues; return True if this changes them."""
        paused = self._require()
        first = _first_editable(paused)
        before = paused.messages[first:]
        after = _checked(paused, before, messages)
        if after == before:
            return False
        conversation = [*paused.messages[:first], *after]
        self.paused = msgspec.structs.replace(paused, messages=conversation)
        # A request is replaced as a whole; a reply or results replace only themselves.
        self._replaced = conversation if paused.stage == "request" else after
        self.edited = True
        return True

    def leave(self) -> bool:
        """Drop the current rollout; return True if there was one, and it has no record."""
        task, self._task = self._task, None
        self.paused = self._replaced = None
        if task is None:
            return False
        task.cancel()
        # `_run` puts None last, once the rollout has really ended.
        while self._events.get() is not None:
            pass
        assert self._job is not None
        return self._recorded.get(self._job.row.index, 0) == self._job.run_index

    def trajectory(self) -> dict[str, Any]:
        """Return the JSON-able trajectory so far: the finished rollout's record, or the conversation before its end."""
        if self.row is None or not self.messages:
            raise RefusedError("there is no trajectory yet; r N starts row N")
        about = {"model": self.plan.policies[POLICY].name, "ground_truth": self.row.ground_truth, "edited": self.edited}
        if self.ended is not None:
            ended = {**msgspec.to_builtins(self.ended.rollout), "scores": msgspec.to_builtins(self.ended.scores)}
            return {**about, **ended}
        row = {"row_index": self.row.index, "row_id": self.row.id}
        return {**about, **row, "finish_reason": None, "messages": self.messages}

    async def _run(self, job: RolloutJob, events: queue.SimpleQueue[Paused | Called | Ended | None]) -> None:
        def listen(event: Progress) -> None:
            if isinstance(event, (Paused, Called)):
                events.put(event)

        try:
            rollout = await self.pool.rollout(job, listen)
            key = await self._store.save_rollout(self._run_id, rollout, job.row)
            self._recorded[job.row.index] = job.run_index + 1
            own = [rollout.agent.score] if rollout.agent is not None and rollout.agent.score is not None else []
            events.put(Ended(rollout, [*own, *await self._scores(key, rollout, job.row)]))
        finally:
            events.put(None)

    async def _scores(self, key: int, rollout: Rollout, row: Row) -> list[Score]:
        if not self.pool.loaded.functions or not to_be_scored(rollout, partial=self.plan.config.scoring.score_partial):
            return []
        scores = await self._score(row, rollout.messages)
        code = function_code(self.plan.functions, self.pool.loaded.function_sources, Path(self.plan.root))
        await self._store.save_scores({key: scores}, code=code)
        return scores

    async def _score(self, row: Row, messages: list[Message]) -> list[Score]:
        functions = self.pool.loaded.functions
        (scores,) = await score_conversations(self.pool, self._masker, [(row, messages)], functions)
        self._judges_usd += judges_usd(scores)
        return scores

    def _stop(self) -> Paused | Ended:
        event = self._next()
        assert not isinstance(event, Called)
        return event

    def _next(self) -> Paused | Called | Ended:
        event = self._events.get()
        if event is None:
            # No event came before the end, so the task raised; `result` raises it here.
            assert self._task is not None
            task, self._task, self.paused = self._task, None, None
            task.result()
            raise RefusedError("the rollout was cancelled")
        if isinstance(event, Paused):
            self.paused = event
        elif isinstance(event, Ended):
            self.ended, self.paused, self._replaced, self._task = event, None, None, None
        return event

    def _require(self) -> Paused:
        if self.paused is None:
            raise RefusedError("no rollout is paused; r N starts row N")
        return self.paused


def _first_editable(paused: Paused) -> int:
    """Return the index of the first editable message."""
    if paused.stage == "reply":
        return len(paused.messages) - 1
    # Before the first request, the whole prompt is editable.
    if paused.index == 0 and paused.stage == "request":
        return 0
    replies = [place for place, message in enumerate(paused.messages) if message.get("role") == "assistant"]
    return replies[-1] + 1 if replies else 0


def _checked(paused: Paused, before: list[Message], after: Any) -> list[Message]:
    if isinstance(after, dict):
        after = [after]
    if not isinstance(after, list) or not all(isinstance(message, dict) for message in after):
        raise RefusedError("it must be a message, or a list of messages, as JSON objects")
    if paused.stage == "reply":
        if len(after) != 1:
            raise RefusedError(f"a reply is one message, and this has {len(after)}")
        return [_checked_reply(after[0])]
    results = paused.stage == "result" or (paused.index > 0 and all(message["role"] == "tool" for message in before))
    if results:
        _check_results(before, after)
    elif not after:
        raise RefusedError("a request needs at least one message")
    for message in after:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), (str, list)):
            raise RefusedError("every message needs a `role` and a `content`, both strings")
    return after


def _check_results(before: Sequence[Message], after: Sequence[Message]) -> None:
    kept = [(message.get("role"), message.get("tool_call_id")) for message in before]
    if [(message.get("role"), message.get("tool_call_id")) for message in after] != kept:
        raise RefusedError("the results must keep their number and order, `role` and `tool_call_id`; change `content`")


def _checked_reply(reply: Message) -> Message:
    if reply.get("role") != "assistant":
        raise RefusedError("a reply's `role` is `assistant`")
    calls = reply.get("tool_calls") or []
    if not isinstance(reply.get("content"), (str, list)) and not (calls and reply.get("content") is None):
        raise RefusedError("a reply needs a string as its `content`, or `tool_calls`")
    if not isinstance(calls, list):
        raise RefusedError("`tool_calls` must be a list")
    reply = {name: value for name, value in reply.items() if name != "tool_calls"}
    if not calls:
        return reply
    checked = [_checked_call(call, place) for place, call in enumerate(calls)]
    if len({call["id"] for call in checked}) < len(checked):
        raise RefusedError("each of the `tool_calls` needs its own `id`")
    return {**reply, "tool_calls": checked}


def _checked_call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f'tool_calls[{place}] must look like {{"function": {{"name": …, "arguments": …}}}}')
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        # An object is easier to write by hand than JSON within JSON.
        arguments = json_text(arguments)
    call_id = call.get("id")
    return {
        **call,
        "id": call_id if isinstance(call_id, str) and call_id else f"call_edited_{place}",
        "type": "function",
        "function": {**function, "arguments": arguments},
    }
