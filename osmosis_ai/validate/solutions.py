"""Check that each solution earns the full reward when played through the real tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import NamedTuple
from uuid import uuid4

from osmosis_ai.masking import Masker
from osmosis_ai.models.choice import choose_model
from osmosis_ai.models.offline import offline_names
from osmosis_ai.records import ModelSpec, Rollout, Row, Score
from osmosis_ai.runtime.pool.base import Pool
from osmosis_ai.runtime.protocol import RolloutJob
from osmosis_ai.runtime.run.plan import POLICY
from osmosis_ai.runtime.run.scoring import score_conversations
from osmosis_ai.text import counted, excerpt
from osmosis_ai.validate.check import Subject
from osmosis_ai.validate.findings import Finding, Place, finding
from osmosis_ai.validate.rows import line_of_row
from osmosis_ai.validate.state import STATE_HINT

__all__ = [
    "MAX_SOLUTIONS",
    "ROLLOUT_SECONDS",
    "Played",
    "find_leaks",
    "judge_solutions",
    "play_solutions",
    "player",
]

MAX_SOLUTIONS = 50
"""Solutions played, the first ones of the dataset."""
ROLLOUT_SECONDS = 15.0
"""Time limit for one solution, which waits for tools only."""
PLAY_SECONDS = 60.0
"""Time limit for all solutions; those left over are skipped."""

EVERY = 20
"""Every 20th solution, and the last one, is played once more in a process of its own."""

SHOWN = 5
"""Rows with the same kind of problem that get a finding each."""
TOLERANCE = 1e-6
"""How far a score may lie below the full reward: a sum of weights such as 0.1 isn't exact."""


class Played(NamedTuple):
    """A row, the rollout of its solution, and its scores."""

    row: Row
    rollout: Rollout
    scores: list[Score]


def player() -> ModelSpec:
    """Return the model that plays solutions."""
    return choose_model(
        model=offline_names()[0], base_url=None, api_key=None, params={}, request_timeout=ROLLOUT_SECONDS, environ={}
    )


async def play_solutions(rows: Sequence[Row], pool: Pool, masker: Masker) -> list[Played]:
    """Play the rows' solutions and score the rollouts, up to a time limit."""
    deadline = monotonic() + PLAY_SECONDS
    functions = pool.loaded.functions
    played: list[Played] = []
    for row in rows:
        if monotonic() > deadline:
            break
        rollout = await pool.rollout(RolloutJob(uuid4().hex, row, 0, POLICY))
        scores = await score_conversations(pool, masker, [(row, rollout.messages)], functions) if functions else [[]]
        played.append(Played(row, rollout, scores[0]))
    return played


async def find_leaks(
    played: Sequence[Played], open_alone: Callable[[], AbstractAsyncContextManager[Pool]], subject: Subject
) -> list[Finding]:
    """Play some solutions once more, each in a fresh process, and report the first whose tools answer differently.

    `open_alone` opens a pool with a new worker. Tools that answer differently in every fresh process don't count: they
    are random, and share nothing.
    """
    for position, one in enumerate(played):
        # The first one did run in a fresh process; without tool calls there is nothing to compare.
        if position == 0 or ((position + 1) % EVERY and position + 1 < len(played)) or not one.rollout.tool_calls:
            continue
        alone = await _results_alone(one.row, open_alone)
        difference = next(
            # Conversations that differ may have different numbers of calls.
            (pair for pair in zip(_results(one.rollout), alone, strict=False) if pair[0] != pair[1]),
            None,
        )
        if difference is None or alone != await _results_alone(one.row, open_alone):
            continue
        (tool, after), (_, fresh) = difference
        message = (
            f"row {one.row.index}: {tool} answers {excerpt(after, 60)!r} after other rollouts, and "
            f"{excerpt(fresh, 60)!r} in a fresh process: state leaks from one rollout into the next"
        )
        return [finding("OSM122", message, Place("mcp/main.py", None, tool), STATE_HINT)]
    return []


async def _results_alone(
    row: Row, open_alone: Callable[[], AbstractAsyncContextManager[Pool]]
) -> list[tuple[str, str]]:
    async with open_alone() as pool:
        return _results(await pool.rollout(RolloutJob(uuid4().hex, row, 0, POLICY)))


def _results(rollout: Rollout) -> list[tuple[str, str]]:
    """Return each tool call's name and result, in the order of the calls; concurrent ones may end in any order."""
    names = {call.id: call.name for call in rollout.tool_calls}
    results = (message for message in rollout.messages if message["role"] == "tool")
    return [(names.get(result["tool_call_id"], ""), str(result.get("content"))) for result in results]


def judge_solutions(played: Sequence[Played], full: Mapping[str, float], subject: Subject) -> Iterator[Finding]:
    """Report solutions that don't earn the full reward or whose tool calls fail.

    `full` maps a function to its highest score for a right answer, if known; the default is 1.
    """
    file = subject.shown(subject.dataset)
    hint = "Replay it with `osmosis test -i --model offline/oracle --row {}`; fix the solution, a tool or a function."
    for code, problem in (("OSM410", lambda one: _unrewarded(one, full)), ("OSM411", _failed_calls)):
        found = [(one.row, message) for one in played if (message := problem(one))]
        for row, message in found[:SHOWN]:
            line = line_of_row(subject.dataset, row.index)
            text = f"row {row.index}: {message}"
            yield finding(code, text, Place(file, line, "solution"), hint.format(row.index))
        if len(found) > SHOWN:
            text = f"the solutions of {counted(len(found) - SHOWN, 'more row')} have the same problem"
            yield finding(code, text, Place(file, subject="solution"))


def _unrewarded(one: Played, full: Mapping[str, float]) -> str | None:
    if one.rollout.failure is not None:
        return f"the solution doesn't run to the end: {one.rollout.failure.message}"
    if one.rollout.finish_reason != "stop":
        return f"the solution doesn't run to the end: {one.rollout.finish_reason}"
    said = []
    for score in one.scores:
        wanted = full.get(score.function, 1.0)
        if score.value is None:
            said.append(f"no score from {score.function}")
        elif score.value < wanted - TOLERANCE:
            said.append(f"{score.value:g} instead of {wanted:g} from {score.function}")
    return f"the solution doesn't earn the full reward: {', '.join(said)}" if said else None


def _failed_calls(one: Played) -> str | None:
    failed = [call for call in one.rollout.tool_calls if call.error is not None]
    if not failed:
        return None
    said = next((message for message in one.rollout.messages if message.get("tool_call_id") == failed[0].id), {})
    text = " ".join(str(said.get("content") or failed[0].error).split())[:200]
    return f"the solution's call of {failed[0].name} fails: {text}"
