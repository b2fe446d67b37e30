"""What a run and its workers say to each other: jobs go down, events come up, each a frozen tagged record.

A trajectory travels as it grows (one event per turn and per tool call), so what a worker had done is known even when it
dies; the run puts the pieces together (`trajectory.TrajectoryBuilder`).

Between processes of one machine a record is a frame: a length of four bytes and JSON.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from osmosis_ai.config import LimitsConfig
from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.discovery.repository import McpSource
from osmosis_ai.records import (
    AgentReport,
    Failure,
    FinishReason,
    FunctionRef,
    JsonObject,
    Message,
    ModelSpec,
    Record,
    Row,
    Score,
    Tool,
    ToolCall,
    Turn,
)


class WorkerSpec(Record, frozen=True):
    """What a worker loads: the repository's tools (`mcp`) or its agent loop, its functions, or both; and the models it
    may ask.

    `required` are the functions without which nothing may run; one of the others that can't be loaded is left out.
    `store` is the run store's file, in which scorers find the rollouts that jobs name; None where nothing is scored.
    `cache` is the file of stored model replies, None for none. With `allow_rewrites` an agent loop may change messages
    that it has sent. `debug_dir` is where its `log_event` writes, None for nowhere.
    """

    root: str
    limits: LimitsConfig
    mcp: McpSource | None = None
    policies: dict[str, ModelSpec] = {}
    functions: list[FunctionRef] = []
    required: frozenset[str] = frozenset()
    batch_size: int = 8
    store: str | None = None
    cache: str | None = None
    agent: AgentSource | None = None
    allow_rewrites: bool = False
    debug_dir: str | None = None


def agent_part(spec: WorkerSpec, batch_size: int) -> WorkerSpec:
    """What a worker gets that runs rollouts: nothing of the functions, and no store with ground truths in it."""
    return msgspec.structs.replace(spec, functions=[], required=frozenset(), store=None, batch_size=batch_size)


def scorer_part(spec: WorkerSpec) -> WorkerSpec:
    """What a worker gets that scores: no model and so no key, no cache of replies, and nothing of the agent."""
    return msgspec.structs.replace(
        spec, mcp=None, agent=None, allow_rewrites=False, policies={}, cache=None, debug_dir=None
    )


class Places(Record, frozen=True):
    """Where things are on a worker's machine, told by the backend that starts the worker there.

    `root` is the repository, `store` the run store's file, `cache` the file of stored model replies, `log` the run's
    log, `debug_dir` where an agent loop's `log_event` writes; None where there is none.
    """

    root: str
    store: str | None = None
    cache: str | None = None
    log: str | None = None
    debug_dir: str | None = None


class Boot(Record, frozen=True):
    """What a worker process is told before its first job: what to load, where that is, and how to run.

    `spec` has no path of the machine that made it, see `detach`. `keys` are values that the log must not show;
    `environ` are variables to set, or to remove where the value is None.
    """

    spec: WorkerSpec
    places: Places
    debug: bool = False
    keys: list[str] = []
    environ: dict[str, str | None] = {}


def detach(spec: WorkerSpec) -> tuple[WorkerSpec, Places]:
    """Take the paths of this machine out of a spec: it has paths relative to the root, and the places stand apart."""
    root = os.path.normpath(Path(spec.root).absolute())
    places = Places(root, store=spec.store, cache=spec.cache, debug_dir=spec.debug_dir)
    named = _with_paths(spec, lambda path: os.path.relpath(path, root))
    return msgspec.structs.replace(named, root="", store=None, cache=None, debug_dir=None), places


def attach(spec: WorkerSpec, places: Places) -> WorkerSpec:
    """Put the paths of the worker's machine into a spec that `detach` gave."""
    found = _with_paths(spec, lambda path: os.path.normpath(Path(places.root, path)))
    return msgspec.structs.replace(
        found, root=places.root, store=places.store, cache=places.cache, debug_dir=places.debug_dir
    )


def _with_paths(spec: WorkerSpec, change: Callable[[str], str]) -> WorkerSpec:
    replace = msgspec.structs.replace
    mcp, agent = spec.mcp, spec.agent
    return replace(
        spec,
        mcp=replace(mcp, path=change(mcp.path)) if mcp is not None and mcp.path is not None else mcp,
        agent=replace(agent, root=change(agent.root)) if agent is not None else None,
        functions=[replace(ref, root=change(ref.root)) for ref in spec.functions],
    )


