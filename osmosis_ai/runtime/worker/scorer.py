"""Load a reward or rubric function and call it on trajectories. Its errors become a Score with a Failure."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import reprlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from osmosis_ai import tracebacks
from osmosis_ai.conversation import last_answer, message_text
from osmosis_ai.decorators import annotation_members
from osmosis_ai.discovery.source import relative_to_root
from osmosis_ai.errors import FunctionError, UsageError
from osmosis_ai.failures import FailureKind
from osmosis_ai.imports import SourceLoader, import_hint
from osmosis_ai.records import Failure, FunctionRef, JudgeCall, Score, ScoringInput
from osmosis_ai.reward_fn.explaining import explanations
from osmosis_ai.reward_rubric.judge import judged_attempt, trace_judge_calls
from osmosis_ai.reward_rubric.target import rubric_extra_info
from osmosis_ai.runtime.worker.series import Overdue, run_series

if TYPE_CHECKING:
    from osmosis_ai.reward_rubric.configs import Rubric

__all__ = ["Scorer", "load_scorer"]

_FORMS = {
    "solution_str": ("solution_str", "ground_truth", "extra_info", "data_source"),
    "messages": ("messages", "ground_truth", "metadata", "data_source"),
}
"""The parameters of the simple and the full form, by the name of the first."""

_TWO_FORMS = (
    "the simple form is (solution_str, ground_truth, extra_info), the full form (messages, ground_truth, metadata)"
)


class Scorer:
    """A loaded function that scores trajectories. Made by `load_scorer`.

    The function may be any callable with one of the two forms. Raises FunctionError if it has neither, or requires an
    argument that the runtime doesn't pass. `on_loop` is True for an async function, which runs on the event loop and
    not in a thread.
    """

    def __init__(self, ref: FunctionRef, function: Callable[..., Any]) -> None:
        self.ref = ref
        self._function = function
        self._root = Path(ref.root)
        self.on_loop = _is_coroutine_function(function)
        bound = function.keywords if isinstance(function, functools.partial) else {}
        every = _parameters(function)
        offered = _FORMS[every[0].name]
        # The keywords of a partial are already bound.
        parameters = [p for p in every if p.name not in bound]
        self._required = {p.name for p in parameters if _is_required(p)}
        for parameter in parameters:
            if _is_required(parameter) and parameter.name not in offered:
                raise FunctionError(
                    f"parameter `{parameter.name}` has no default, and the runtime doesn't pass it: {_TWO_FORMS}. "
                    f"Give `{parameter.name}` a default, or read it from the row's columns"
                )
        names = {p.name for p in parameters}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._passed = [name for name in offered if takes_any or name in names]
        self._by_position = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
        # `ground_truth: str` declares that the function can't score a row without one.
        self._needs_ground_truth = any(
            p.name == "ground_truth" and _is_required(p) and annotation_members(p.annotation, function) == {"str"}
            for p in parameters
        )

    async def score(self, trajectory: ScoringInput, timeout: float) -> Score:  # noqa: ASYNC109 - part of the result
        """Call the function on a trajectory. If it raises, takes longer than `timeout` seconds, or returns anything but
        a finite number, the score holds a failure.

        A function of the simple form gets the text of the last assistant message, which is empty if that message only
        calls tools. `extra_info` and `metadata` hold the row's other columns, `row_index` and `ground_truth`;
        `data_source` comes from the row. The function gets only the parameters it declares, as its own copies. A sync
        function runs in a thread, which is abandoned at the timeout. Any real number, also an int or a bool, counts as
        the float of the same value. A rubric's `extra_info` also says which judge to call, and how: see
        `rubric_extra_info`. The score includes the function's judge calls and their explanations.
        """
        if not self.on_loop:
            return (await self.score_all([trajectory], timeout))[0]

        async def result() -> Any:
            args, kwargs = self._arguments(trajectory)
            return await self._function(*args, **kwargs)

        with _Judged(trajectory.run_index) as judged:
            outcome = self._missing(trajectory) or await self._limited(result, timeout)
        return judged.score(self.ref.name, outcome)

    async def score_all(
        self,
        trajectories: Sequence[ScoringInput],
        timeout: float,  # noqa: ASYNC109 - part of the result
        begin: Callable[[int], object] | None = None,
    ) -> list[Score]:
        """Call a sync function on several trajectories, one after the other; arguments and results are as in `score`.

        One thread makes all calls; after a call that exceeds `timeout`, another thread takes over. `begin` is called
        with each position before its call, in the function's context.
        """
        scores: list[Score] = []
        running = _Judged(0)

        def one(position: int) -> Score | _Waiting:
            nonlocal running
            if begin is not None:
                begin(position)
            running = _Judged(trajectories[position].run_index)
            return self._score_here(trajectories[position], running)

        while len(scores) < len(trajectories):
            for result in await run_series(one, range(len(scores), len(trajectories)), timeout):
                if isinstance(result, Score):
                    scores.append(result)
                elif isinstance(result, Overdue):
                    scores.append(running.score(self.ref.name, self._too_long(timeout)))
                else:
                    scores.append(await self._finish(result, timeout))
        return scores

    async def _finish(self, waiting: _Waiting, seconds: float) -> Score:
        async def result() -> Any:
            return await waiting.awaitable

        with _Judged(waiting.judged.attempt, waiting.judged) as judged:
            outcome = await self._limited(result, seconds)
        return judged.score(self.ref.name, outcome)

    async def _limited(self, call: Callable[[], Awaitable[Any]], seconds: float) -> float | Failure:
        outcomes: list[float | Failure] = []

        async def run() -> None:
            try:
                outcomes.append(self._number(await call()))
            except BaseException as error:  # noqa: BLE001 - any exception, even SystemExit, becomes this score's failure
                outcomes.append(self._raised(error))

        # The function may swallow a cancellation, cancel its own task or raise CancelledError. In a task of its own,
        # that doesn't hide from this one whether the time limit or the caller cancelled the scoring.
        with anyio.move_on_after(seconds) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(run)
        return self._too_long(seconds) if scope.cancelled_caught else outcomes[0]

    def _score_here(self, trajectory: ScoringInput, judged: _Judged) -> Score | _Waiting:
        """Call a sync function in this thread."""
        with judged:
            missing = self._missing(trajectory)
            if missing is not None:
                return judged.score(self.ref.name, missing)
            try:
                args, kwargs = self._arguments(trajectory)
                result = self._function(*args, **kwargs)
                # A sync function may return a coroutine, which only the event loop can run.
                if inspect.isawaitable(result):
                    return _Waiting(result, judged)
                outcome = self._number(result)
            except BaseException as error:  # noqa: BLE001 - as in `_limited`
                outcome = self._raised(error)
        return judged.score(self.ref.name, outcome)

    def _missing(self, trajectory: ScoringInput) -> Failure | None:
        if not self._needs_ground_truth or trajectory.ground_truth is not None:
            return None
        return self._failure(
            "no_ground_truth",
            f"row {trajectory.row_index} has no ground_truth, and `ground_truth: str` needs one; "
            "write `ground_truth: str | None` if the function works without one",
        )

    def _too_long(self, seconds: float) -> Failure:
        return self._failure("timeout", f"took longer than {seconds:g} s")

    def _arguments(self, trajectory: ScoringInput) -> tuple[list[Any], dict[str, Any]]:
        values: dict[str, Any] = {}
        for name in self._passed:
            if name == "data_source":
                # Left out if the row has none, so that the function's default applies.
                if name in trajectory.extra or name in self._required:
                    values[name] = _copy(trajectory.extra.get(name))
            else:
                values[name] = _value(name, trajectory)
                if name == "extra_info" and self.ref.kind == "rubric":
                    values[name] = rubric_extra_info(values[name], _original_input(trajectory))
        if not self._by_position:
            return [], values
        return [values.pop(parameter.name, parameter.default) for parameter in self._by_position], values

    def _number(self, result: Any) -> float | Failure:
        if type(result) is not float and not isinstance(result, numbers.Real):
            shown = f"{reprlib.repr(result)}, which is of type {type(result).__name__}"
            return self._failure("wrong_type", f"returned {shown}; a score is a finite number")
        try:
            value = float(result)
        except OverflowError:  # a large int
            return self._failure("not_finite", "returned a number too large for a float")
        if not math.isfinite(value):
            return self._failure("not_finite", f"returned {value}; a score is a finite number")
        return value

    def _raised(self, error: BaseException) -> Failure:
        place = tracebacks.locate(error, self._root)
        return self._failure(
            "exit" if isinstance(error, SystemExit) else "exception",
            tracebacks.describe(error),
            (place.file, place.line) if place is not None else None,
            tracebacks.short_traceback(error, self._root),
        )

    def _failure(
        self, kind: FailureKind, message: str, place: tuple[str, int] | None = None, detail: str | None = None
    ) -> Failure:
        file, line = place or self._definition()
        return Failure(self.ref.kind, message, kind=kind, file=file, line=line, detail=detail)

    def _definition(self) -> tuple[str | None, int | None]:
        """Return the function's file and line, for failures without a line of their own."""
        code = getattr(inspect.unwrap(_innermost(self._function)), "__code__", None)
        if code is None:
            return self.ref.file, self.ref.line
        return relative_to_root(Path(code.co_filename), self._root), code.co_firstlineno


