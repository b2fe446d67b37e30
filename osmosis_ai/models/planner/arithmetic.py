"""Working an expression out with tools: what to call next, given what was called before."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from .conversation import Conversation, call_key, number_in
from .expressions import Apply, Node, Number, compute, to_text, whole
from .matching import EXPRESSION, Skill, arguments_for

__all__ = ["Evaluation", "covers"]

_MAX_PARALLEL = 16
_MAX_FAILURES = 2
_LARGEST_REPEATED_POWER = 6
_MANY = frozenset({"add", "multiply", "max", "min", "gcd", "lcm"})
_STAND_INS = {"subtract": {"add"}, "mean": {"add", "divide"}, "power": {"multiply"}, "sqrt": {"power"}}


class _Pending(enum.Enum):
    PENDING = "a result is still to come"


_PENDING = _Pending.PENDING
_Value: TypeAlias = Number | _Pending | None


def covers(skills: Sequence[Skill], node: Node) -> bool:
    """Whether the tools can do at least one step of an expression."""
    if not isinstance(node, Apply):
        return False
    can = {skill.operation for skill in skills}
    own = {node.operation, EXPRESSION} | _STAND_INS.get(node.operation, set())
    return bool(can & own) or any(covers(skills, operand) for operand in node.operands)


class Evaluation:
    """One look at an expression: `calls` are the calls to make next, `value` is what it comes to once there are none.

    Steps whose operands are known go out together. A step whose calls failed, or that no tool can do, is worked out
    here; `value` is None where there is none, as for a division by zero.

    Args:
        node: The expression.
        skills: What the tools can do, the best first.
        conversation: The calls made so far and their results.
        may_call: Whether there are turns left for calls.
    """

    def __init__(self, node: Node, skills: Sequence[Skill], conversation: Conversation, *, may_call: bool) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.value: Number | None = None
        self._skills = skills
        self._can = {skill.operation for skill in skills}
        self._conversation = conversation
        self._may_call = may_call
        value = self._at_once(node)
        self.value = None if isinstance(value, _Pending) else value

    def _at_once(self, node: Node) -> _Value:
        value = self._call(self._whole_calls(node)) if isinstance(node, Apply) else None
        return self._stepwise(node) if value is None else value

    def _stepwise(self, node: Node) -> _Value:
        if not isinstance(node, Apply):
            return whole(node)
        return self._apply(node.operation, [self._stepwise(operand) for operand in node.operands])

    def _apply(self, operation: str, operands: Sequence[_Value]) -> _Value:
        values: list[Number] = []
        for operand in operands:
            if operand is None or isinstance(operand, _Pending):
                return None if None in operands else _PENDING
            values.append(operand)
        value = self._call(self._step_calls(operation, values))
        if value is not None:
            return value
        if operation in self._can:
            # The tool takes two at a time, or it failed.
            many = operation in _MANY and len(values) > 2
            return self._pairwise(operation, values) if many else compute(operation, values)
        if self._may_call and self._can & _STAND_INS.get(operation, set()):
            value = self._stand_in(operation, values)
            if value is not None:
                return value
        return compute(operation, values)

    def _stand_in(self, operation: str, values: list[Number]) -> _Value:
        """An operation by way of others, where no tool does it."""
        if operation == "mean":
            return self._apply("divide", [self._apply("add", values), len(values)])
        if operation == "subtract":
            return self._apply("add", [values[0], -values[1]])
        if operation == "sqrt":
            return self._apply("power", [values[0], 0.5])
        exponent = whole(values[1])
        if operation == "power" and isinstance(exponent, int) and 2 <= exponent <= _LARGEST_REPEATED_POWER:
            return self._apply("multiply", [values[0]] * exponent)
        return None

    def _pairwise(self, operation: str, values: Sequence[_Value]) -> _Value:
        """Two at a time, all pairs at once."""
        while len(values) > 1:
            pairs = [values[start : start + 2] for start in range(0, len(values), 2)]
            values = [self._apply(operation, pair) if len(pair) == 2 else pair[0] for pair in pairs]
            if _PENDING in values:
                return _PENDING
        return values[0]

    def _step_calls(self, operation: str, values: list[Number]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The calls that could do a step, the most natural first."""
        for attempt in (0, 1):
            for skill in self._skills:
                if skill.operation == operation:
                    arguments = arguments_for(skill, values, self._conversation.prompt, attempt)
                    if arguments is not None:
                        yield skill.tool.name, arguments

    def _whole_calls(self, node: Node) -> Iterator[tuple[str, dict[str, Any]]]:
        for skill in self._skills:
            if skill.operation == EXPRESSION:
                described = skill.tool.description + str(skill.operands[0].options[0].get("description", ""))
                powers = ["^", "**"] if "^" in described and "**" not in described else ["**", "^"]
                for power in powers:
                    arguments = arguments_for(skill, [to_text(node, power)], self._conversation.prompt)
                    if arguments is not None:
                        yield skill.tool.name, arguments

    def _call(self, candidates: Iterator[tuple[str, dict[str, Any]]]) -> _Value:
        """The result of the first candidate that gave one; else the next one is asked for, None if none is left."""
        tried: set[str] = set()
        for name, arguments in candidates:
            key = call_key(name, arguments)
            if key in tried:
                continue
            if len(tried) == _MAX_FAILURES:
                return None
            tried.add(key)
            made = self._conversation.calls.get(key)
            if made:
                result = made[0].result
                value = None if made[0].failed or result is None else number_in(result, arguments)
                if value is not None:
                    return value
            elif self._may_call:
                if (name, arguments) not in self.calls and len(self.calls) < _MAX_PARALLEL:
                    self.calls.append((name, arguments))
                return _PENDING
        return None
