"""Loading functions from real files and calling them on trajectories."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from textwrap import dedent
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import osmosis_ai
from osmosis_ai import osmosis_reward, osmosis_rubric
from osmosis_ai.errors import FunctionError
from osmosis_ai.records import Failure, FunctionRef, Message, Score, ScoringInput
from osmosis_ai.runtime.worker.scorer import Scorer, load_scorer

MESSAGES: list[Message] = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "Let me see."},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]
HERE = Path(__file__)


def trajectory(**changes: Any) -> ScoringInput:
    values: dict[str, Any] = {"messages": MESSAGES, "ground_truth": "42", "row_index": 3, "extra": {"level": "easy"}}
    return ScoringInput(**{**values, **changes})


def ref(name: str = "here:score", **changes: Any) -> FunctionRef:
    module, _, attribute = name.partition(":")
    return FunctionRef(**{"name": name, "module": module, "attribute": attribute, "root": str(HERE.parent), **changes})


def score(function: Callable[..., Any], given: ScoringInput | None = None, timeout: float = 30) -> Score:
    return anyio.run(Scorer(ref(), function).score, given or trajectory(), timeout)


def failure(function: Callable[..., Any], given: ScoringInput | None = None, timeout: float = 30) -> Failure:
    result = score(function, given, timeout)
    assert result.value is None
    assert result.failure is not None
    return result.failure


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Path]:
    """A repository's root, first on sys.path; its modules are unloaded afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(tmp_path))
    (tmp_path / "reward_fn").mkdir()
    yield tmp_path
    sys.path.remove(str(tmp_path))
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__spec__", "")):
            del sys.modules[name]


def write(repo: Path, file: str, source: str) -> None:
    (repo / file).write_text(dedent(source), encoding="utf-8")


def load(repo: Path, name: str, **changes: Any) -> Scorer:
    return load_scorer(ref(name, root=str(repo), **changes))


def refused(repo: Path, name: str, **changes: Any) -> str:
    with pytest.raises(FunctionError) as caught:
        load(repo, name, **changes)
    return str(caught.value)


# What a function gets


def test_the_simple_form_gets_the_last_answer_and_the_row() -> None:
    calls = []

    def simple(solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        calls.append((solution_str, ground_truth, extra_info))
        return 0.5

    result = score(simple)
    assert calls == [("It is 42.", "42", {"level": "easy", "row_index": 3, "ground_truth": "42"})]
    assert (result.function, result.value, result.failure) == ("here:score", 0.5, None)
    assert result.duration_ms > 0


def test_the_full_form_gets_the_conversation_and_the_row() -> None:
    calls = []

    def full(messages: list[Message], ground_truth: str, metadata: dict[str, Any]) -> float:
        calls.append((messages, ground_truth, metadata))
        return 0.5

    assert score(full).value == 0.5
    assert calls == [(MESSAGES, "42", {"level": "easy", "row_index": 3, "ground_truth": "42"})]


def test_only_the_parameters_a_function_has_are_passed() -> None:
    def only_answer(solution_str: str) -> float:
        return float("42" in solution_str)

    def unordered(
        solution_str: str, extra_info: dict[str, Any], threshold: float = 0.25, ground_truth: str = ""
    ) -> float:
        return threshold if ground_truth in solution_str and extra_info["level"] == "easy" else 0.0

    def positional(solution_str: str, weight: float = 0.75, ground_truth: str = "", /) -> float:
        return weight if ground_truth in solution_str else 0.0

    assert [score(only_answer).value, score(unordered).value, score(positional).value] == [1.0, 0.25, 0.75]


def test_a_function_with_open_keywords_gets_its_forms_arguments_and_data_source() -> None:
    seen: list[dict[str, Any]] = []

    def simple(solution_str: str, **kwargs: Any) -> float:
        seen.append(kwargs)
        return 1.0

    def full(messages: list[Message], **kwargs: Any) -> float:
        seen.append(kwargs)
        return 1.0

    assert score(simple).value == 1.0
    assert score(full, trajectory(extra={"data_source": "gsm8k"})).value == 1.0
    row = {"row_index": 3, "ground_truth": "42"}
    assert seen == [
        {"ground_truth": "42", "extra_info": {"level": "easy", **row}},
        {"ground_truth": "42", "metadata": {"data_source": "gsm8k", **row}, "data_source": "gsm8k"},
    ]


def test_data_source_is_the_rows_or_the_default_or_none() -> None:
    def needed(solution_str: str, data_source: str) -> float:
        return {"gsm8k": 1.0, None: 0.5}[data_source]

    def optional(solution_str: str, data_source: str = "default") -> float:
        return float(data_source == "default")

    assert score(needed, trajectory(extra={"data_source": "gsm8k"})).value == 1.0
    assert score(needed).value == 0.5
    assert score(optional).value == 1.0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text", "text"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}], "ab"),
        (["a", {"text": None}, "b"], "ab"),
    ],
)
def test_the_answer_is_the_text_of_the_last_assistant_message(content: object, expected: str) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    last: Message = {"role": "assistant", "content": content, "tool_calls": calls}
    given = trajectory(messages=[*MESSAGES, last, {"role": "tool", "tool_call_id": "c", "content": "no"}])
    assert score(lambda solution_str: float(solution_str == expected), given).value == 1.0