class _Judged:
    """A context manager around a call, which measures it and collects its judge calls, made as part of an attempt.

    `before` is the first part of the same score, if any.
    """

    def __init__(self, attempt: int, before: _Judged | None = None) -> None:
        self.attempt = attempt
        self._started: float = perf_counter() if before is None else before._started
        self._before: list[JudgeCall] = [] if before is None else before._calls
        self._contexts = ExitStack()
        self._explained: list[str] = []
        self._calls: list[JudgeCall] = []

    def __enter__(self) -> _Judged:
        self._contexts.enter_context(judged_attempt(self.attempt))
        self._calls = self._contexts.enter_context(trace_judge_calls())
        self._explained = self._contexts.enter_context(explanations())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._contexts.close()

    def score(self, name: str, outcome: float | Failure) -> Score:
        duration_ms = round((perf_counter() - self._started) * 1000, 3)
        # Copied, because an overdue function may still be making calls.
        calls = [*self._before, *self._calls]
        return Score(
            name,
            value=None if isinstance(outcome, Failure) else outcome,
            failure=outcome if isinstance(outcome, Failure) else None,
            duration_ms=duration_ms,
            explanation="\n".join([*self._explained, *(call.explanation or "" for call in calls)]).strip() or None,
            judge_calls=calls,
        )


