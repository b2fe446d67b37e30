"""The pool over nodes: jobs in batches, lost nodes, brakes, and an engine that is added to the registry."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

import osmosis_ai
from commands import run_osmosis
from loopback import LoopbackCluster, LoopbackNode, hosting, open_loopback
from osmosis_ai import Report, RunConfig
from osmosis_ai.errors import ModelStartError, RepositoryError, StartError, UsageError
from osmosis_ai.records import Failure, ModelSpec, Rollout, Row, StoredInput
from osmosis_ai.runtime.pool import nodes
from osmosis_ai.runtime.pool.backends import BACKENDS
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.pool.group import HaltError
from osmosis_ai.runtime.pool.node import Opened, portable, this_version
from osmosis_ai.runtime.pool.nodes import NodeLostError, NodesPool, open_nodes
from osmosis_ai.runtime.protocol import LimitsConfig, NotReady, RolloutJob, ScoreJob, WorkerSpec
from osmosis_ai.runtime.run import events
from osmosis_ai.runtime.run.prepare import prepare
from osmosis_ai.testing import FakePool, Gate, Reply, Request, ScriptedEndpoint, status, text
from repos import write_repo
from waiting import eventually

pytestmark = pytest.mark.anyio

ROWS = [
    {
        "system_prompt": "Use the tools.",
        "user_prompt": f"What is {number} + 1?",
        "ground_truth": str(number + 1),
        "solution": [{"tool": "add", "arguments": {"a": number, "b": 1}}, "{{result[0]}}"],
    }
    for number in range(12)
]
EXACT = ["reward_fn.rewards:exact"]
Answer = Callable[[RolloutJob], Awaitable[str | Failure]]


class Stage:
    """A cluster with its pool, and gates at which rollouts wait."""

    def __init__(self, group: anyio.abc.TaskGroup, cluster: LoopbackCluster) -> None:
        self.pool: NodesPool
        self.cluster = cluster
        self.nodes: dict[str, LoopbackNode] = {}
        self.fakes: dict[str, FakePool] = {}
        self._group = group

    def node(self, name: str, reply: Answer | None = None, **fake: object) -> LoopbackNode:
        pool = FakePool(**({"reply": reply} if reply else {}), **fake)  # type: ignore[arg-type]
        self.fakes[name] = pool
        self.nodes[name] = LoopbackNode(name, self._group, hosting(pool))
        self.cluster.join(self.nodes[name])
        return self.nodes[name]

    def join_old(self, name: str) -> None:
        """Have a node of another version join."""
        old = msgspec.structs.replace(this_version(), osmosis="0.3")
        self.cluster.join(LoopbackNode(name, self._group, hosting(FakePool()), old))

    def lost(self) -> list[str]:
        return [news for news in self.pool.news() if "was lost" in news]


@asynccontextmanager
async def stage(
    root: Path, *replies: Answer | None, batch_size: int = 8, options: PoolOptions | None = None, **fake: object
) -> AsyncIterator[Stage]:
    spec = WorkerSpec(
        str(root),
        LimitsConfig(),
        policies={"policy": ModelSpec("offline/oracle", "offline", "offline/oracle")},
        batch_size=batch_size,
    )
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            here = Stage(group, LoopbackCluster())
            for number, reply in enumerate(replies):
                here.node(f"node-{number}", reply, **fake)
            async with open_nodes(here.cluster, spec, options or PoolOptions()) as here.pool:
                await until(lambda: here.pool.where == f"{len(replies)} node{'s' * (len(replies) != 1)}")
                yield here
            group.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - conditions of many objects
        await anyio.sleep(0.001)


def job(number: int) -> RolloutJob:
    return RolloutJob(f"job-{number}", Row(number, f"{number:x}", "s", "u", f"answer {number}"), 0, "policy")


async def run_all(pool: NodesPool, count: int) -> list[Rollout]:
    return list(await asyncio.gather(*(pool.rollout(job(number)) for number in range(count))))


async def never(job: RolloutJob) -> str:
    await anyio.sleep_forever()
    raise AssertionError


async def test_jobs_are_shared_out_and_records_come_back_in_batches(tmp_path: Path) -> None:
    async with stage(tmp_path, None, None, batch_size=50, cost_usd=0.5) as here:
        rollouts = await run_all(here.pool, 400)
        assert [one.messages[-1]["content"] for one in rollouts] == [f"answer {number}" for number in range(400)]
        counts = [len(fake.rollouts) for fake in here.fakes.values()]
        assert sum(counts) == 400
        assert min(counts) > 100
        # Far fewer reports than records.
        assert sum(node.collected for node in here.nodes.values()) < 100
        assert here.pool.spent_usd == 200.0


async def test_no_more_run_at_a_time_than_the_batch_size(tmp_path: Path) -> None:
    running, most = 0, 0

    async def reply(job: RolloutJob) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0.002)
        running -= 1
        return "done"

    async with stage(tmp_path, reply, reply, reply, batch_size=5) as here:
        await run_all(here.pool, 60)
    assert 3 <= most <= 5


async def test_a_lost_node_s_jobs_run_elsewhere_and_have_one_record_each(tmp_path: Path) -> None:
    async with stage(tmp_path, never, None) as here:
        async with anyio.create_task_group() as group:
            rollouts: list[Rollout] = []

            async def run() -> None:
                rollouts.extend(await run_all(here.pool, 20))

            group.start_soon(run)
            await until(lambda: len(here.fakes["node-0"].rollouts) > 0)
            here.nodes["node-0"].lose()
        assert sorted(one.row_index for one in rollouts) == list(range(20))
        assert all(one.failure is None for one in rollouts)
        (news,) = here.lost()
        assert news.startswith("node node-0 was lost (it was unplugged); ")
        assert news.endswith(" run again elsewhere")


async def test_a_silent_node_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SILENCE_SECONDS", 1.5)
    async with stage(tmp_path, never, None) as here:
        here.nodes["node-0"].silent = True
        assert len(await run_all(here.pool, 6)) == 6
        assert "it has been silent for 2 s" in here.lost()[0]


async def test_a_job_that_loses_three_nodes_runs_alone_and_fails_with_the_fourth(tmp_path: Path) -> None:
    """Other jobs on the same nodes are not to blame."""
    alone: list[bool] = []

    def kills(name: str) -> Answer:
        async def reply(job: RolloutJob) -> str:
            fake = here.fakes[name]
            if job.row.index == 0:
                alone.append(len(fake.in_flight()) == 1)
                here.nodes[name].lose()
                await anyio.sleep_forever()
            await anyio.sleep(0.001)
            return "done"

        return reply

    async with stage(tmp_path, None) as here:
        here.nodes["node-0"].lose()
        await until(lambda: here.pool.where == "0 nodes")
        for number in range(1, 6):
            here.node(f"node-{number}", kills(f"node-{number}"))
        rollouts = await run_all(here.pool, 12)
        killer, *others = rollouts
        assert [one.failure for one in others] == [None] * 11
        assert killer.failure is not None
        assert killer.failure.origin == "worker"
        assert killer.failure.message.startswith("every node that ran it was lost: node-")
        assert len(alone) == 4
        assert alone[-1]


async def test_a_node_that_joins_late_takes_jobs(tmp_path: Path) -> None:
    async with stage(tmp_path, never) as here:
        async with anyio.create_task_group() as group:
            group.start_soon(run_all, here.pool, 12)
            await until(lambda: len(here.fakes["node-0"].rollouts) == 8)
            here.node("late")
            # Those that wait on the first node, which holds the others.
            await until(lambda: len(here.fakes["late"].rollouts) == 4)
            here.nodes["node-0"].lose()
        assert len(here.fakes["late"].rollouts) == 12


async def test_a_node_that_joins_late_waits_for_what_runs_elsewhere(tmp_path: Path) -> None:
    """Else more would run than the batch size allows: it may have one beyond that."""
    let_go = asyncio.Event()

    async def held(job: RolloutJob) -> str:
        await let_go.wait()
        return "done"

    async with stage(tmp_path, held) as here, anyio.create_task_group() as group:
        group.start_soon(run_all, here.pool, 40)
        await until(lambda: len(here.fakes["node-0"].rollouts) == 8)
        here.node("late", held)
        await until(lambda: len(here.fakes["late"].rollouts) == 1)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert len(here.fakes["late"].in_flight()) == 1
        let_go.set()
        await until(lambda: [member.share for member in here.pool._members] == [4, 4])


async def test_a_slow_store_holds_the_nodes_back(tmp_path: Path) -> None:
    """A run has so many slots, each of which waits until its record is durable."""
    stored = asyncio.Event()

    async with stage(tmp_path, None, None) as here, anyio.create_task_group() as group:
        jobs = iter([job(number) for number in range(200)])

        async def slot() -> None:
            for next_job in jobs:
                await here.pool.rollout(next_job)
                await stored.wait()

        for _ in range(8 + here.pool.ahead):
            group.start_soon(slot)
        started = lambda: sum(len(fake.rollouts) for fake in here.fakes.values())  # noqa: E731
        await until(lambda: started() == 16)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert started() == 16
        stored.set()


async def test_without_any_node_the_run_stops_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "EMPTY_SECONDS", 0.5)
    async with stage(tmp_path, never) as here:
        here.nodes["node-0"].lose()
        with pytest.raises(HaltError, match="every node was lost") as caught:
            await here.pool.rollout(job(1))
        assert "--resume" in caught.value.notice


async def test_a_node_that_is_lost_after_a_long_start_leaves_time_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a node's network has vanished and its cluster notices that minutes later."""
    monkeypatch.setattr(nodes, "EMPTY_SECONDS", 2.0)
    monkeypatch.setattr(nodes, "WATCH_SECONDS", 0.01)
    cluster = LoopbackCluster()

    class LostAtItsStart(LoopbackNode):
        async def open(self, boot: bytes) -> bytes:
            await anyio.sleep(2.2)
            group.start_soon(join_the_next)
            raise NodeLostError("its network vanished")

    async def join_the_next() -> None:
        await anyio.sleep(0.1)
        cluster.join(LoopbackNode("next", group, hosting(FakePool())))

    async with anyio.create_task_group() as group:
        cluster.join(LostAtItsStart("slow", group, hosting(FakePool())))
        async with open_nodes(cluster, WorkerSpec(str(tmp_path), LimitsConfig()), PoolOptions()) as pool:
            assert pool.where == "1 node"
            assert pool.news() == ["node slow isn't used: its network vanished"]
        group.cancel_scope.cancel()