def test_the_answer_is_empty_without_an_assistant_message() -> None:
    for messages in (MESSAGES[:2], [], [{"role": "assistant"}]):
        assert score(lambda solution_str: float(solution_str == ""), trajectory(messages=messages)).value == 1.0


def test_a_function_that_changes_its_arguments_changes_nobody_elses() -> None:
    given = trajectory(extra={"tags": ["a"]})

    def vandal(messages: list[Message], metadata: dict[str, Any]) -> float:
        messages[-1]["content"] = "changed"
        messages.clear()
        metadata["tags"].append("b")
        metadata["row_index"] = -1
        return 1.0

    def check(messages: list[Message], metadata: dict[str, Any]) -> float:
        return float(messages[-1]["content"] == "It is 42." and metadata["tags"] == ["a"])

    def simple_vandal(solution_str: str, extra_info: dict[str, Any]) -> float:
        extra_info["tags"].append("c")
        return 1.0

    assert [score(function, given).value for function in (vandal, simple_vandal, check)] == [1.0, 1.0, 1.0]


# What can be called


def test_async_functions_and_other_callables_are_called() -> None:
    async def asynchronous(solution_str: str) -> float:
        await anyio.lowlevel.checkpoint()
        return 0.25

    @functools.wraps(asynchronous)
    def sync_wrapper_of_async(*args: Any, **kwargs: Any) -> Any:
        return asynchronous(*args, **kwargs)

    class Judge:
        def __call__(self, solution_str: str) -> float:
            return 0.25

        async def method(self, solution_str: str) -> float:
            return 0.25

    class AsyncJudge:
        async def __call__(self, solution_str: str) -> float:
            assert asyncio.get_running_loop()
            return 0.25

    def weighted(weight: float, solution_str: str, ground_truth: str, extra_info: str) -> float:
        return weight if (ground_truth, extra_info) == ("42", "bound") else 0.0

    async def weighted_async(weight: float, solution_str: str) -> float:
        return weight

    for function in (
        asynchronous,
        sync_wrapper_of_async,
        Judge(),
        Judge().method,
        AsyncJudge(),
        functools.partial(weighted, 0.25, extra_info="bound"),
        functools.partial(weighted_async, 0.25),
    ):
        assert score(function).value == 0.25


def test_decorated_functions_are_called() -> None:
    @osmosis_reward
    def reward(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any) -> float:
        return float(ground_truth in solution_str and extra_info is not None and kwargs == {"data_source": "d"})

    @osmosis_rubric
    async def rubric(solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]) -> float:
        return 1.0 if ground_truth is None and extra_info["model"] == "m" else 0.0

    assert score(reward, trajectory(extra={"data_source": "d"})).value == 1.0
    assert score(rubric, trajectory(ground_truth=None, extra={"model": "m"})).value == 1.0


