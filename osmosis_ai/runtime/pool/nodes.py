"""A pool over the nodes of a cluster: it assigns jobs to nodes and takes their reports, whatever engine reaches them.

Each node hosts its own pool (`node.NodeHost`), which isolates user code and attributes lost workers to a job. This pool
deals only with lost nodes, which no job is to blame for: their jobs go back to the queue. A job whose nodes were lost
several times runs alone on a node; if that node is lost too, the job fails.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from osmosis_ai.code_hashes import file_hash
from osmosis_ai.errors import ModelStartError, OsmosisError, StartError, StoreError, start_error
from osmosis_ai.git_ignore import ignored_files
from osmosis_ai.records import Failure, JsonObject, Rollout, Score
from osmosis_ai.runtime.pool.base import InFlight, PoolOptions
from osmosis_ai.runtime.pool.group import HaltError
from osmosis_ai.runtime.pool.node import Ended, NodeBoot, Opened, Orders, Report, Versions, portable, this_version
from osmosis_ai.runtime.pool.trajectory import TrajectoryBuilder
from osmosis_ai.runtime.protocol import (
    Cancel,
    Inspected,
    ProbeJob,
    Progress,
    Ready,
    Resume,
    RolloutJob,
    ScoreJob,
    ToolsDone,
    WorkerSpec,
    detach,
)
from osmosis_ai.tasks import task_group
from osmosis_ai.text import counted

__all__ = ["Cluster", "ClusterLostError", "Node", "NodeLostError", "NodesPool", "open_nodes"]

SILENCE_SECONDS = 15.0
"""A node that hasn't reported for this long counts as lost, even if its connection is still open."""
EMPTY_SECONDS = 60.0
"""How long a run without a node waits for one to join, not counting the time in which one loads the repository."""
WATCH_SECONDS = 0.5
MAX_LOSSES = 3
"""A job whose nodes were lost this many times runs alone."""
BRAKE_SECONDS = 2.0
"""The least time between two brakes: rollouts in flight at the first one still report the same overload."""
JOBS_AT_ONCE = 50
MAX_IGNORED = 100_000
"""Ignored files among which the cause of a node's error is looked for."""


class NodeLostError(OsmosisError):
    """A node can no longer be reached. The message says why."""


class ClusterLostError(OsmosisError):
    """No node can be reached, and none can join, any longer. The message says why."""


class Node(Protocol):
    """A connection to one node, which hosts an empty `node.NodeHost`. The methods raise NodeLostError."""

    name: str

    async def versions(self) -> Versions:
        """Return the versions on the node."""
        ...

    async def open(self, boot: bytes) -> bytes:
        """Load the repository with an encoded NodeBoot; return an encoded Opened."""
        ...

    async def submit(self, orders: bytes) -> None:
        """Hand over encoded Orders."""

    async def collect(self) -> bytes:
        """Return the next encoded Report."""
        ...

    def kill(self) -> None:
        """End everything that runs on the node for this pool, if it can be reached."""


class Cluster(Protocol):
    """The machines that an engine can reach."""

    async def next(self) -> Node:
        """Wait for the next node to use, now or once it joins; raise ClusterLostError once none can."""
        ...


class _Job:
    """A job, its result, and the nodes that were lost while they had it."""

    def __init__(self, order: RolloutJob | ScoreJob | ProbeJob) -> None:
        self.order = order
        self.done: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.is_rollout = isinstance(order, RolloutJob)
        self.nodes: list[str] = []

    @property
    def suspect(self) -> bool:
        return len(self.nodes) >= MAX_LOSSES

    def end(self, error: str, kind: str = "") -> None:
        """Fail the job here, without a record from a node."""
        if not self.done.done():
            self.done.set_result(Ended(self.order.id, error=error, kind=kind))


class _Member:
    """A node in use, with its jobs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.jobs: dict[str, _Job] = {}
        self.orders: list[_Job] = []
        self.cancel: list[Cancel] = []
        self.rollouts = 0
        self.share = 1
        self.told_share = 0
        self.running = 0
        self.alone = False
        self.give_back = self.asked_back = 0
        self.news = asyncio.Event()
        self.heard = monotonic()
        self.in_flight: list[InFlight] = []
        self.spent_usd = 0.0

    def take(self, job: _Job) -> None:
        self.jobs[job.order.id] = job
        self.rollouts += job.is_rollout
        self.running = max(self.running, min(self.share, self.rollouts))
        self.orders.append(job)
        self.news.set()

    def give_up(self, id: str) -> _Job | None:
        job = self.jobs.pop(id, None)
        if job is not None:
            self.rollouts -= job.is_rollout
            if job in self.orders:
                self.orders.remove(job)
            self.alone = self.alone and bool(self.jobs)
        return job


@asynccontextmanager
async def open_nodes(cluster: Cluster, spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[NodesPool]:
    """Load the repository on a cluster's nodes and yield them as a pool, once one has loaded it; raise StartError."""
    named, _ = detach(spec)
    named = msgspec.structs.replace(named, cache=None, cassette=None, debug_dir=None)
    outside = [path for path in _paths(named) if path.startswith("..")]
    if outside:
        raise StartError(
            f"--cluster sends the repository {spec.root} to the nodes, and {outside[0]} is outside of it; move it there"
        )
    async with task_group() as group:
        pool = NodesPool(cluster, spec, NodeBoot(named, _for_nodes(options)), options, group)
        try:
            await pool.opened()
            yield pool
        finally:
            pool.kill()
            group.cancel_scope.cancel()


def _paths(spec: WorkerSpec) -> Iterable[str]:
    if spec.mcp is not None and spec.mcp.path is not None:
        yield spec.mcp.path
    if spec.agent is not None:
        yield spec.agent.root
    if spec.workflow is not None:
        yield spec.workflow.folder
    yield from (ref.root for ref in spec.functions)


def _for_nodes(options: PoolOptions) -> PoolOptions:
    return msgspec.structs.replace(options, environ=portable(options.environ), log=None)


class NodesPool:
    """A `Pool` whose workers are on nodes. Made by `open_nodes`."""

    def __init__(
        self, cluster: Cluster, spec: WorkerSpec, boot: NodeBoot, options: PoolOptions, group: TaskGroup
    ) -> None:
        self.loaded = Ready()
        self.mixed = False
        self.ahead = spec.batch_size
        self._cluster = cluster
        self._spec = spec
        self._boot = boot
        self._log = None if options.log is None else Path(options.log)
        self._group = group
        self._members: list[_Member] = []
        self._rollouts: deque[_Job] = deque()
        self._others: deque[_Job] = deque()
        self._suspects: list[_Job] = []
        self._jobs: dict[str, _Job] = {}
        self._limit = float(spec.batch_size)
        self._braked = 0.0
        self._spent_before = 0.0
        self._shortages: dict[str, str] = {}
        self._told: list[str] = []
        self._refused: set[str] = set()
        self._settled = asyncio.Event()
        self._start_error: StartError | None = None
        self._loading = 0
        self._closing = False
        self._halted: str | None = None
        group.start_soon(self._gather)
        group.start_soon(self._watch)

    async def opened(self) -> None:
        """Wait until a node has loaded the repository; raise StartError if it can't be loaded, or none joins."""
        await self._settled.wait()
        if self._start_error is not None:
            raise self._start_error

    # What the run asks for.

    @property
    def shortage(self) -> str | None:
        return next((f"{name}: {what}" for name, what in self._shortages.items()), None)

    @property
    def spent_usd(self) -> float:
        return self._spent_before + sum(member.spent_usd for member in self._members)

    @property
    def changed(self) -> list[str]:
        sources = {**self.loaded.tool_sources, **self.loaded.function_sources}
        return sorted(path for path, known in sources.items() if file_hash(Path(self._spec.root, path)) != known)

    @property
    def where(self) -> str:
        """The nodes in use, in words."""
        return counted(len(self._members), "node")

    def news(self) -> list[str]:
        """Return messages about nodes that were refused or lost since the last call."""
        told, self._told = self._told, []
        return told

    async def probe(self, policy: str, *, price: bool) -> None:
        ended = await self._run(ProbeJob(f"probe-{policy}", policy, price))
        if ended.error is not None:
            raise ModelStartError(ended.error)

    async def rollout(self, job: RolloutJob, listen: Callable[[Progress], None] | None = None) -> Rollout:
        """Run one rollout. `listen` is never called, because nodes don't send the events of turns."""
        ended = await self._run(job)
        if ended.rollout is not None:
            return ended.rollout
        return TrajectoryBuilder(job).abandon(Failure("worker", ended.error or "no record", kind="died"))

    async def score(self, job: ScoreJob) -> list[list[Score]]:
        ended = await self._run(job)
        if ended.kind == "store":
            raise StoreError(ended.error or "")
        if ended.error is not None:
            failure = Failure("worker", ended.error, kind="died")
            return [[Score(name, failure=failure) for name in job.functions] for _ in job.inputs]
        return ended.scores

    def in_flight(self) -> list[InFlight]:
        now = monotonic()
        found = [
            msgspec.structs.replace(one, seconds=one.seconds + now - member.heard, node=member.node.name)
            for member in self._members
            for one in member.in_flight
        ]
        return sorted(found, key=lambda one: -one.seconds)

    def oldest(self) -> InFlight | None:
        return next(iter(self.in_flight()), None)

    def kill(self) -> None:
        self._closing = True
        for member in self._members:
            member.node.kill()

    def resume(self, order: Resume) -> None:
        raise NotImplementedError("stepping is for workers of this machine")

    async def serve(self, request: JsonObject) -> JsonObject:
        raise NotImplementedError("serving is for workers of this machine")

    async def tools(self, request: JsonObject) -> ToolsDone:
        raise NotImplementedError("serving is for workers of this machine")

    async def inspect(self) -> Inspected:
        raise NotImplementedError("validation is for workers of this machine")

    # Jobs

    async def _run(self, order: RolloutJob | ScoreJob | ProbeJob) -> Ended:
        job = self._jobs[order.id] = _Job(order)
        if self._halted is None:
            (self._rollouts if job.is_rollout else self._others).append(job)
            self._assign()
        else:
            job.end(self._halted, "halt")
        try:
            ended = await job.done
        except asyncio.CancelledError:
            self._cancel(job)
            raise
        finally:
            del self._jobs[order.id]
        if ended.kind == "halt":
            raise HaltError(ended.error or "", f"{ended.error}")
        return ended

    def _cancel(self, job: _Job) -> None:
        for queue in (self._rollouts, self._others, self._suspects):
            if job in queue:
                queue.remove(job)
        for member in self._members:
            if member.give_up(job.order.id) is not None:
                member.cancel.append(Cancel(job.order.id))
                member.news.set()

    def _assign(self) -> None:
        """Give waiting jobs to the nodes with the most room; a suspect gets a node to itself."""
        self._set_shares()
        for job in list(self._suspects):
            idle = next((member for member in self._members if not member.jobs), None)
            if idle is not None:
                self._suspects.remove(job)
                idle.alone = True
                idle.take(job)
        open_ = [member for member in self._members if not member.alone]
        if self._suspects:
            # Keep one node from new jobs, so that it becomes idle for the next suspect.
            open_ = open_[1:] or open_
        while self._others and open_:
            min(open_, key=lambda member: len(member.jobs)).take(self._others.popleft())
        while self._rollouts and open_:
            least = min(open_, key=lambda member: member.rollouts - 2 * member.share)
            # A node queues as many rollouts as it runs, so that it doesn't idle until the head sends the next.
            if least.rollouts >= 2 * least.share:
                break
            least.take(self._rollouts.popleft())
        self._even_out(open_)

    def _even_out(self, members: Sequence[_Member]) -> None:
        """Have nodes return rollouts that wait there while another node has room, because it joined late or is fast."""
        room = sum(max(0, member.share - member.rollouts) for member in members)
        for member in members:
            back = min(room - len(self._rollouts), member.rollouts - member.share - member.asked_back)
            if back > 0:
                room -= back
                member.give_back += back
                member.asked_back += back
                member.news.set()

    def _set_shares(self) -> None:
        """Divide what may run at a time among the nodes.

        A node whose share has shrunk still runs what it had begun, and others get so much less until that has ended.
        """
        total = max(int(self._limit), len(self._members))
        for number, member in enumerate(self._members):
            member.share = total // len(self._members) + (number < total % len(self._members))
            member.running = min(member.running, member.rollouts)
        beyond = sum(max(0, member.running - member.share) for member in self._members)
        for member in self._members:
            less = max(0, min(beyond, member.share - max(1, member.running)))
            member.share -= less
            beyond -= less
            member.running = max(member.running, min(member.share, member.rollouts))
            if member.share != member.told_share:
                member.news.set()

    def _brake(self, rollout: Rollout) -> None:
        """Halve the number of rollouts at a time if a model call needed retries; otherwise raise it again slowly."""
        if any(turn.attempts > 1 for turn in rollout.turns):
            if monotonic() - self._braked > BRAKE_SECONDS:
                self._braked = monotonic()
                self._limit = max(1.0, self._limit / 2)
        else:
            self._limit = min(float(self._spec.batch_size), self._limit + 1 / max(self._limit, 1.0))

    # Nodes

    async def _gather(self) -> None:
        """Start using every node that the cluster has or that joins it."""
        try:
            while True:
                node = await self._cluster.next()
                self._loading += 1
                self._group.start_soon(self._use, node)
        except ClusterLostError as error:
            if not self._settled.is_set():
                self._fail(StartError(f"the cluster was lost: {error}"))
            self._halt(f"the cluster was lost ({error}); use --resume to continue")

    async def _use(self, node: Node) -> None:
        """Load the repository on a node, then exchange jobs and reports with it until it is lost."""
        try:
            try:
                theirs, ours = await node.versions(), this_version()
                if theirs != ours:
                    raise StartError(_mismatch(theirs, ours))
                opened = msgspec.json.decode(await node.open(msgspec.json.encode(self._boot)), type=Opened)
                if opened.refused is not None:
                    message = opened.refused.message + _not_sent(Path(self._spec.root), opened.refused.message)
                    raise start_error(opened.refused.error, message)
                assert opened.ready is not None
                self._check_code(opened.ready)
            finally:
                self._loading -= 1
        except (StartError, NodeLostError) as error:
            node.kill()
            refused = f"node {node.name} isn't used: {error}"
            if isinstance(error, StartError) and not self._settled.is_set():
                self._fail(start_error(type(error).__name__, refused))
            # It is tried again, and what never changes is said once.
            if refused not in self._refused:
                self._refused.add(refused)
                self._told.append(refused)
            return
        member = _Member(node)
        self._members.append(member)
        self._settled.set()
        self._assign()
        why = ""
        try:
            async with task_group() as group:
                group.start_soon(self._send, member)
                try:
                    while True:
                        with anyio.fail_after(SILENCE_SECONDS):
                            data = await node.collect()
                        self._take(member, msgspec.json.decode(data, type=Report))
                except TimeoutError:
                    why = f"it has been silent for {SILENCE_SECONDS:.0f} s"
                except NodeLostError as error:
                    why = str(error)
                finally:
                    group.cancel_scope.cancel()
        finally:
            self._lose(member, why)

    def _check_code(self, ready: Ready) -> None:
        """Raise StartError if a node's code differs from this machine's; keep what the first node has loaded."""
        sources = {**ready.tool_sources, **ready.function_sources, **ready.rubric_files}
        differing = sorted(path for path, code in sources.items() if file_hash(Path(self._spec.root, path)) != code)
        if differing:
            raise StartError(
                f"it has loaded other code than this machine's: {', '.join(differing)}; run again, and save no file "
                "while nodes load it"
            )
        if not self._settled.is_set():
            self.loaded = ready

    async def _send(self, member: _Member) -> None:
        try:
            while True:
                await member.news.wait()
                member.news.clear()
                while member.orders or member.cancel or member.give_back or member.share != member.told_share:
                    jobs, member.orders = member.orders[:JOBS_AT_ONCE], member.orders[JOBS_AT_ONCE:]
                    cancel, member.cancel = member.cancel, []
                    member.told_share = member.share
                    back, member.give_back = member.give_back, 0
                    orders = Orders(member.share, [job.order for job in jobs], cancel, back)
                    await member.node.submit(msgspec.json.encode(orders))
        except NodeLostError:
            # Its reports end too, and say why.
            return

    def _take(self, member: _Member, report: Report) -> None:
        member.heard = monotonic()
        member.in_flight = report.in_flight
        member.spent_usd = report.spent_usd
        self.mixed |= report.mixed
        if report.loaded is not None:
            self.loaded = msgspec.structs.replace(
                self.loaded,
                tool_sources=report.loaded.tool_sources | self.loaded.tool_sources,
                function_sources=report.loaded.function_sources | self.loaded.function_sources,
            )
        if report.shortage is not None:
            self._shortages[member.node.name] = report.shortage
        if report.log and self._log is not None:
            # A log without its folder or space on its disk must not fail the code that prints.
            with suppress(OSError), self._log.open("ab") as file:
                file.write(report.log)
        member.asked_back = 0
        for ended in report.ended:
            job = member.give_up(ended.job)
            if job is None or job.done.done():
                continue
            if ended.kind == "returned":
                self._rollouts.appendleft(job)
                continue
            if ended.rollout is not None:
                self._brake(ended.rollout)
                member.running = max(member.share, member.running - 1)
            job.done.set_result(ended)
        self._assign()

    def _lose(self, member: _Member, why: str) -> None:
        """Give a lost node's jobs to others. What the node has spent still counts."""
        self._members.remove(member)
        self._spent_before += member.spent_usd
        member.node.kill()
        if self._closing:
            return
        self._told.append(
            f"node {member.node.name} was lost ({why}); {counted(len(member.jobs), 'job')} of it run again elsewhere"
        )
        for job in reversed(member.jobs.values()):
            if job.done.done():
                continue
            was_suspect = job.suspect
            job.nodes.append(member.node.name)
            if was_suspect:
                job.end(f"every node that ran it was lost: {', '.join(dict.fromkeys(job.nodes))}")
            elif job.suspect:
                self._suspects.append(job)
            else:
                (self._rollouts if job.is_rollout else self._others).appendleft(job)
        self._assign()

    async def _watch(self) -> None:
        """Stop the run once it has had no node for too long."""
        waited = 0.0
        while True:
            await anyio.sleep(WATCH_SECONDS)
            if self._members:
                waited = 0.0
            elif not self._loading:
                # A node that is lost while it loads may have taken minutes for that.
                waited += WATCH_SECONDS
            if waited < EMPTY_SECONDS:
                continue
            if not self._settled.is_set():
                none = f"no node with a CPU has joined the cluster for {EMPTY_SECONDS:.0f} s"
                self._fail(StartError("\n".join([none, *self._told])))
                return
            self._halt(f"every node was lost, and none has joined for {EMPTY_SECONDS:.0f} s; use --resume to continue")
            return

    def _halt(self, why: str) -> None:
        """End every job, waiting or sent; nothing runs from here on."""
        self._halted = why
        for job in list(self._jobs.values()):
            job.end(why, "halt")
        for queue in (self._rollouts, self._others, self._suspects):
            queue.clear()

    def _fail(self, error: StartError) -> None:
        self._start_error = self._start_error or error
        self._settled.set()


def _mismatch(theirs: Versions, ours: Versions) -> str:
    for what, here, there in (
        ("osmosis-ai", ours.osmosis, theirs.osmosis),
        ("Python", ours.python, theirs.python),
        ("the source of osmosis-ai", ours.source[:12], theirs.source[:12]),
    ):
        if here != there:
            return f"it has another version of {what}: {there}, and this machine has {here}; install the same"
    raise AssertionError


def _not_sent(root: Path, message: str) -> str:
    """Return a line about the ignored files that a node's error names; an empty text if it names none."""
    for path in map(PurePosixPath, islice(ignored_files(root), MAX_IGNORED)):
        names = [rf"\b{re.escape(path.name)}\b"]
        if path.suffix == ".py":
            module = path.parent.name if path.stem == "__init__" else path.stem
            names.append(rf"\b{re.escape(module)}'")
        if re.search("|".join(names), message):
            return f"\nNodes don't have {path}, because .gitignore names it, and what git ignores isn't sent to them."
    return ""
