"""Whatever a worker writes into its socket costs that worker, never the run."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fuzz import CASES, generator, mutated
from osmosis_ai.records import Failure, Rollout, Row, Score, StoredInput, ToolCall, Turn, Usage
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.pool.trajectory import TrajectoryBuilder
from osmosis_ai.runtime.pool.worker import WorkerHandle, WorkerLostError
from osmosis_ai.runtime.protocol import MAX_FRAME, Event, decode_event, encode, pack, read_frame

pytestmark = pytest.mark.anyio

JOB = protocol.RolloutJob("job", Row(0, "r", "s", "u"), 0, "policy")
SCORING = protocol.ScoreJob("job", [StoredInput(0, b"", b""), StoredInput(1, b"", b"")], ["f", "g"])
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ROLLOUT_EVENTS: list[Event] = [
    protocol.Ready(tools=[{"type": "function", "function": {"name": "add"}}], functions=["f"], agent="a"),
    protocol.TurnDone(
        "job",
        Turn(0, "tool_calls", Usage(1, 2, 3), 1.5, "m", attempts=2, cost_usd=0.1),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ),
    protocol.CallDone("job", ToolCall(0, "c", "add", "{}", 1.0), {"role": "tool", "tool_call_id": "c", "content": "3"}),
    protocol.SampleDone("job", Turn(0, "stop", Usage(1, 1, 2), 1.0)),
    protocol.Acting("job"),
    protocol.Asked("job", 1, [{"role": "user", "content": "x"}], [ToolCall(0, "c", "add", "{}", 1.0)]),
    protocol.RolloutDone("job", "stop", 12.5, Failure("tool", "m", "exception", "f.py", 3, "d")),
]
SCORE_EVENTS: list[Event] = [
    protocol.Ready(functions=["f", "g"]),
    protocol.ScoringStarted("job", "f"),
    protocol.ScoresDone("job", [[Score("f", 1.0), Score("g", failure=Failure("reward", "m"))]] * 2),
]


class Wire:
    """A worker's end of a channel: it sends these bytes and is gone."""

    ending = "exited with code 0"

    def __init__(self, sent: bytes) -> None:
        self._reader = asyncio.StreamReader()
        self._reader.feed_data(sent)
        self._reader.feed_eof()
        self.killed = False

    async def read(self, take: Callable[[Event], None]) -> None:
        try:
            while not self.killed:
                take(decode_event(await read_frame(self._reader)))
        except asyncio.IncompleteReadError:
            return

    def send(self, order: protocol.Order) -> None:
        pass

    def kill(self) -> None:
        self.killed = True

    def memory(self) -> int:
        return 0

    def stopped(self) -> bool:
        return False

    def last_words(self) -> list[str]:
        return []


async def outcome(job: protocol.Job, sent: bytes) -> Rollout | protocol.Done | Failure:
    """Run a job in a worker that sends these bytes; return what the run gets."""
    handle = WorkerHandle(Wire(sent), lambda event: None)
    builder = TrajectoryBuilder(JOB)
    running = asyncio.ensure_future(handle.run(job, builder.add))
    await asyncio.sleep(0)  # the job must be known before its events arrive
    await handle.read()
    try:
        done = await running
    except WorkerLostError as lost:
        return lost.loss.failure
    return builder.finish(done) if isinstance(done, protocol.RolloutDone) else done


def dumped(value: Any) -> bytes:
    """Encode a value of any depth."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value).encode()
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(("job", "events"), [(JOB, ROLLOUT_EVENTS), (SCORING, SCORE_EVENTS)], ids=["rollout", "score"])
async def test_a_mutated_event_gives_a_storable_result_or_loses_the_worker(
    job: protocol.Job, events: list[Event]
) -> None:
    chance = generator()
    kinds = set()
    for _ in range(CASES):
        sent = [msgspec.json.decode(encode(event)) for event in events]
        for _ in range(chance.choice([1, 2, 4])):
            place = chance.randrange(len(sent))
            sent[place] = mutated(sent[place], chance)
        # The standard library writes what msgspec refuses to write, as a hostile worker would.
        bodies = [dumped(event) for event in sent]
        found = await outcome(job, b"".join(protocol.HEADER.pack(len(body)) + body for body in bodies))
        kinds.add(type(found))
        if isinstance(found, Rollout):
            # What SQLite stores as integers fits, and the whole can be sent and read again.
            assert all(0 <= count < 2**63 for count in msgspec.structs.astuple(found.usage))
            assert all(turn.index < 2**63 for turn in found.turns)
            assert msgspec.json.decode(encode(found), type=Rollout) == found
        elif isinstance(found, protocol.ScoresDone) and found.error is None:
            assert [[score.function for score in scores] for scores in found.scores] == [["f", "g"]] * 2
        elif isinstance(found, Failure):
            assert found.origin == "worker"
    assert len(kinds) == 2, kinds


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (protocol.HEADER.pack(3) + b"{x}", "it sent what can't be read: JSON is malformed"),
        (protocol.HEADER.pack(0), "it sent what can't be read: Input data was truncated"),
        (protocol.HEADER.pack(4) + b'"\xff"x', "it sent what can't be read: "),
        (protocol.HEADER.pack(MAX_FRAME + 1) + b"x" * 100, "it sent what can't be read: a record of 512 MiB"),
        (pack(protocol.Stop()), "it sent what can't be read: Invalid value 'Stop'"),
        (
            pack(protocol.Probed("job")),
            "it sent an event that doesn't fit its job: ValueError: Probed for a RolloutJob",
        ),
        (pack(protocol.RolloutDone("another", "stop", 1.0)), "exited with code 0"),
    ],
)
async def test_the_reason_is_named(sent: bytes, said: str) -> None:
    found = await outcome(JOB, sent)
    assert isinstance(found, Failure)
    assert found.message.startswith(said), found.message


@pytest.mark.parametrize("names", [[["f"], ["f", "g"]], [["f", "g"]], [["f", "forged"]] * 2, [["g", "f"]] * 2, []])
async def test_scores_of_other_functions_than_asked_for_lose_the_worker(names: list[list[str]]) -> None:
    done = protocol.ScoresDone("job", [[Score(name, 1.0) for name in row] for row in names])
    found = await outcome(SCORING, pack(done))
    assert isinstance(found, Failure)
    assert "scores of other functions or rollouts" in found.message