def test_sync_functions_run_beside_each_other_and_off_the_event_loop() -> None:
    together = 60
    barrier = threading.Barrier(together)

    def meet(solution_str: str) -> float:
        barrier.wait(30)
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return 1.0

    async def run() -> list[Score]:
        scorer, results = Scorer(ref(), meet), []

        async def one() -> None:
            results.append(await scorer.score(trajectory(), 30))

        async with anyio.create_task_group() as group:
            for _ in range(together):
                group.start_soon(one)
        return results

    assert [result.value for result in anyio.run(run)] == [1.0] * together


def test_functions_see_the_context_they_are_scored_in() -> None:
    job: contextvars.ContextVar[str] = contextvars.ContextVar("job")

    def sync(solution_str: str) -> float:
        return float(job.get() == "job 7")

    async def asynchronous(solution_str: str) -> float:
        return float(job.get() == "job 7")

    async def run() -> list[float | None]:
        job.set("job 7")
        return [(await Scorer(ref(), function).score(trajectory(), 30)).value for function in (sync, asynchronous)]

    assert anyio.run(run) == [1.0, 1.0]


# Several at a time


def several(function: Callable[..., Any], count: int, timeout: float = 30, **options: Any) -> list[Score]:
    trajectories = [trajectory(row_index=row, ground_truth=str(row)) for row in range(count)]
    return anyio.run(functools.partial(Scorer(ref(), function).score_all, trajectories, timeout, **options))


def test_several_are_scored_in_order_and_in_one_thread() -> None:
    threads = set()

    def number(solution_str: str, ground_truth: str) -> float:
        threads.add(threading.get_ident())
        return float(ground_truth)

    assert [result.value for result in several(number, 5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(threads) == 1


def test_one_that_takes_too_long_costs_only_its_own_score() -> None:
    gate = threading.Event()

    def block(solution_str: str, ground_truth: str) -> float:
        if ground_truth == "1":
            gate.wait()
        return float(ground_truth)

    try:
        results = several(block, 4, timeout=0.2)
    finally:
        gate.set()
    assert [result.value for result in results] == [0.0, None, 2.0, 3.0]
    assert results[1].failure is not None
    assert (results[1].failure.kind, results[1].failure.message) == ("timeout", "took longer than 0.2 s")
    assert results[1].duration_ms >= 200


def test_what_one_raises_or_sets_does_not_reach_the_next() -> None:
    seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")

    def careless(solution_str: str, ground_truth: str) -> float:
        before = seen.get()
        seen.set(ground_truth)
        if ground_truth == "1":
            sys.exit(3)
        return float(before == "nothing")

    results = several(careless, 3)
    assert [result.value for result in results] == [1.0, None, 1.0]
    assert results[1].failure is not None
    assert results[1].failure.kind == "exit"


def test_several_whose_results_are_to_be_awaited() -> None:
    async def later(ground_truth: str) -> float:
        await anyio.lowlevel.checkpoint()
        return float(ground_truth)

    results = several(lambda solution_str, ground_truth: later(ground_truth), 3)
    assert [result.value for result in results] == [0.0, 1.0, 2.0]


def test_each_is_announced_in_the_context_it_runs_in() -> None:
    row: contextvars.ContextVar[int] = contextvars.ContextVar("row")
    assert [result.value for result in several(lambda solution_str: row.get(), 3, begin=row.set)] == [0.0, 1.0, 2.0]


# What comes back


@pytest.mark.parametrize("value", [1, 0.5, True, -3, Fraction(1, 4)])
def test_any_finite_real_number_is_a_score(value: Any) -> None:
    result = score(lambda solution_str: value)
    assert result.value == float(value)
    assert type(result.value) is float


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (None, "wrong_type", "returned None, which is of type NoneType; a score is a finite number"),
        ("1.0", "wrong_type", "returned '1.0', which is of type str; a score is a finite number"),
        ((1.0, "why"), "wrong_type", "returned (1.0, 'why'), which is of type tuple; a score is a finite number"),
        (1 + 0j, "wrong_type", "returned (1+0j), which is of type complex; a score is a finite number"),
        (float("nan"), "not_finite", "returned nan; a score is a finite number"),
        (float("-inf"), "not_finite", "returned -inf; a score is a finite number"),
        (10**1000, "not_finite", "returned a number too large for a float"),
    ],
)
def test_anything_else_is_a_failure_at_the_functions_definition(value: Any, kind: str, message: str) -> None:
    def odd(solution_str: str) -> Any:
        return value

    async def odd_async(solution_str: str) -> Any:
        return value

    for function in (odd, odd_async):
        found = failure(function)
        assert (found.origin, found.kind, found.message) == ("reward", kind, message)
        assert (found.file, found.line) == (HERE.name, function.__code__.co_firstlineno)