# From the run to a worker: jobs, and orders about them.


class RolloutJob(Record, frozen=True, tag=True):
    """Run the agent over one row. `policy` names one of the spec's policies; a `stepping` one pauses at every step."""

    id: str
    row: Row
    run_index: int
    policy: str
    stepping: bool = False


class ScoreJob(Record, frozen=True, tag=True):
    """Score stored rollouts with the named functions, one after the other.

    `keys` are the rollouts' keys in the run store; `rows` has the row index of each, for the log.
    """

    id: str
    keys: list[int]
    rows: list[int]
    functions: list[str]


class ProbeJob(Record, frozen=True, tag=True):
    """Ask a policy's model for one small reply, to see that it answers; with `price`, also that its price is known."""

    id: str
    policy: str
    price: bool = False


class TrainerReply(Record, frozen=True):
    """What a trainer answered to a request. `asked` is a hash of that request, `reply` a CompletionsResult."""

    asked: str
    reply: JsonObject


class ServeJob(Record, frozen=True, tag=True):
    """Run the agent loop for a trainer.

    `request` is a RolloutRequest, JSON-able. `replies` is what the trainer has answered to an earlier attempt, whose
    worker was lost: the rollout takes the same course again without asking again.
    """

    id: str
    request: JsonObject
    replies: list[TrainerReply] = []


class ToolsJob(Record, frozen=True, tag=True):
    """Ask the agent loop for the tools of a RolloutRequest."""

    id: str
    request: JsonObject


class InspectJob(Record, frozen=True, tag=True):
    """Validate the agent loop."""

    id: str


class Cancel(Record, frozen=True, tag=True):
    """Stop a running job. Its last event still comes."""

    id: str


class Resume(Record, frozen=True, tag=True):
    """What a person decided while a rollout was paused.

    With `next` it goes on, and `replaced` takes the place of what it paused at: the conversation before a request, the
    reply (a list of one), or the results. With `call` a tool is called in the rollout's session, and the pause goes on.
    """

    id: str
    action: Literal["next", "call"] = "next"
    replaced: list[Message] | None = None
    tool: str = ""
    arguments: str = ""


class Stop(Record, frozen=True, tag=True):
    """Close everything properly and end."""


Job = RolloutJob | ScoreJob | ProbeJob | ServeJob | ToolsJob | InspectJob
Order = Job | Cancel | Resume | Stop


# Events: from a worker to the run.


class Ready(Record, frozen=True, tag=True):
    """The worker has loaded everything.

    `problems` are functions that could not be loaded while others could. `tool_sources` and `function_sources` are the
    repository's files that each side imported, with a hash of their content. `agent` is the name of the repository's
    own agent loop.
    """

    tools: list[Tool] = []
    functions: list[str] = []
    problems: list[Failure] = []
    tool_sources: dict[str, str] = {}
    function_sources: dict[str, str] = {}
    agent: str | None = None


class NotReady(Record, frozen=True, tag=True):
    """The worker can't load the repository. `error` is the name of a StartError subclass."""

    error: str
    message: str


class Imported(Record, frozen=True, tag=True):
    """User code has imported more of the repository's files since: all of them now, with a hash of their content."""

    sources: dict[str, str]


class TurnDone(Record, frozen=True, tag=True):
    """The model replied; the tool calls in `message` start now."""

    job: str
    turn: Turn
    message: Message


class SampleDone(Record, frozen=True, tag=True):
    """A tool asked the rollout's model for a completion of its own."""

    job: str
    turn: Turn


class CallDone(Record, frozen=True, tag=True):
    """A tool call ended; `message` is its result for the model."""

    job: str
    call: ToolCall
    message: Message


Stage: TypeAlias = Literal["request", "reply", "result"]


class Paused(Record, frozen=True, tag=True):
    """A stepping rollout waits for a Resume: before a request, after its reply, or after that reply's tool calls.

    `index` counts the turns from 0, `messages` is the conversation with what the stage is about at its end.
    """

    job: str
    stage: Stage
    index: int
    messages: list[Message]
    turn: Turn | None = None
    calls: list[ToolCall] = []


