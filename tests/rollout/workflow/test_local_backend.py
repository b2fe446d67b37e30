"""LocalBackend: what `run` and `grade` may return and raise, deadlines, concurrency, and what is graded."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from workflows import ANSWER, PROMPT, Answering, Held, Named, execution, local, raising

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowOutput,
    ConcurrencyConfig,
    ExecutionResult,
    Grader,
    GraderConfig,
    LocalBackend,
    RolloutSample,
    RolloutStatus,
    get_rollout_context,
)
from osmosis_ai.rollout.backend.local.deadline import DeadlineError, within
from osmosis_ai.rollout.context import RolloutContext
from waiting import eventually

pytestmark = pytest.mark.anyio


async def result_of(run: Any = None, grade: Any = None, **fields: Any) -> ExecutionResult:
    """The result of a workflow; with a grader, that of the grader."""
    backend = local(run, grade)
    return (await backend.execute(execution(grade=grade is not None, **fields))).result


def registering(*sources: Any, value: Any = None) -> Any:
    """A `run` that registers sources of samples, by name if they take one, and returns a value."""

    def run(_: Any) -> Any:
        rollout = get_rollout_context()
        assert rollout is not None
        for number, source in enumerate(sources):
            if isinstance(source, Named):
                rollout.register_sample_source(f"sample-{number}", source)
            else:
                rollout.set_sample_source(source)
        return value

    return run


@pytest.mark.parametrize(
    ("run", "messages"),
    [
        (lambda ctx: ANSWER, ANSWER),
        (lambda ctx: AgentWorkflowOutput(messages=ANSWER), ANSWER),
        (lambda ctx: [], []),
        (registering(Held(ANSWER)), ANSWER),
        (registering(Held([]), value=ANSWER), ANSWER),
        # An explicit output without messages means no sample.
        (registering(Held(ANSWER), value=AgentWorkflowOutput()), None),
        (lambda ctx: None, None),
        # SDK 0.2 ignored the value.
        (registering(Named(), value="done"), [{"role": "assistant", "content": "sample-0"}]),
    ],
)
async def test_the_sample_is_what_run_returns_or_registers(run: Any, messages: Any) -> None:
    result = await result_of(run)
    assert result.status is RolloutStatus.SUCCESS
    assert (result.sample and list(result.sample.messages)) == messages


async def test_an_outputs_metrics_and_the_label_are_the_samples() -> None:
    sample = (await result_of(lambda ctx: AgentWorkflowOutput(messages=[], metrics={"turns": 2}))).sample
    assert sample is not None
    assert (sample.metrics, sample.label) == ({"turns": 2.0}, "4")


def changed_output(ctx: Any) -> AgentWorkflowOutput:
    output = AgentWorkflowOutput(messages=[])
    output.metrics["loss"] = float("nan")
    return output


class NoKey(Exception):  # noqa: N818  as users name them
    """An exception without a text."""


@pytest.mark.parametrize(
    ("run", "message", "category"),
    [
        (lambda ctx: 42, "run() must return", "validation_error"),
        (lambda ctx: [1], "messages.0", "validation_error"),
        (changed_output, "metrics.loss", "validation_error"),
        (raising(ValueError("bad row")), "bad row", "validation_error"),
        (raising(AssertionError("no")), "no", "validation_error"),
        (raising(TimeoutError("the client gave up")), "the client gave up", "timeout"),
        (raising(asyncio.TimeoutError("it gave up")), "it gave up", "timeout"),
        (raising(KeyError("city")), "'city'", "agent_error"),
        (raising(NoKey()), "NoKey", "agent_error"),
        (raising(SystemExit(3)), "it called sys.exit(3)", "agent_error"),
        (raising(asyncio.CancelledError()), "it was cancelled from inside", "agent_error"),
        (registering(Held(), Held()), "sample source already", "validation_error"),
        (registering(Named(), Held()), None, None),
    ],
)
async def test_what_run_raises_is_the_failures_text_and_category(run: Any, message: Any, category: Any) -> None:
    result = await result_of(run)
    if message is None:
        assert result.status is RolloutStatus.SUCCESS
        return
    assert (result.status, result.err_category) == (RolloutStatus.FAILURE, category)
    assert message in (result.err_message or "")
    assert result.sample is None


async def test_a_failure_names_the_line_and_keeps_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_workflow.py").write_text("def run(ctx):\n    raise ValueError('bad')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import failing_workflow  # type: ignore[import-not-found]

    details = (await result_of(failing_workflow.run)).extra_fields or {}
    assert details["location"] == "failing_workflow.py:2"
    assert details["exception"] == "ValueError"
    assert "raise ValueError('bad')" in details["traceback"]


async def test_a_method_that_isnt_async_fails() -> None:
    class Plain(AgentWorkflow[AgentWorkflowConfig]):
        def run(self, ctx: Any) -> Any:  # type: ignore[override]
            return ANSWER

    class PlainGrader(Grader):
        def grade(self, ctx: Any) -> Any:
            ctx.set_reward(1)

    result = await result_of(Plain)
    assert (result.err_category, result.err_message) == (
        "validation_error",
        "run() must be async: write `async def run(self, ctx)`",
    )

    class Yielding(AgentWorkflow[AgentWorkflowConfig]):
        async def run(self, ctx: Any) -> Any:
            yield ANSWER

    yielded = (await result_of(Yielding)).err_message
    assert yielded == "run() is a generator, because it has a `yield`: return the result instead"
    graded = await result_of(Answering, PlainGrader)
    assert (graded.status, graded.err_message) == (
        "failure",
        "grade() must be async: write `async def grade(self, ctx)`",
    )


async def test_a_constructor_that_raises_is_a_failure_like_any_other() -> None:
    class Broken(AgentWorkflow[AgentWorkflowConfig]):
        def __init__(self, config: Any = None) -> None:
            raise RuntimeError("no key for the search")

        async def run(self, ctx: Any) -> Any: ...

    class BrokenGrader(Grader):
        def __init__(self, config: Any = None) -> None:
            raise RuntimeError("no key for the judge")

        async def grade(self, ctx: Any) -> Any: ...

    assert (await result_of(Broken)).err_message == "no key for the search"
    graded = await result_of(Answering, BrokenGrader)
    assert (graded.err_message, graded.sample and graded.sample.reward) == ("no key for the judge", None)


async def test_each_rollout_has_its_own_workflow_and_copy_of_the_configuration() -> None:
    seen: list[Any] = []

    class Keeping(AgentWorkflow[AgentWorkflowConfig]):
        async def run(self, ctx: Any) -> Any:
            assert ctx.config is self.config
            ctx.config.tools.append("used")
            seen.append((self, ctx.config))
            return []

    class Judging(Grader):
        async def grade(self, ctx: Any) -> Any:
            assert self.config is shared
            ctx.set_reward(1)

    shared = GraderConfig(name="judge")
    config = AgentWorkflowConfig.model_validate({"name": "w", "tools": []})
    backend = LocalBackend(workflow=Keeping, workflow_config=config, grader=Judging, grader_config=shared)
    for number in range(2):
        outcome = await backend.execute(execution(id=f"r{number}"))
        assert outcome.result.status is RolloutStatus.SUCCESS
    assert seen[0][0] is not seen[1][0]
    assert [config.tools for _, config in seen] == [["used"], ["used"]]
    assert config.model_extra == {"tools": []}


async def test_classes_can_be_named_by_module_and_attribute() -> None:
    backend = LocalBackend(workflow="workflows:Answering", grader="workflows:Exact")
    assert (await backend.execute(execution())).result.status is RolloutStatus.SUCCESS
    with pytest.raises(ValueError, match="write module:attribute"):
        LocalBackend(workflow="workflows")
    with pytest.raises(ImportError, match="workflows has no attribute 'Absent'"):
        LocalBackend(workflow="workflows:Absent")


async def test_workflow_and_grader_see_the_row_and_one_folder(artifacts: Path) -> None:
    seen: dict[str, Any] = {}

    def run(ctx: Any) -> Any:
        seen["workflow"] = ctx
        (ctx.artifacts_dir / "note.txt").write_text("hi", encoding="utf-8")
        return ANSWER

    def grade(ctx: Any) -> None:
        seen["grader"] = ctx
        ctx.set_reward(float((ctx.artifacts_dir / "note.txt").read_text(encoding="utf-8") == "hi"))

    graded = await result_of(run, grade, metadata={"level": 3}, label=None)
    assert graded.sample is not None
    assert graded.sample.reward == 1.0
    workflow, grader = seen["workflow"], seen["grader"]
    assert (workflow.prompt, workflow.metadata, workflow.config) == (PROMPT, {"level": 3}, None)
    assert (grader.label, grader.metadata, grader.project_path) == (None, {"level": 3}, None)
    assert workflow.artifacts_dir == grader.artifacts_dir == artifacts / "r1" / "artifacts"


async def test_a_folder_that_cant_be_made_costs_the_rollout_nothing(artifacts: Path) -> None:
    artifacts.write_text("a file", encoding="utf-8")  # noqa: ASYNC240  before anything runs
    seen: list[Any] = []
    assert (await result_of(lambda ctx: seen.append(ctx.artifacts_dir))).status is RolloutStatus.SUCCESS
    assert seen == [None]


@pytest.mark.parametrize(
    ("run", "grade", "fields", "message"),
    [
        (Answering, None, {}, "its LocalBackend has no grader"),
        (Answering, lambda ctx: ctx.set_reward(1), {"label": None}, "neither a label nor metadata"),
        (Answering, lambda ctx: None, {}, "no reward after grading"),
        (Answering, lambda ctx: ctx.set_reward(float("nan")), {}, "finite number"),
        (Answering, lambda ctx: ctx.set_reward("high"), {}, "valid number"),
        (Answering, raising(ValueError("no digits")), {}, "no digits"),
        (lambda ctx: None, lambda ctx: None, {}, "there is no sample"),
        (lambda ctx: None, lambda ctx: ctx.set_reward(1), {}, "no sample to reward"),
        (raising(OSError("disk")), lambda ctx: ctx.set_reward(1), {}, "disk"),
        (registering(Named(), Named()), lambda ctx: ctx.set_reward(1), {}, "use set_sample_reward(id, reward)"),
        (
            registering(Named(), Named()),
            lambda ctx: ctx.set_sample_reward("sample-0", 1),
            {},
            "reward after grading: sample-1",
        ),
        (
            registering(Named(), Named()),
            lambda ctx: ctx.set_sample_reward("a", 1),
            {},
            "the samples: sample-0, sample-1",
        ),
    ],
)
async def test_grading_that_fails_says_why(run: Any, grade: Any, fields: Any, message: str) -> None:
    graded = (await local(run, grade).execute(execution(**fields))).grader
    assert graded is not None
    assert graded.status is RolloutStatus.FAILURE
    assert message in (graded.err_message or "")
    assert graded.err_category == ("agent_error" if message == "disk" else "validation_error")
    assert graded.sample is None or graded.sample.reward is None


def excluding(ctx: Any) -> None:
    ctx.sample.remove_sample = True


def replacing(ctx: Any) -> None:
    ctx.sample = RolloutSample(messages=[], reward=0.25)


def rewarding_all(ctx: Any) -> None:
    for number, name in enumerate(ctx.get_samples()):
        ctx.set_sample_reward(name, number)


@pytest.mark.parametrize(
    ("run", "grade", "rewards"),
    [
        (Answering, lambda ctx: ctx.set_reward(1), [1.0]),
        (Answering, lambda ctx: ctx.set_reward("0.5"), [0.5]),
        (Answering, excluding, [None]),
        (Answering, replacing, [0.25]),
        (Answering, rewarding_all, [0.0]),
        (registering(Named()), lambda ctx: ctx.set_reward(1), [1.0]),
        (registering(Named(), Named()), rewarding_all, [0.0, 1.0]),
    ],
)
async def test_grading_that_succeeds(run: Any, grade: Any, rewards: Any) -> None:
    graded = await result_of(run, grade)
    assert graded.status is RolloutStatus.SUCCESS, graded.err_message
    samples = list(graded.samples.values()) or [graded.sample]
    assert [sample and sample.reward for sample in samples] == rewards


async def test_the_rollout_is_active_in_the_grader_whose_agents_make_no_samples() -> None:
    seen: list[Any] = []

    def grade(ctx: Any) -> None:
        rollout = get_rollout_context()
        assert rollout is not None
        seen.append((rollout.chat_completions_url, rollout.api_key))
        rollout.set_sample_source(Held([{"role": "assistant", "content": "a judge's"}]))
        ctx.set_reward(1)

    with RolloutContext("http://model", "key", "r1"):
        outcome = await local(registering(Held(ANSWER)), grade).execute(execution())
    assert seen == [("http://model", "key")]
    assert outcome.result.sample is not None
    assert outcome.result.sample.messages == ANSWER


async def test_callbacks_come_in_order_and_a_lone_one_means_no_grading() -> None:
    order: list[str] = []

    async def completed(result: ExecutionResult) -> None:
        order.append(f"completed {result.status}")

    async def graded(result: ExecutionResult) -> None:
        order.append(f"graded {result.status}")

    backend = local(Answering, lambda ctx: (order.append("grade"), ctx.set_reward(1)))
    await backend.execute(execution(), completed, graded)
    assert order == ["completed success", "grade", "graded success"]
    order.clear()
    assert (await backend.execute(execution(), completed)).grader is None
    assert order == ["completed success"]


async def test_a_failed_workflows_text_reaches_the_grader_callback() -> None:
    results: list[ExecutionResult] = []

    async def keep(result: ExecutionResult) -> None:
        results.append(result)

    await local(raising(ValueError("bad row"))).execute(execution(), keep, keep)
    assert [(result.status, result.err_message) for result in results] == [("failure", "bad row")] * 2


async def forever(_: Any) -> None:
    await asyncio.Event().wait()


def blocking(_: Any) -> list[Any]:
    time.sleep(0.1)
    return ANSWER


async def swallowing(_: Any) -> list[Any]:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return ANSWER
    return []


@pytest.mark.parametrize("run", [forever, blocking, swallowing])
@pytest.mark.parametrize("phase", ["workflow", "grader"])
async def test_a_deadline_is_kept_whatever_the_code_does(run: Any, phase: str) -> None:
    if phase == "workflow":
        result = await result_of(run, agent_timeout_sec=0.05)
    else:
        result = await result_of(Answering, run, grader_timeout_sec=0.05)
    assert (result.status, result.err_category) == ("failure", "timeout")
    assert result.err_message == f"{phase} exceeded its 0.05s deadline"


async def test_a_deadline_that_has_passed_runs_nothing() -> None:
    ran: list[Any] = []
    result = await result_of(ran.append, agent_timeout_sec=0)
    assert (result.err_category, ran) == ("timeout", [])


async def test_no_deadline_means_no_limit() -> None:
    assert (await result_of(blocking, agent_timeout_sec=None)).status is RolloutStatus.SUCCESS


async def test_code_that_ignores_its_cancellation_is_left_behind() -> None:
    released = asyncio.Event()
    ended = asyncio.Event()

    async def stubborn() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        raise RuntimeError("too late")

    with pytest.raises(DeadlineError):
        await within(0.01, stubborn, grace=0.01)
    assert not ended.is_set()
    released.set()
    await ended.wait()


async def test_cancelling_the_rollout_cancels_the_workflow_which_may_clean_up() -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def run(_: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    backend = local(run)
    task = asyncio.create_task(backend.execute(execution()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()
    assert backend.health()["concurrency"]["running"] == 0


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (None, 4),
        (AgentWorkflowConfig(name="w"), None),
        (AgentWorkflowConfig(name="w", concurrency=ConcurrencyConfig(max_concurrent=2)), 2),
    ],
)
async def test_workflows_over_the_limit_wait(config: Any, limit: int | None) -> None:
    gate = asyncio.Event()
    backend = local(lambda ctx: gate.wait(), None, workflow_config=config)
    tasks = [asyncio.create_task(backend.execute(execution(id=f"r{n}", grade=False))) for n in range(6)]

    def started() -> int:
        concurrency: dict[str, int] = backend.health()["concurrency"]
        return concurrency["queued"] + concurrency["running"]

    await asyncio.to_thread(eventually, lambda: started() == 6)
    running = limit or 6
    assert backend.health() == {
        "status": "ok",
        "concurrency": {"max_concurrent": limit, "queued": 6 - running, "running": running},
    }
    assert backend.max_concurrency == (limit or 0)
    gate.set()
    await asyncio.gather(*tasks)
    assert backend.health()["concurrency"] == {"max_concurrent": limit, "queued": 0, "running": 0}


async def test_time_in_the_queue_counts_and_is_named() -> None:
    config = AgentWorkflowConfig(name="w", concurrency=ConcurrencyConfig(max_concurrent=1))
    backend = local(forever, None, workflow_config=config)
    statuses: list[str] = []
    first = asyncio.create_task(backend.execute(execution(id="first", agent_timeout_sec=0.2)))
    await asyncio.sleep(0)
    with RolloutContext(on_status=statuses.append):
        second = await backend.execute(execution(id="second", agent_timeout_sec=0.15))
    await first
    message = second.result.err_message or ""
    assert re.fullmatch(r"workflow exceeded its 0\.15s deadline \(\d\.\ds of it spent queued\)", message)
    assert statuses == ["queued", "running"]