def test_a_very_long_result_is_shown_in_short() -> None:
    assert len(failure(lambda solution_str: "x" * 5_000_000).message) < 200


def test_a_decorated_function_that_returns_an_int_fails_at_its_definition() -> None:
    @osmosis_reward
    def reward(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
        return 1

    found = failure(reward)
    assert found.kind == "exception"
    assert "returned 1, which is of type int; it must return a float" in found.message
    assert (found.file, found.line) == (HERE.name, reward.__wrapped__.__code__.co_firstlineno)  # type: ignore[attr-defined]


def raises(error: BaseException | type[BaseException]) -> list[Callable[..., Any]]:
    """A sync and an async function that raise this."""

    def sync(solution_str: str) -> float:
        raise error

    async def asynchronous(solution_str: str) -> float:
        await anyio.lowlevel.checkpoint()
        raise error

    return [sync, asynchronous]


class Unprintable(Exception):  # noqa: N818 - a user's class
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("bad value"), "exception", "ValueError: bad value"),
        (KeyError("level"), "exception", "KeyError: 'level'"),
        (SystemExit(3), "exit", "SystemExit: 3"),
        (KeyboardInterrupt(), "exception", "KeyboardInterrupt"),
        (GeneratorExit(), "exception", "GeneratorExit"),
        (asyncio.CancelledError("mine"), "exception", "CancelledError: mine"),
        (TimeoutError("mine"), "exception", "TimeoutError: mine"),
        (MemoryError(), "exception", "MemoryError"),
        (AssertionError(), "exception", "AssertionError"),
        (Unprintable(), "exception", "Unprintable: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_a_function_raises_is_that_scores_failure(error: BaseException, kind: str, message: str) -> None:
    for function in raises(error):
        found = failure(function)
        assert (found.origin, found.kind) == ("reward", kind)
        assert found.message.startswith(message)
        assert found.file == HERE.name
        assert found.line is not None
        assert HERE.read_text(encoding="utf-8").splitlines()[found.line - 1].strip() == "raise error"
        assert found.detail is not None
        assert "raise error" in found.detail
        assert "worker/scorer.py" not in found.detail


def test_stop_iteration_is_a_failure_too() -> None:
    assert failure(raises(StopIteration(1))[0]).message == "StopIteration: 1"
    assert failure(raises(StopIteration(1))[1]).message.startswith("RuntimeError: coroutine raised StopIteration")


def test_the_line_is_the_deepest_one_of_the_users_code(repo: Path) -> None:
    write(
        repo,
        "reward_fn/deep.py",
        """\
        import json
        from reward_fn.deep_helper import parse

        def score(solution_str):
            return parse(solution_str)
        """,
    )
    write(repo, "reward_fn/deep_helper.py", "import json\n\ndef parse(text):\n    return json.loads(text)\n")
    result = anyio.run(load(repo, "reward_fn.deep:score").score, trajectory(), 30)
    assert result.failure is not None
    assert (result.failure.file, result.failure.line) == ("reward_fn/deep_helper.py", 4)
    assert result.failure.message.startswith("JSONDecodeError: ")
    assert result.failure.detail is not None
    assert 'File "reward_fn/deep.py", line 5, in score' in result.failure.detail


def test_a_rubrics_failure_is_a_rubrics() -> None:
    scorer = Scorer(ref(kind="rubric"), raises(ValueError("no"))[0])
    result = anyio.run(scorer.score, trajectory(), 30)
    assert result.failure is not None
    assert result.failure.origin == "rubric"


def test_a_call_that_does_not_fit_is_a_failure() -> None:
    @osmosis_rubric
    def rubric(solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]) -> float:
        return 1.0

    found = failure(rubric, trajectory(ground_truth=42))
    assert "argument `ground_truth` must be a str or None" in found.message


# Rows without ground truth


def test_a_function_that_needs_ground_truth_says_so_for_a_row_without() -> None:
    def plain(solution_str: str, ground_truth: str) -> float:
        raise AssertionError("was called")

    async def full(messages: list[Message], ground_truth: str) -> float:
        raise AssertionError("was called")

    for function in (plain, full):
        found = failure(function, trajectory(ground_truth=None))
        assert found.kind == "no_ground_truth"
        assert found.message.startswith("row 3 has no ground_truth")
        assert (found.file, found.line) == (HERE.name, function.__code__.co_firstlineno)


def test_a_function_that_can_do_without_ground_truth_is_called() -> None:
    def optional(solution_str: str, ground_truth: str | None) -> float:
        return float(ground_truth is None)

    def unannotated(solution_str, ground_truth):  # type: ignore[no-untyped-def]
        return float(ground_truth is None)

    def not_taken(solution_str: str) -> float:
        return 1.0

    for function in (optional, unannotated, not_taken):
        assert score(function, trajectory(ground_truth=None)).value == 1.0


# Time and cancellation


def test_an_async_function_that_takes_too_long_is_cancelled() -> None:
    ended = []

    async def slow(solution_str: str) -> float:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    found = failure(slow, timeout=0.05)
    assert (found.origin, found.kind, found.message) == ("reward", "timeout", "took longer than 0.05 s")
    assert (found.file, found.line) == (HERE.name, slow.__code__.co_firstlineno)
    assert ended == [True]


def test_a_sync_function_that_takes_too_long_is_left_behind() -> None:
    release = threading.Event()

    def slow(solution_str: str) -> float:
        release.wait()
        return 1.0

    assert failure(slow, timeout=0.05).kind == "timeout"
    release.set()


def test_a_function_that_swallows_its_cancellation_is_out_of_time_all_the_same() -> None:
    async def stubborn(solution_str: str) -> float:
        try:
            await anyio.sleep_forever()
        except BaseException:
            return 1.0

    async def wrapping(solution_str: str) -> float:
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            raise ValueError("interrupted") from error

    assert failure(stubborn, timeout=0.05).kind == "timeout"
    assert failure(wrapping, timeout=0.05).kind == "timeout"


def test_a_function_may_have_time_limits_of_its_own() -> None:
    async def own(solution_str: str) -> float:
        with anyio.move_on_after(0.01):
            await anyio.sleep_forever()
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except asyncio.TimeoutError:
            return 1.0
        return 0.0

    assert score(own).value == 1.0