class Called(Record, frozen=True, tag=True):
    """What a tool called by hand came to; it is no part of the trajectory."""

    job: str
    text: str
    error: str | None
    duration_ms: float


class Reworded(Record, frozen=True, tag=True):
    """A person changed the conversation before a request."""

    job: str
    messages: list[Message]


class Acting(Record, frozen=True, tag=True):
    """Code of the repository's agent loop runs from now on."""

    job: str


class Asked(Record, frozen=True, tag=True):
    """The agent loop waits for the model: for the continuation of the first `kept` messages and these.

    `calls` are the tool calls whose results are among them.
    """

    job: str
    kept: int = 0
    messages: list[Message] = []
    calls: list[ToolCall] = []


class Replied(Record, frozen=True, tag=True):
    """The trainer has answered."""

    job: str
    reply: TrainerReply


class RolloutDone(Record, frozen=True, tag=True):
    """The rollout ended; its trajectory came with the events before, unless the agent loop gives another one here."""

    job: str
    finish_reason: FinishReason
    duration_ms: float
    failure: Failure | None = None
    messages: list[Message] | None = None
    agent: AgentReport | None = None


class ServeDone(Record, frozen=True, tag=True):
    """A trainer's rollout ended; `response` is the RolloutResponse."""

    job: str
    response: JsonObject


class ToolsDone(Record, frozen=True, tag=True):
    """The tools for a request, or why the loop can't give them."""

    job: str
    tools: list[Tool] = []
    error: str | None = None


class LoopFinding(Record, frozen=True):
    """What validation says about an agent loop. `subject` is the tool or attribute concerned."""

    code: str
    message: str
    subject: str | None = None
    warning: bool = False


class Inspected(Record, frozen=True, tag=True):
    """What validation has found."""

    job: str
    name: str | None
    tools: list[Tool] = []
    findings: list[LoopFinding] = []


class ScoringStarted(Record, frozen=True, tag=True):
    """User code of this function runs from now on."""

    job: str
    function: str


class ScoresDone(Record, frozen=True, tag=True):
    """The scores of each of a ScoreJob's rollouts, in the order of its functions; or why they can't be read."""

    job: str
    scores: list[list[Score]] = []
    error: str | None = None


class Probed(Record, frozen=True, tag=True):
    """The probe's answer: None, or why the model can't be used."""

    job: str
    error: str | None = None


class Retiring(Record, frozen=True, tag=True):
    """The worker holds something it can't let go of (a blocked thread); it should get no further jobs."""

    reason: str


class Dying(Record, frozen=True, tag=True):
    """The worker ends because of an exception that user code let out of the event loop."""

    reason: str


class Stuck(Record, frozen=True, tag=True):
    """The worker ends because a call has held its event loop for longer than its job may. `job` is to blame."""

    job: str | None
    seconds: float


class Beat(Record, frozen=True, tag=True):
    """The worker's watchdog thread still runs."""


Progress = TurnDone | SampleDone | CallDone | ScoringStarted | Paused | Called | Reworded | Acting | Asked | Replied
Done = RolloutDone | ScoresDone | Probed | ServeDone | ToolsDone | Inspected
Event = Ready | NotReady | Imported | Progress | Done | Retiring | Dying | Stuck | Beat

encode = msgspec.json.Encoder().encode
decode_boot = msgspec.json.Decoder(Boot).decode
decode_order = msgspec.json.Decoder(Order).decode
decode_event = msgspec.json.Decoder(Event).decode


# From a process that forks others to the run.


class Forked(Record, frozen=True, tag=True):
    """It has forked a child, or `error` says why it can't."""

    pid: int
    error: str | None = None


class Exited(Record, frozen=True, tag=True):
    """One of its children has ended; `code` is negative for the signal that ended it."""

    pid: int
    code: int


ForkReport = Forked | Exited

decode_report = msgspec.json.Decoder(ForkReport).decode


HEADER = struct.Struct(">I")


def pack(record: Record) -> bytes:
    """One frame."""
    body = encode(record)
    return HEADER.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame's record, encoded; raises IncompleteReadError at the end."""
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(size)


def receive_frame(sock: socket.socket) -> bytes:
    """The next frame's record, encoded, from a blocking socket; raises EOFError at the end."""
    (size,) = HEADER.unpack(_exactly(sock, HEADER.size))
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