class _Waiting(NamedTuple):
    """An awaitable that a sync function returned, still to be awaited on the event loop."""

    awaitable: Awaitable[Any]
    judged: _Judged


def load_scorer(ref: FunctionRef) -> Scorer:
    """Import a function's module and make its Scorer. `ref.root` must already be on `sys.path`.

    A reference without a module is an entry of a rubric file: `file` is the file and `attribute` the entry's id. Raises
    FunctionError, with the user's file and line, if the function can't be imported, doesn't exist, or has neither of
    the two forms.
    """
    if not ref.module:
        return _rubric_scorer(ref)
    module = _load_module(ref)
    where = ref.file or ref.module
    if not hasattr(module, ref.attribute):
        there = ", ".join(_usable_names(module)) or "none"
        raise FunctionError(f"{where} has no function `{ref.attribute}`; functions in it that can score: {there}")
    function = getattr(module, ref.attribute)
    if not callable(function):
        raise FunctionError(
            f"`{ref.attribute}` in {where} is of type {type(function).__name__} and can't be called: name a function"
        )
    try:
        return Scorer(ref, function)
    except FunctionError as error:
        raise FunctionError(f"{where}: `{ref.attribute}`: {error}") from None


def _rubric_scorer(ref: FunctionRef) -> Scorer:
    from osmosis_ai.reward_rubric.configs import load_rubric

    try:
        rubric = load_rubric(Path(ref.root, ref.file or ""), ref.attribute)
    except UsageError as error:
        raise FunctionError(str(error)) from None
    return Scorer(ref, _RubricEntry(rubric))