def test_a_function_that_never_returns_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    write(
        tmp_path,
        "script.py",
        """\
        import threading
        import anyio
        from osmosis_ai.records import FunctionRef, ScoringInput
        from osmosis_ai.runtime.worker.scorer import Scorer

        def stuck(solution_str):
            threading.Event().wait()

        ref = FunctionRef("script:stuck", "script", "stuck", ".")
        result = anyio.run(Scorer(ref, stuck).score, ScoringInput([], None, 0, {}), 0.05)
        print(result.failure.kind)
        """,
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": str(Path(osmosis_ai.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("timeout\n", "", 0)


@pytest.mark.parametrize("swallows", [False, True])
def test_a_scope_that_is_cancelled_from_outside_ends_the_scoring(swallows: bool) -> None:
    async def run() -> tuple[bool, list[Score]]:
        started, results = anyio.Event(), []

        async def waiting(solution_str: str) -> float:
            started.set()
            try:
                await anyio.sleep_forever()
            except BaseException:
                if swallows:
                    return 1.0
                raise

        async def one() -> None:
            results.append(await Scorer(ref(), waiting).score(trajectory(), 30))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(one)
                await started.wait()
                group.cancel_scope.cancel()
        return group.cancel_scope.cancel_called, results

    assert anyio.run(run) == (True, [])


@pytest.mark.parametrize("swallows", [False, True])
def test_a_task_that_is_cancelled_from_outside_ends_the_scoring(swallows: bool) -> None:
    async def run() -> bool:
        started = asyncio.Event()

        async def waiting(solution_str: str) -> float:
            started.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if swallows:
                    return 1.0
                raise
            return 0.0

        task = asyncio.create_task(Scorer(ref(), waiting).score(trajectory(), 3600))
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(run()) is True


def test_a_sync_function_does_not_hold_back_a_cancellation() -> None:
    started, release = threading.Event(), threading.Event()

    def waiting(solution_str: str) -> float:
        started.set()
        release.wait()
        return 1.0

    async def run() -> list[Score]:
        results = []

        async def one() -> None:
            results.append(await Scorer(ref(), waiting).score(trajectory(), 3600))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(one)
                await anyio.to_thread.run_sync(started.wait)
                group.cancel_scope.cancel()
        return results

    assert anyio.run(run) == []
    release.set()


def test_a_function_that_cancels_its_own_task_fails_alone() -> None:
    async def suicidal(solution_str: str) -> float:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return 1.0

    async def run() -> list[str]:
        outcomes = []
        for function in (suicidal, lambda solution_str: 1.0):
            result = await Scorer(ref(), function).score(trajectory(), 30)
            await anyio.lowlevel.checkpoint()
            outcomes.append(str(result.value if result.failure is None else result.failure.message))
        return outcomes

    assert anyio.run(run) == ["CancelledError", "1.0"]


# Loading


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda answer, ground_truth: 1.0, "its first parameter is `answer`"),
        (lambda: 1.0, "it takes no parameters"),
        (lambda *messages: 1.0, r"its first parameter is `\*messages`"),
        (lambda **solution_str: 1.0, r"its first parameter is `\*\*solution_str`"),
        (dict.fromkeys, "its first parameter is `iterable`"),
        (min, "its signature can't be read"),
    ],
)
def test_another_first_parameter_is_an_error_that_says_which_forms_there_are(
    function: Callable[..., Any], found: str
) -> None:
    with pytest.raises(FunctionError, match=found) as caught:
        Scorer(ref(), function)
    assert "(solution_str, ground_truth, extra_info)" in str(caught.value)
    assert "(messages, ground_truth, metadata)" in str(caught.value)


def test_a_function_is_loaded_from_its_file_and_scores(repo: Path) -> None:
    write(
        repo,
        "reward_fn/good.py",
        """\
        from osmosis_ai import osmosis_reward

        @osmosis_reward
        def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
            from reward_fn.good_helper import same
            return same(solution_str, ground_truth)
        """,
    )
    write(repo, "reward_fn/good_helper.py", "def same(a, b):\n    return float(b in a)\n")
    scorer = load(repo, "reward_fn.good:exact", file="reward_fn/good.py")
    assert anyio.run(scorer.score, trajectory(), 30).value == 1.0


@pytest.mark.parametrize("stem", ["exact-match", "1st", "exact.v2", "exact match"])
def test_a_file_whose_name_is_no_identifier_is_loaded_once(repo: Path, stem: str) -> None:
    source = """\
        import builtins
        from .odd_helper import ONE
        builtins.loads_of_odd = getattr(builtins, "loads_of_odd", 0) + 1
        class Kind: pass
        def first(solution_str): return float(ONE * loads_of_odd)
        def second(solution_str): return float(ONE * loads_of_odd)
        """
    if "." in stem:
        source = source.replace("from .odd", "from reward_fn.odd")
    write(repo, "reward_fn/odd_helper.py", "ONE = 1\n")
    write(repo, f"reward_fn/{stem}.py", source)
    try:
        for name in ("first", "second"):
            scorer = load(repo, f"reward_fn.{stem}:{name}", file=f"reward_fn/{stem}.py")
            assert anyio.run(scorer.score, trajectory(), 30).value == 1.0
    finally:
        import builtins

        del builtins.loads_of_odd  # type: ignore[attr-defined]


