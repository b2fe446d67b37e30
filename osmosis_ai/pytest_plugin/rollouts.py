"""The fixture `rollout`: run one rollout in this process, and make assertions about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import msgspec

from osmosis_ai.conversation import last_answer
from osmosis_ai.records import Failure, FinishReason, JsonObject, Message, Score, Usage
from osmosis_ai.store.queries import ScoredRollout
from osmosis_ai.text import counted

if TYPE_CHECKING:
    from osmosis_ai.pytest_plugin.harness import ItemRuns

__all__ = ["Call", "Calls", "RolloutResult", "RunRollout"]


class Call(tuple[str, Any]):
    """One tool call: equal to the pair of its name and its arguments.

    Attributes:
        result: The text that the model saw; None if the rollout ended first.
        error: Why the call failed; None if it succeeded.
    """

    result: str | None
    error: str | None

    def __new__(cls, name: str, arguments: Any, result: str | None, error: str | None) -> Call:
        call = super().__new__(cls, (name, arguments))
        call.result, call.error = result, error
        return call

    @property
    def name(self) -> str:
        """The tool's name."""
        return self[0]

    @property
    def arguments(self) -> Any:
        """The arguments as an object, or as text if the model wrote invalid JSON."""
        return self[1]


class Calls(list[Call]):
    """A rollout's tool calls in order, equal to a list of (name, arguments) pairs. `calls["price"]` is one tool's."""

    @property
    def names(self) -> set[str]:
        """The tools that were called."""
        return {call.name for call in self}

    @overload
    def __getitem__(self, key: SupportsIndex) -> Call: ...
    @overload
    def __getitem__(self, key: slice) -> list[Call]: ...
    @overload
    def __getitem__(self, key: str) -> list[Call]: ...
    def __getitem__(self, key: SupportsIndex | slice | str) -> Call | list[Call]:
        if isinstance(key, str):
            return _CallsOf(self, key)
        return super().__getitem__(key)


class _CallsOf(list[Call]):
    """The calls of one tool. If there are none, failure messages list the tools that were called."""

    def __init__(self, calls: Calls, tool: str) -> None:
        super().__init__(call for call in calls if call.name == tool)
        self._others = sorted(calls.names - {tool})
        self._tool = tool

    @overload
    def __getitem__(self, key: SupportsIndex) -> Call: ...
    @overload
    def __getitem__(self, key: slice) -> list[Call]: ...
    def __getitem__(self, key: SupportsIndex | slice) -> Call | list[Call]:
        try:
            return super().__getitem__(key)
        except IndexError:
            times = (
                f"called {counted(len(self), 'time')}"
                if self
                else f"not called; called: {', '.join(self._others) or 'none'}"
            )
            raise IndexError(f"{self._tool} was {times}") from None


class RolloutResult:
    """A finished rollout with its scores.

    Attributes:
        calls: Its tool calls.
        messages: The whole conversation.
        answer: The text of the last reply.
        turns: Number of model calls.
        finish: Why it ended: `stop`, `length`, `max_turns`, `max_tokens_total`, `timeout` or `error`.
        failure: Why it failed; None if it ended without error.
        usage: The tokens of its model calls; replayed calls count as zero.
        scores: The scores by function; None where one couldn't be computed.
        command: The command that shows the rollout.
    """

    def __init__(self, scored: ScoredRollout, command: str) -> None:
        rollout = scored.stored.rollout
        self.messages: list[Message] = rollout.messages
        self.calls = _calls(rollout.messages, {(call.turn, call.id): call.error for call in rollout.tool_calls})
        self.answer = last_answer(rollout.messages)
        self.turns = len(rollout.turns)
        self.finish: FinishReason = rollout.finish_reason
        self.failure: Failure | None = rollout.failure
        self.usage: Usage = rollout.usage
        self.scores: dict[str, float | None] = {name: score.value for name, score in scored.scores.items()}
        self.command = command
        self.stored = scored

    def score(self, function: str) -> float:
        """Return a function's score.

        Args:
            function: Its name as in reports, or the part after the colon.

        Raises:
            AssertionError: The score couldn't be computed; the message says why, with file and line.
            LookupError: No function has this name.
        """
        __tracebackhide__ = True
        found = self.stored.scores.get(full_name(function, self.stored.scores))
        if self.failure is not None and found is None:
            raise AssertionError(f"there is no score: the rollout failed: {self.failure.message}")
        if found is None:
            there = ", ".join(self.stored.scores) or "nothing was scored"
            raise LookupError(f"there is no score of {function!r}; there are {there}")
        if found.value is None:
            raise AssertionError(f"{function} could not be computed: {_why(found)}")
        return found.value

    def __repr__(self) -> str:
        return f"<rollout: {self.finish}, {self.turns} turns, calls {self.calls!r}, scores {self.scores!r}>"


class RunRollout:
    """The fixture `rollout`. Call it to run one rollout in this process."""

    def __init__(self, runs: ItemRuns) -> None:
        self._runs = runs

    def __call__(
        self,
        row: int | JsonObject = 0,
        *,
        user: str | None = None,
        system: str | None = None,
        ground_truth: str | None = None,
        attempt: int = 0,
        **options: Any,
    ) -> RolloutResult:
        """Run one rollout and score it.

        Args:
            row: The index of a row of the dataset, or a row as a dict.
            user: The user prompt, in place of a row.
            system: The system prompt for `user`.
            ground_truth: The ground truth for `user`.
            attempt: The number of the attempt at the row, from 0. Each has its own recordings.
            options: Other options of `osmosis test`, with `_` for `-`; `model` may be a script of replies.
        """
        if user is not None:
            row = {"system_prompt": system or "You are a helpful assistant.", "user_prompt": user}
            if ground_truth is not None:
                row["ground_truth"] = ground_truth
        return self._runs.one(row, attempt, options)


def full_name(function: str, names: Iterable[str]) -> str:
    """Return the full name that a short name uniquely stands for, else the name itself."""
    alike = [name for name in names if name == function or name.rpartition(":")[2] == function]
    return alike[0] if len(alike) == 1 else function


def _calls(messages: Sequence[Message], errors: dict[tuple[int, str], Any]) -> Calls:
    # Results are matched by turn and id, because models reuse ids in later turns.
    calls = Calls()
    waiting: list[tuple[str, Any, str, int]] = []
    turn = -1
    results: dict[tuple[int, str], str] = {}
    for message in messages:
        if message.get("role") == "assistant":
            turn += 1
            for call in message.get("tool_calls") or ():
                function = call["function"]
                waiting.append((function["name"], _arguments(function.get("arguments")), str(call.get("id")), turn))
        elif message.get("role") == "tool":
            results[turn, str(message.get("tool_call_id"))] = str(message.get("content"))
    for name, arguments, call_id, turn in waiting:
        calls.append(Call(name, arguments, results.get((turn, call_id)), errors.get((turn, call_id))))
    return calls


def _arguments(text: Any) -> Any:
    try:
        return msgspec.json.decode(text) if isinstance(text, str) else text
    except (msgspec.DecodeError, RecursionError):
        return text


def _why(score: Score) -> str:
    failure = score.failure
    if failure is None:
        return "no reason is recorded"
    return f"{failure.file}:{failure.line}: {failure.message}" if failure.file else failure.message