class _RubricEntry:
    """Scores a text by an entry of a rubric file. The row's own values override the entry's."""

    def __init__(self, rubric: Rubric) -> None:
        self._rubric = rubric

    async def __call__(self, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]) -> float:
        from osmosis_ai.reward_rubric.judge import aevaluate_rubric

        rubric = self._rubric
        result = await aevaluate_rubric(
            rubric.rubric,
            solution_str,
            {**rubric.model_info, "system_prompt": rubric.system_prompt or rubric.model_info.get("system_prompt")},
            ground_truth=rubric.ground_truth if ground_truth is None else ground_truth,
            original_input=extra_info["original_input"] or rubric.original_input,
            score_min=rubric.score_min,
            score_max=rubric.score_max,
        )
        assert isinstance(result, float)
        return result


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters; raise FunctionError if they can't be read, or have neither of the two forms."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise FunctionError(f"its signature can't be read ({error}); {_TWO_FORMS}") from None
    if not parameters:
        raise FunctionError(f"it takes no parameters; {_TWO_FORMS}")
    first = parameters[0]
    if first.name not in _FORMS or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD):
        raise FunctionError(f"its first parameter is `{first}`; {_TWO_FORMS}")
    return parameters


def _load_module(ref: FunctionRef) -> ModuleType:
    file = Path(ref.root, ref.file) if ref.file is not None else None
    try:
        if file is not None and not file.stem.isidentifier():
            module = _import_by_location(ref.module, file)
        else:
            module = importlib.import_module(ref.module)
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        raise FunctionError(_import_problem(ref, error)) from error
    loaded = getattr(module, "__file__", None)
    # An installed or already imported module may shadow the file.
    if file is not None and loaded is not None and file.exists() and not file.samefile(loaded):
        raise FunctionError(
            f"{ref.file} can't be imported: the name `{ref.module}` already stands for another module. Rename the file"
        )
    return module


def _import_by_location(name: str, file: Path) -> ModuleType:
    """Import a file with a name that isn't a valid identifier, such as `exact-match.v2.py`."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file, loader=SourceLoader(name, str(file)))
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} isn't a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_problem(ref: FunctionRef, error: BaseException) -> str:
    place = tracebacks.locate(error, Path(ref.root))
    if place is not None:
        hint = import_hint(error, Path(ref.root))
        return f"{place}: {tracebacks.describe(error)}" + (f"\n{hint}" if hint else "")
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (ref.module == missing or ref.module.startswith(missing + ".")):
        return f"there is no module `{ref.module}` in {ref.root} or on the Python path"
    return f"{ref.file or ref.module}: {tracebacks.describe(error)}"


def _usable_names(module: ModuleType) -> list[str]:
    names = []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not callable(value):
            continue
        try:
            _parameters(value)
        except FunctionError:
            continue
        names.append(name)
    return names


def _value(name: str, trajectory: ScoringInput) -> Any:
    if name == "solution_str":
        return last_answer(trajectory.messages)
    if name == "ground_truth":
        return trajectory.ground_truth
    if name == "messages":
        return _copy(trajectory.messages)
    return {**_copy(trajectory.extra), "row_index": trajectory.row_index, "ground_truth": trajectory.ground_truth}


def _copy(value: Any) -> Any:
    """Make a deep copy, for JSON types several times faster than `copy.deepcopy`."""
    kind = type(value)
    if kind is str or value is None or kind is int or kind is float or kind is bool:
        return value
    if kind is dict:
        return {key: _copy(item) for key, item in value.items()}
    if kind is list:
        return [_copy(item) for item in value]
    return copy.deepcopy(value)


def _original_input(trajectory: ScoringInput) -> str | None:
    asked = next((message for message in trajectory.messages if message.get("role") == "user"), {})
    return message_text(asked.get("content")) or None


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    function = _innermost(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - asks what it is, not whether it can be called
    )


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic
