"""The messages between a run and its workers: jobs go down, events come up, each a frozen tagged record.

A worker sends a trajectory as it grows, one event per turn and per tool call, so the part before its death is known.
The run assembles the parts (`trajectory.TrajectoryBuilder`).

Between processes of one machine, a frame carries a record: a length of four bytes, then JSON.
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
from osmosis_ai.discovery.workflows import WorkflowSource
from osmosis_ai.records import (
    AgentReport,
    CassetteSpec,
    Failure,
    FinishReason,
    FunctionRef,
    JsonObject,
    Message,
    ModelSpec,
    Record,
    Row,
    Score,
    StoredInput,
    Tool,
    ToolCall,
    Turn,
)
from osmosis_ai.runtime.bubblewrap import SandboxSpec


class WorkerSpec(Record, frozen=True):
    """What to load into a worker: the repository's tools (`mcp`), its agent loop, or its rollout server (`workflow`),
    which may have tools, too; its functions; and the models it may call.

    Loading fails if a function can't be loaded; with `keep_going`, the function is left out. `cache` is the file of
    stored model replies, None for no cache; `cassette` likewise for recorded ones. With `allow_rewrites`, an agent loop
    may change messages it has already sent. Its `log_event` writes to `debug_dir`, None for nowhere. `scratch` is the
    parent of the rollouts' scratch folders, None for the system's temporary folder. With a `sandbox`, the worker itself
    loads no code of the repository; processes in sandboxes do.
    """

    root: str
    limits: LimitsConfig
    mcp: McpSource | None = None
    policies: dict[str, ModelSpec] = {}
    functions: list[FunctionRef] = []
    keep_going: bool = False
    batch_size: int = 8
    cache: str | None = None
    cassette: CassetteSpec | None = None
    agent: AgentSource | None = None
    workflow: WorkflowSource | None = None
    allow_rewrites: bool = False
    debug_dir: str | None = None
    scratch: str | None = None
    sandbox: SandboxSpec | None = None

    @property
    def own_agent(self) -> bool:
        """True if the repository's own code runs the rollouts, and may score them."""
        return self.agent is not None or self.workflow is not None


def agent_part(spec: WorkerSpec, batch_size: int) -> WorkerSpec:
    """Return the spec of a worker that runs rollouts: no functions."""
    return msgspec.structs.replace(spec, functions=[], keep_going=False, batch_size=batch_size)


def scorer_part(spec: WorkerSpec) -> WorkerSpec:
    """Return the spec of a worker that scores: no model and so no key, no reply cache, and no agent."""
    return msgspec.structs.replace(
        spec,
        mcp=None,
        agent=None,
        workflow=None,
        allow_rewrites=False,
        policies={},
        cache=None,
        cassette=None,
        debug_dir=None,
    )


def sandboxed_part(spec: WorkerSpec) -> WorkerSpec:
    """Return the part of a spec that a process in its sandbox may know: no model, key or path but the repository's."""
    sandbox = spec.sandbox and msgspec.structs.replace(spec.sandbox, bwrap="", hidden=[])
    known = msgspec.structs.replace(spec, policies={}, cache=None, cassette=None, debug_dir=None, scratch=None)
    return msgspec.structs.replace(known, sandbox=sandbox)


class Places(Record, frozen=True):
    """Paths on a worker's machine, set by the backend that starts the worker there. None means that there is no file.

    `root` is the repository, `cache` the file of stored model replies, `cassette` recorded ones, `log` the run's log,
    `debug_dir` the folder for an agent loop's `log_event`, `scratch` the parent of the rollouts' scratch folders.
    """

    root: str
    cache: str | None = None
    cassette: CassetteSpec | None = None
    log: str | None = None
    debug_dir: str | None = None
    scratch: str | None = None


class Boot(Record, frozen=True):
    """The first record for a worker process: its spec, its paths and its environment.

    `spec` holds no path of the machine that made it; see `detach`. The log must not show the values in `keys`.
    `environ` holds variables to set, or, with a value of None, to remove. `sources` holds the content of files under
    the root that must be imported in this version, whatever they hold by now.
    """

    spec: WorkerSpec
    places: Places
    debug: bool = False
    keys: list[str] = []
    environ: dict[str, str | None] = {}
    sources: dict[str, bytes] = {}


def detach(spec: WorkerSpec) -> tuple[WorkerSpec, Places]:
    """Split a spec into one with paths relative to the root, and this machine's places."""
    root = os.path.normpath(Path(spec.root).absolute())
    places = Places(root, cache=spec.cache, cassette=spec.cassette, debug_dir=spec.debug_dir)
    named = _with_paths(spec, lambda path: os.path.relpath(path, root))
    return msgspec.structs.replace(named, root="", cache=None, cassette=None, debug_dir=None), places