async def test_without_its_head_the_run_stops_and_can_be_resumed(tmp_path: Path) -> None:
    """The nodes may still be there: Ray ends a process that has lost its cluster's head a minute later."""
    async with stage(tmp_path, never) as here:
        here.cluster.lose("its head hasn't answered for 30 s")
        for number in range(2):
            with pytest.raises(HaltError, match="the cluster was lost") as caught:
                await here.pool.rollout(job(number))
        assert caught.value.notice == (
            "the cluster was lost (its head hasn't answered for 30 s); use --resume to continue"
        )


async def test_what_lost_nodes_have_spent_counts_on(tmp_path: Path) -> None:
    async with stage(tmp_path, None, cost_usd=0.5) as here:
        for number in range(1, 4):
            await run_all(here.pool, 4)
            assert here.pool.spent_usd == 2.0 * number
            here.nodes[f"node-{number - 1}"].lose()
            await until(lambda: here.pool.where == "0 nodes")
            here.node(f"node-{number}", cost_usd=0.5)
            await until(lambda: here.pool.where == "1 node")


async def test_a_retried_model_call_halves_what_runs_everywhere(tmp_path: Path) -> None:
    turn = msgspec.structs.replace
    overloaded = True

    class Retrying(FakePool):
        async def rollout(self, job: RolloutJob, listen: object = None) -> Rollout:
            done = await super().rollout(job)
            return turn(done, turns=[turn(one, attempts=2 if overloaded else 1) for one in done.turns])

    async with stage(tmp_path, None, None, batch_size=16) as here:
        pool = here.pool
        for node in here.nodes.values():
            node._host._pool = Retrying()
        await run_all(pool, 1)
        shares = [member.share for member in pool._members]
        assert sum(shares) == 8
        overloaded = False
        await run_all(pool, 400)
        assert sum(member.share for member in pool._members) == 16


async def test_scores_probes_and_their_failures(tmp_path: Path) -> None:
    async with stage(tmp_path, None, None, refused="no key") as here:
        scores = await here.pool.score(ScoreJob("s", [StoredInput(3, b"", b""), StoredInput(4, b"", b"")], ["reward"]))
        assert [[score.value for score in one] for one in scores] == [[1.0], [1.0]]
        with pytest.raises(ModelStartError, match="no key"):
            await here.pool.probe("policy", price=False)


async def test_a_cancelled_rollout_ends_on_its_node(tmp_path: Path) -> None:
    async with stage(tmp_path, never) as here:
        async with anyio.create_task_group() as group:
            group.start_soon(here.pool.rollout, job(1))
            await until(lambda: len(here.fakes["node-0"].in_flight()) == 1)
            group.cancel_scope.cancel()
        await until(lambda: not here.fakes["node-0"].in_flight())


async def test_what_is_in_flight_names_its_node(tmp_path: Path) -> None:
    async with stage(tmp_path, never) as here, anyio.create_task_group() as group:
        group.start_soon(here.pool.rollout, job(1))
        await until(lambda: here.pool.oldest() is not None)
        oldest = here.pool.oldest()
        assert oldest is not None
        assert (oldest.row_index, oldest.node) == (1, "node-0")
        group.cancel_scope.cancel()


async def test_a_node_that_is_refused_again_and_again_is_reported_once(tmp_path: Path) -> None:
    async with stage(tmp_path, None) as here:
        for name in ("old", "old", "older", "old"):
            here.join_old(name)
        # Nodes are taken in the order in which they join.
        here.node("last")
        await until(lambda: here.pool.where == "2 nodes")
        refused = [news.partition(": it has another")[0] for news in here.pool.news() if "isn't used" in news]
        assert refused == ["node old isn't used", "node older isn't used"]


async def test_another_version_is_refused_with_what_differs(tmp_path: Path) -> None:
    spec = WorkerSpec(str(tmp_path), LimitsConfig())
    ours = this_version()
    for change, said in (
        ({"osmosis": "0.3"}, "another version of osmosis-ai: 0.3, and this machine has 0."),
        ({"python": "3.9"}, "another version of Python: 3.9"),
        ({"source": "abc"}, "another version of the source of osmosis-ai: abc"),
    ):
        async with anyio.create_task_group() as group:
            cluster = LoopbackCluster()
            versions = msgspec.structs.replace(ours, **change)
            cluster.join(LoopbackNode("old", group, hosting(FakePool()), versions))
            with pytest.raises(StartError, match=f"node old isn't used: it has {said}"):
                async with open_nodes(cluster, spec, PoolOptions()):
                    raise AssertionError
            group.cancel_scope.cancel()


class Refusing(LoopbackNode):
    """A node that can't load what it was sent."""

    message = ""

    async def open(self, boot: bytes) -> bytes:
        return msgspec.json.encode(Opened(refused=NotReady("RepositoryError", self.message)))


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("ModuleNotFoundError: No module named 'keys'", "mcp/keys.py"),
        ("ModuleNotFoundError: No module named 'vendor'", "mcp/vendor/__init__.py"),
        ("ImportError: cannot import name 'words' from 'tools'", "mcp/vendor/words.py"),
        ("FileNotFoundError: No such file or directory: '/place/mcp/table.json'", "mcp/table.json"),
        ("ModuleNotFoundError: No module named 'mcp'", ""),
        ("FileNotFoundError: No such file or directory: '/place/mcp/my_table.json'", ""),
        ("ModuleNotFoundError: No module named 'lib'", ""),
    ],
)
async def test_what_git_ignores_is_missing_on_nodes(tmp_path: Path, message: str, missing: str) -> None:
    for name in (
        "mcp/table.json",
        "mcp/vendor/words.py",
        "mcp/vendor/__init__.py",
        "mcp/main.py",
        "mcp/.venv/lib/lib.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if missing.endswith("keys.py"):
        (tmp_path / missing).touch()
    (tmp_path / ".gitignore").write_text("keys.py\nvendor/\n*.json\n.venv\n", encoding="utf-8")
    async with anyio.create_task_group() as group:
        cluster = LoopbackCluster()
        node = Refusing("one", group, hosting(FakePool()))
        node.message = message
        cluster.join(node)
        with pytest.raises(RepositoryError) as refused:
            async with open_nodes(cluster, WorkerSpec(str(tmp_path), LimitsConfig()), PoolOptions()):
                raise AssertionError
        group.cancel_scope.cancel()
    first, *hint = str(refused.value).splitlines()
    assert first == f"node one isn't used: {message}"
    why = ", because .gitignore names it, and what git ignores isn't sent to them."
    assert hint == ([f"Nodes don't have {missing}{why}"] if missing else [])


def test_variables_of_one_machine_stay_there() -> None:
    environ = {
        "PATH": "/bin",
        "HOME": "/me",
        "PYTHONPATH": "/x",
        "RAY_ADDRESS": "a",
        "OPENAI_API_KEY": "k",
        "MODE": "x",
    }
    assert portable(environ) == {"OPENAI_API_KEY": "k", "MODE": "x"}


def test_an_engine_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real workers on two nodes of an engine that only this test knows: the records are those of a local run."""
    monkeypatch.setitem(BACKENDS, "loopback", open_loopback)
    repo = write_repo(tmp_path / "repo", rows=ROWS)
    said: list[object] = []

    def run(**options: object) -> Report:
        config = RunConfig.of(model="offline/oracle", workers=1, batch_size=4, **options)
        return osmosis_ai.run(config, directory=repo, listener=said.append)

    local = run()
    spread = run(cluster="loopback://here", nodes=2, workers_per_node=1)
    assert spread.whole
    found = [
        [(one.row_index, one.finish_reason, [call.name for call in one.calls], one.reward) for one in report.outcomes()]
        for report in (local, spread)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 12
    with pytest.raises(StartError, match=r"--cluster dusk://x: write auto, local or ray://HOST:PORT"):
        run(cluster="dusk://x")


@contextmanager
def hosts_of(monkeypatch: pytest.MonkeyPatch, *pools: FakePool) -> Iterator[None]:
    """While it lasts, `--cluster fakes://here` has a node for each of these pools."""

    @asynccontextmanager
    async def open_fakes(spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[NodesPool]:
        async with anyio.create_task_group() as group:
            cluster = LoopbackCluster()
            cluster.join(*(LoopbackNode(f"node-{n}", group, hosting(pool)) for n, pool in enumerate(pools)))
            async with open_nodes(cluster, spec, options) as pool:
                await until(lambda: pool.where == f"{len(pools)} nodes")
                yield pool
            group.cancel_scope.cancel()

    with monkeypatch.context() as patch:
        patch.setitem(BACKENDS, "fakes", open_fakes)
        yield


def test_a_budget_is_for_all_nodes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = write_repo(tmp_path / "repo", rows=ROWS * 5)
    fakes = [FakePool(functions=EXACT, cost_usd=0.25) for _ in range(2)]
    with hosts_of(monkeypatch, *fakes):
        config = RunConfig.of(model="offline/oracle", batch_size=4, cluster="fakes://here", max_cost=5.0)
        said: list[object] = []
        report = osmosis_ai.run(config, directory=repo, listener=said.append)
    assert [event.message for event in said if isinstance(event, events.LimitReached)] == [
        "stopped: the budget of $5 (--max-cost) is spent"
    ]
    # Neither node alone has spent it, and only what had begun when it was spent goes beyond it.
    assert all(0 < fake.spent_usd < 5.0 for fake in fakes)
    assert 5.0 <= sum(fake.spent_usd for fake in fakes) <= 5.0 + 2 * 4 * 0.25
    assert report.cost_usd == sum(fake.spent_usd for fake in fakes)


def test_a_slow_store_holds_a_cluster_s_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes to the store again and again. Nodes never run more ahead than a run has slots."""
    repo = write_repo(tmp_path / "repo", rows=ROWS * 100)
    fakes = [FakePool(functions=EXACT) for _ in range(2)]
    ahead: list[int] = []
    ended = threading.Event()

    def hold_up() -> None:
        file = repo / ".osmosis" / "runs.db"
        eventually(lambda: any(fake.rollouts for fake in fakes))
        connection = sqlite3.connect(file, timeout=30, isolation_level=None)

        def stored() -> int:
            return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])

        while not ended.is_set():
            connection.execute("BEGIN IMMEDIATE")
            before = stored()
            # As long as a slow disk takes.
            ended.wait(0.05)
            ahead.append(sum(len(fake.rollouts) for fake in fakes) - before)
            connection.execute("ROLLBACK")
            while stored() == before and not ended.wait(0.001):
                pass
        connection.close()

    with hosts_of(monkeypatch, *fakes), ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold_up)
        config = RunConfig.of(model="offline/oracle", batch_size=8, cluster="fakes://here")
        report = osmosis_ai.run(config, directory=repo)
        ended.set()
        holding.result()
    assert report.whole
    assert sum(len(fake.rollouts) for fake in fakes) == 1200
    assert len(ahead) > 1
    assert max(ahead) == 2 * 8


class Overloaded:
    """Refuses one of 16 requests once and holds the others; then counts how many the next wave has at a time."""

    def __init__(self) -> None:
        self.most = 0
        self._refused = ""
        self._wave = 0
        self._gates = [Gate(), Gate()]

    def __call__(self, request: Request) -> Reply:
        row = request.messages[1]["content"]
        if not self._refused:
            self._refused = row
            return status(429, headers={"Retry-After": "0"})
        if row == self._refused:
            return text("done")
        self._wave += 1
        if self._wave == 8 and len(self._gates) == 1:
            # A moment later, so that one too many would be seen.
            threading.Timer(0.3, self._count).start()
        return text("done").after(self._gates[0])

    def hear(self, event: object) -> None:
        """Let the first wave go once the run knows of the refusal."""
        if isinstance(event, events.RolloutDone) and len(self._gates) == 2:
            self._wave = 0
            self._gates.pop(0).open()

    def _count(self) -> None:
        self.most = self._wave
        self._gates[0].open()


def test_one_refusal_slows_all_nodes_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 at a time, 8 are left on two nodes, and slowly more: by the root of twice as many as have ended since."""
    monkeypatch.setitem(BACKENDS, "loopback", open_loopback)
    repo = write_repo(tmp_path / "repo", rows=[{**ROWS[0], "user_prompt": str(number)} for number in range(40)])
    model = Overloaded()
    with ScriptedEndpoint(model).run_in_thread() as endpoint:
        config = RunConfig.of(
            model="scripted", base_url=endpoint.url, batch_size=16, cluster="loopback://here", workers_per_node=1
        )
        report = osmosis_ai.run(config, directory=repo, listener=model.hear)
    assert report.whole
    assert 8 <= model.most <= 10


def test_rescoring_runs_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "loopback", open_loopback)
    repo = write_repo(tmp_path / "repo", rows=ROWS)
    place = ("--cluster", "loopback://here", "--nodes", "2", "--workers-per-node", "1")
    assert run_osmosis("test", "--model", "offline/oracle", cwd=repo).code == 0
    rewards = repo / "reward_fn" / "rewards.py"
    rewards.write_text(rewards.read_text("utf-8") + "\n# Other code.\n", "utf-8")
    done = run_osmosis("runs", "rescore", "latest", *place, "--json", cwd=repo)
    assert done.code == 0, done.stderr
    assert done.json["rescored"] == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cluster": "auto", "workers": 0}, "--cluster and --workers 0"),
        ({"cluster": "auto", "isolation": "sandbox"}, "--cluster and --isolation sandbox"),
        ({"cluster": "auto", "cache": True}, "--cluster and --cache"),
        ({"cluster": "auto", "replay": "recorded"}, "--cluster and --replay"),
        ({"nodes": 2}, "--nodes is for the nodes of a cluster"),
        ({"workers_per_node": 2}, "--workers-per-node is for the nodes of a cluster"),
    ],
)
def test_what_needs_this_machine_is_refused(tmp_path: Path, options: dict[str, object], said: str) -> None:
    repo = write_repo(tmp_path / "repo")
    with pytest.raises(UsageError, match=said):
        prepare(RunConfig.of(model="offline/oracle", **options), repo, {})


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("eval", "--watch"), "--watch replaces workers of this machine at every save; remove --cluster"),
        (("test", "-i"), "--interactive and --cluster don't go together: the debugger pauses in a worker"),
    ],
)
def test_what_follows_one_worker_is_refused(tmp_path: Path, command: tuple[str, ...], said: str) -> None:
    repo = write_repo(tmp_path / "repo")
    done = run_osmosis(*command, "--model", "offline/oracle", "--cluster", "auto", cwd=repo)
    assert done.code == 2
    assert said in done.stderr