def test_a_file_loaded_by_its_place_that_fails_is_not_kept(repo: Path) -> None:
    write(repo, "reward_fn/bad-name.py", "x = 1\ny = x / 0\n")
    for _ in range(2):
        assert (
            refused(repo, "reward_fn.bad-name:score", file="reward_fn/bad-name.py")
            == "reward_fn/bad-name.py:2: ZeroDivisionError: division by zero"
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import json\n\nprint(x)\n", "reward_fn/broken.py:3: NameError: name 'x' is not defined"),
        ("import no_such_package\n", "reward_fn/broken.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import json\njson.loads('{')\n", "reward_fn/broken.py:2: JSONDecodeError: "),
        ("def score(solution_str):\n    return 1.0 +\n", "reward_fn/broken.py:2: SyntaxError: invalid syntax"),
        ("def score(solution_str):\nreturn 1.0\n", "reward_fn/broken.py:2: IndentationError: "),
        ("import sys\nsys.exit(2)\n", "reward_fn/broken.py:2: SystemExit: 2"),
        ("import reward_fn.broken_helper\n", "reward_fn/broken_helper.py:2: ValueError: deep"),
        (
            "from osmosis_ai import osmosis_reward\ndef score(solution_str: str): return 1.0\nosmosis_reward(score)\n",
            "reward_fn/broken.py:3: TypeError: @osmosis_reward: score: parameter 2 is missing",
        ),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_the_line(repo: Path, source: str, message: str) -> None:
    write(repo, "reward_fn/broken.py", source)
    write(repo, "reward_fn/broken_helper.py", "import json\nraise ValueError('deep')\n")
    found = refused(repo, "reward_fn.broken:score", file="reward_fn/broken.py")
    assert found.startswith(message)
    assert "Traceback" not in found


def test_a_file_that_is_no_text_is_named(repo: Path) -> None:
    (repo / "reward_fn/binary.py").write_bytes(b"x = '\x00'\n")
    assert "reward_fn/binary.py" in refused(repo, "reward_fn.binary:score", file="reward_fn/binary.py")


@pytest.mark.parametrize("name", ["reward_fn.absent:score", "absent:score", "absent.deeper:score"])
def test_a_module_that_does_not_exist_is_named(repo: Path, name: str) -> None:
    module = name.partition(":")[0]
    assert refused(repo, name) == f"there is no module `{module}` in {repo} or on the Python path"


def test_a_file_that_shares_its_name_with_a_loaded_module_is_not_taken_for_it(repo: Path) -> None:
    write(repo, "json.py", "def score(solution_str): return 1.0\n")
    assert refused(repo, "json:score", file="json.py") == (
        "json.py can't be imported: the name `json` already stands for another module. Rename the file"
    )


def test_a_missing_function_is_an_error_that_lists_those_there_are(repo: Path) -> None:
    write(
        repo,
        "reward_fn/several.py",
        """\
        from pathlib import Path
        LIMIT = 3
        def exact(solution_str): return 1.0
        def helper(text): return 1.0
        def _private(solution_str): return 1.0
        async def conversation(messages): return 1.0
        """,
    )
    assert refused(repo, "reward_fn.several:exakt", file="reward_fn/several.py") == (
        "reward_fn/several.py has no function `exakt`; functions in it that can score: conversation, exact"
    )
    assert refused(repo, "reward_fn.several:LIMIT") == (
        "`LIMIT` in reward_fn.several is of type int and can't be called: name a function"
    )
    assert refused(repo, "reward_fn.several:helper", file="reward_fn/several.py").startswith(
        "reward_fn/several.py: `helper`: its first parameter is `text`; the simple form is ("
    )


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("solution_str, ground_truth, extra_info, threshold", "threshold"),
        ("solution_str, metadata", "metadata"),
        ("messages, extra_info", "extra_info"),
        ("solution_str, *, weight", "weight"),
        ("solution_str, weight, /", "weight"),
    ],
)
def test_a_parameter_that_nothing_passes_is_named(repo: Path, signature: str, name: str) -> None:
    write(repo, "reward_fn/needy.py", f"def score({signature}):\n    return 1.0\n")
    found = refused(repo, "reward_fn.needy:score")
    assert found.startswith(
        f"reward_fn.needy: `score`: parameter `{name}` has no default, and the runtime doesn't pass it"
    )