def attach(spec: WorkerSpec, places: Places) -> WorkerSpec:
    """Fill the paths of the worker's machine into a spec from `detach`."""
    found = _with_paths(spec, lambda path: os.path.normpath(Path(places.root, path)))
    return msgspec.structs.replace(
        found,
        root=places.root,
        cache=places.cache,
        cassette=places.cassette,
        debug_dir=places.debug_dir,
        scratch=places.scratch,
    )


def _with_paths(spec: WorkerSpec, change: Callable[[str], str]) -> WorkerSpec:
    replace = msgspec.structs.replace
    mcp, agent, workflow = spec.mcp, spec.agent, spec.workflow
    if workflow is not None:
        paths = {name: change(getattr(workflow, name)) for name in ("folder", "entrypoint", "artifacts")}
        workflow = replace(workflow, **paths)
    return replace(
        spec,
        mcp=replace(mcp, path=change(mcp.path)) if mcp is not None and mcp.path is not None else mcp,
        agent=replace(agent, root=change(agent.root)) if agent is not None else None,
        workflow=workflow,
        functions=[replace(ref, root=change(ref.root)) for ref in spec.functions],
        sandbox=replace(spec.sandbox, hidden=[change(path) for path in spec.sandbox.hidden]) if spec.sandbox else None,
    )


# From the run to a worker: jobs, and orders about them.


class RolloutJob(Record, frozen=True, tag=True):
    """Run the agent on one row. `policy` names one of the spec's policies; if `stepping`, it pauses at every step.

    A new `draw` asks the model anew: the reply cache answers only requests of the same draw. With `repeat`, a recorded
    conversation, its replies stand for the model's.
    """

    id: str
    row: Row
    run_index: int
    policy: str
    stepping: bool = False
    draw: str = ""
    repeat: list[list[Message]] | None = None


class ScoreJob(Record, frozen=True, tag=True):
    """Score conversations with the named functions, one after the other."""

    id: str
    inputs: list[StoredInput]
    functions: list[str]


class ProbeJob(Record, frozen=True, tag=True):
    """Check that a policy's model answers a small request; with `price`, also that its price is known."""

    id: str
    policy: str
    price: bool = False


class TrainerReply(Record, frozen=True):
    """A trainer's reply. `asked` is the hash of the request, `reply` a CompletionsResult."""

    asked: str
    reply: JsonObject


class ServeJob(Record, frozen=True, tag=True):
    """Run the agent loop for a trainer.

    `request` is a JSON-able RolloutRequest. `replies` are the trainer's replies to an earlier attempt that lost its
    worker; the rollout replays them instead of asking again.
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
    """Stop a running job. Its last event may still arrive."""

    id: str


class Resume(Record, frozen=True, tag=True):
    """The user's decision about a paused rollout.

    `next` continues it; `replaced`, if set, replaces what it paused at: the conversation before a request, the reply (a
    list of one), or the results. `call` calls a tool in the rollout's session, and the rollout stays paused.
    """

    id: str
    action: Literal["next", "call"] = "next"
    replaced: list[Message] | None = None
    tool: str = ""
    arguments: str = ""


class Stop(Record, frozen=True, tag=True):
    """Shut down cleanly."""


Job = RolloutJob | ScoreJob | ProbeJob | ServeJob | ToolsJob | InspectJob
Order = Job | Cancel | Resume | Stop


# Events: from a worker to the run.


class Ready(Record, frozen=True, tag=True):
    """The worker has loaded the repository.

    `problems` lists functions that could not be loaded while others could. `tool_sources` and `function_sources` map
    the repository's files that each side imported to the hash of their content; an `mcp.json` and the files in its
    commands count as imported. `rubric_files` maps rubric files likewise. `agent` is the name of the repository's own
    agent loop.
    """

    tools: list[Tool] = []
    functions: list[str] = []
    problems: list[Failure] = []
    tool_sources: dict[str, str] = {}
    function_sources: dict[str, str] = {}
    rubric_files: dict[str, str] = {}
    agent: str | None = None


class NotReady(Record, frozen=True, tag=True):
    """The worker can't load the repository. `error` is the name of a StartError subclass."""

    error: str
    message: str


class Imported(Record, frozen=True, tag=True):
    """User code has imported more of the repository's files. `sources` maps all of them to hashes of their content."""

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

    `index` counts the turns from 0. `messages` is the conversation up to and including the stage's own messages.
    """

    job: str
    stage: Stage
    index: int
    messages: list[Message]
    turn: Turn | None = None
    calls: list[ToolCall] = []


class Called(Record, frozen=True, tag=True):
    """The result of a tool call by hand, which isn't part of the trajectory."""

    job: str
    text: str
    error: str | None
    duration_ms: float


class Reworded(Record, frozen=True, tag=True):
    """The user changed the conversation before a request."""

    job: str
    messages: list[Message]


class Acting(Record, frozen=True, tag=True):
    """From now on, code of the repository's agent loop runs. `taken` is a sign of life: its server has just taken the
    rollout.
    """

    job: str
    taken: bool = False


class Asked(Record, frozen=True, tag=True):
    """The agent loop has sent a request: the first `kept` messages of the conversation, followed by `messages`.

    `calls` are the tool calls that have their results in `messages`.
    """

    job: str
    kept: int = 0
    messages: list[Message] = []
    calls: list[ToolCall] = []


class Replied(Record, frozen=True, tag=True):
    """The trainer has replied."""

    job: str
    reply: TrainerReply


class RolloutDone(Record, frozen=True, tag=True):
    """The rollout ended. Earlier events carried its trajectory; `messages`, if the agent loop set it, replaces that."""

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
    """The tools for a request; `error` says why the loop failed to list them."""

    job: str
    tools: list[Tool] = []
    error: str | None = None


class LoopFinding(Record, frozen=True):
    """A finding about an agent loop. `subject` is the tool or attribute concerned."""

    code: str
    message: str
    subject: str | None = None
    warning: bool = False


class Inspected(Record, frozen=True, tag=True):
    """The result of an agent loop's validation."""

    job: str
    name: str | None
    tools: list[Tool] = []
    findings: list[LoopFinding] = []


class ScoringStarted(Record, frozen=True, tag=True):
    """From now on, user code of this function runs."""

    job: str
    function: str


class ScoresDone(Record, frozen=True, tag=True):
    """The scores of each rollout of a ScoreJob, in the order of its functions; `error` if an input is damaged."""

    job: str
    scores: list[list[Score]] = []
    error: str | None = None


class Probed(Record, frozen=True, tag=True):
    """The result of a probe; `error` says why the model can't be used."""

    job: str
    error: str | None = None


class Retiring(Record, frozen=True, tag=True):
    """The worker has a blocked thread that it can't end; it should get no more jobs."""

    reason: str


class Dying(Record, frozen=True, tag=True):
    """The worker ends, because an exception in user code escaped the event loop."""

    reason: str


class Stuck(Record, frozen=True, tag=True):
    """The worker ends, because `job` blocked its event loop past the job's deadline."""

    job: str | None
    seconds: float


class Beat(Record, frozen=True, tag=True):
    """A sign of life from the worker's watchdog thread."""


Progress = TurnDone | SampleDone | CallDone | ScoringStarted | Paused | Called | Reworded | Acting | Asked | Replied
Done = RolloutDone | ScoresDone | Probed | ServeDone | ToolsDone | Inspected
Event = Ready | NotReady | Imported | Progress | Done | Retiring | Dying | Stuck | Beat

DONE: dict[type[Job], type[Done]] = {
    RolloutJob: RolloutDone,
    ScoreJob: ScoresDone,
    ProbeJob: Probed,
    ServeJob: ServeDone,
    ToolsJob: ToolsDone,
    InspectJob: Inspected,
}
"""The last event of each kind of job."""

encode = msgspec.json.Encoder().encode
decode_boot = msgspec.json.Decoder(Boot).decode
decode_order = msgspec.json.Decoder(Order).decode
decode_event = msgspec.json.Decoder(Event).decode


# From a process that forks others to the run.


class Forked(Record, frozen=True, tag=True):
    """The process has forked a child; `error` is the number of the system's error if it could not."""

    pid: int
    error: int | None = None


class Exited(Record, frozen=True, tag=True):
    """A child has ended. `code` is its exit code, or the negative number of the signal that killed it."""

    pid: int
    code: int


ForkReport = Forked | Exited

decode_report = msgspec.json.Decoder(ForkReport).decode


HEADER = struct.Struct(">I")
FREEZE_GRACE_SECONDS = 5.0
"""How long after its time limit user code may hold up its process before that is ended."""
MAX_FRAME = 512 * 1024 * 1024
"""Maximum size of a record from a worker, in bytes: several times the largest reply of a model."""


def pack(record: Record) -> bytes:
    """Encode a record as a frame."""
    body = encode(record)
    return HEADER.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> bytes:
    """Read the next frame's encoded record; raise IncompleteReadError at EOF, ValueError if it is too large."""
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if size > limit:
        raise ValueError(f"a record of {size >> 20:,} MiB")
    return await reader.readexactly(size)


def receive_frame(sock: socket.socket, head: bytes = b"") -> bytes:
    """Read the next frame's encoded record from a blocking socket; raise EOFError at EOF.

    `head` is what has been read of the frame already.
    """
    (size,) = HEADER.unpack(head + _exactly(sock, HEADER.size - len(head)))
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    # `recv` may return less than asked for.
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
