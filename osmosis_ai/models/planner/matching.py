"""Which tools there are, and which arithmetic each can do, judged by name, description and parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from osmosis_ai.records import Tool

from .evidence import Evidence, words_in
from .expressions import SYMBOLS, Number, operation_named, operations_in, word_set
from .filling import fill_arguments
from .schemas import MISSING, Leaf, Path, Schema, cast, is_json, kind, leaves, options

__all__ = ["EXPRESSION", "Skill", "ToolSpec", "arguments_for", "find_skills", "read_tools"]

EXPRESSION = "expression"
"""The operation of a tool that takes a whole expression as text."""

_MAX_TOOLS = 200
_MAX_DESCRIPTION = 600
_UNARY = frozenset({"sqrt", "factorial", "absolute", "negate"})
_FIRST = word_set("minuend dividend numerator base from a x left first lhs start num1 number1")
_SECOND = word_set("subtrahend divisor denominator exponent b y right second rhs by num2 number2 n2 other")
_OPERAND_NAMES = _FIRST | _SECOND | word_set("number num value n operand augend addend factor term arg in val")
_LIST_NAMES = word_set("numbers values operands nums terms args arguments inputs factors addends items data xs list")
_SETTINGS = word_set("precision digits decimals places round rounding timeout seed limit verbose format scale")
_OPERATION_NAMES = word_set("operation operator op action function func method mode kind type")
_EXPRESSION_NAMES = word_set("expression expr formula equation calculation math")


@dataclass(frozen=True)
class ToolSpec:
    """One tool as the planner sees it. `words` are those of its name."""

    name: str
    description: str
    schema: Schema
    words: tuple[str, ...]
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class Skill:
    """One operation a tool can do, and where its operands go: one parameter each, or all in one list."""

    tool: ToolSpec
    operation: str
    operands: tuple[Leaf, ...]
    as_list: bool = False
    fixed: dict[Path, Any] = field(default_factory=dict)
    by_name: bool = True


def read_tools(tools: Sequence[Tool]) -> list[ToolSpec]:
    """Return the tools that can be called; anything without a name is passed over."""
    found: dict[str, ToolSpec] = {}
    for tool in tools[:_MAX_TOOLS]:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name or name in found:
            continue
        description, schema = function.get("description"), function.get("parameters")
        text = description[:_MAX_DESCRIPTION] if isinstance(description, str) else ""
        schema = schema if isinstance(schema, dict) else {}
        found[name] = ToolSpec(name, text, schema, tuple(words_in(name)), tuple(leaves(schema)))
    return list(found.values())


def find_skills(specs: Sequence[ToolSpec]) -> list[Skill]:
    """Return what arithmetic the tools can do; those that say so by their name come before those that describe it."""
    skills = [skill for spec in specs for skill in _skills_of(spec)]
    return sorted(skills, key=lambda skill: not skill.by_name)


def _skills_of(spec: ToolSpec) -> list[Skill]:
    expression = _expression_skill(spec)
    if expression is not None:
        return [expression]
    numeric = [leaf for leaf in spec.leaves if _is_operand(leaf)]
    lists = [leaf for leaf in spec.leaves if _is_number_list(leaf, spec.schema)]
    if not numeric and not lists:
        return []
    chosen = _chosen_operations(spec)
    if chosen:
        return [skill for operation, fixed in chosen for skill in _placed(spec, operation, numeric, lists, fixed, True)]
    named = operations_in(" ".join(spec.words))
    if len(named) > 1:
        return []
    described = operations_in(spec.description)
    found = named or described[:1]
    return _placed(spec, found[0], numeric, lists, {}, bool(named)) if found else []


def _placed(
    spec: ToolSpec, operation: str, numeric: list[Leaf], lists: list[Leaf], fixed: dict[Path, Any], by_name: bool
) -> list[Skill]:
    """The ways to hand operands over, if the tool's other required parameters are settled without knowing them."""
    needed = [leaf for leaf in spec.leaves if leaf.required and leaf.path not in fixed]
    skills = []
    if lists and all(leaf in lists[:1] or _settles_itself(leaf) for leaf in needed):
        skills.append(Skill(spec, operation, (lists[0],), True, fixed, by_name))
    operands = [leaf for leaf in numeric if leaf.required] or numeric
    wanted = 1 if operation in _UNARY else 2
    if not lists and len(operands) > wanted and not any(leaf.required for leaf in operands):
        operands = operands[:wanted]
    if operation in _UNARY and fixed and len(operands) == 2:
        operands = operands[:1]  # calculate(operation, a, b): the square root needs one
    others = [leaf for leaf in needed if leaf not in operands]
    if len(operands) == wanted and all(_settles_itself(leaf) for leaf in others):
        skills.append(Skill(spec, operation, tuple(_in_order(operands)), False, fixed, by_name))
    return skills


def _in_order(operands: list[Leaf]) -> list[Leaf]:
    """The operands as the operation takes them: `subtract(subtrahend, minuend)` takes its second parameter first."""

    def rank(leaf: Leaf) -> int:
        words = {leaf.name.lower(), *words_in(leaf.name)}
        return 0 if words & _FIRST else 2 if words & _SECOND else 1

    return sorted(operands, key=rank)


def _is_operand(leaf: Leaf) -> bool:
    words = set(words_in(leaf.name))
    if words & _SETTINGS:
        return False
    kinds = {kind(option) for option in leaf.options}
    if any(isinstance(option.get("enum"), list) or "const" in option for option in leaf.options):
        return False
    likely = bool(words & _OPERAND_NAMES) or leaf.name.lower() in _OPERAND_NAMES
    return bool(kinds & {"integer", "number"}) or (bool(kinds & {"string", "any"}) and likely)


def _is_number_list(leaf: Leaf, root: Schema) -> bool:
    for option in leaf.options:
        if kind(option) == "array" and not isinstance(option.get("prefixItems"), list):
            kinds = {kind(item) for item in options(option.get("items"), root)}
            if kinds & {"integer", "number"} or ("any" in kinds and leaf.name.lower() in _LIST_NAMES):
                return True
    return False


def _settles_itself(leaf: Leaf) -> bool:
    """Whether a parameter gets a value without anything from the prompt."""
    return any("const" in option or "default" in option or "enum" in option for option in leaf.options) or any(
        kind(option) == "boolean" for option in leaf.options
    )


def _chosen_operations(spec: ToolSpec) -> list[tuple[str, dict[Path, Any]]]:
    """The operations of a tool that has a parameter to choose one, and that parameter's value for each."""
    found: dict[str, dict[Path, Any]] = {}
    for leaf in spec.leaves:
        for option in leaf.options:
            values = option.get("enum")
            if isinstance(values, list):
                for value in values[:64]:
                    operation = operation_named(value) if isinstance(value, str) and is_json(value) else None
                    if operation is not None:
                        found.setdefault(operation, {leaf.path: value})
        if found:
            return list(found.items())
    for leaf in spec.leaves:
        if leaf.name.lower() in _OPERATION_NAMES and any(kind(option) == "string" for option in leaf.options):
            return _described_operations(spec, leaf)
    return []


def _described_operations(spec: ToolSpec, leaf: Leaf) -> list[tuple[str, dict[Path, Any]]]:
    """The operations of a free-text parameter: the spellings its description shows, else the usual names."""
    texts = [str(option.get("description", "")) for option in leaf.options]
    text = " ".join([*texts, spec.description])[: 2 * _MAX_DESCRIPTION]
    found: dict[str, dict[Path, Any]] = {}
    for shown in re.findall(r"[A-Za-z_]+|(?<=['\"`])(?:\*\*|//|[-+*/%^])(?=['\"`])", text):
        operation = operation_named(shown)
        if operation is not None:
            found.setdefault(operation, {leaf.path: shown})
    for operation in SYMBOLS:
        found.setdefault(operation, {leaf.path: operation})
    return list(found.items())


def _expression_skill(spec: ToolSpec) -> Skill | None:
    """The skill of `evaluate(expression)` and the like: one text parameter that holds arithmetic."""
    texts = [leaf for leaf in spec.leaves if any(kind(option) == "string" for option in leaf.options)]
    needed = [leaf for leaf in spec.leaves if leaf.required]
    named = [leaf for leaf in texts if set(words_in(leaf.name)) & _EXPRESSION_NAMES]
    about = set(words_in(spec.description)) | set(spec.words)
    for option in (option for leaf in needed for option in leaf.options):
        about |= set(words_in(str(option.get("description", ""))[:_MAX_DESCRIPTION]))
    arithmetic = about & {
        "arithmetic",
        "mathematical",
        "math",
        "maths",
        "calculate",
        "calculator",
        "evaluate",
        "compute",
    }
    if not named and arithmetic and "expression" in about and len(texts) == 1:
        named = texts
    if not named or not arithmetic or any(leaf not in named[:1] and not _settles_itself(leaf) for leaf in needed):
        return None
    by_name = bool(set(words_in(named[0].name)) & _EXPRESSION_NAMES)
    return Skill(spec, EXPRESSION, (named[0],), by_name=by_name)


def arguments_for(skill: Skill, values: Sequence[Number | str], prompt: str, attempt: int = 0) -> dict[str, Any] | None:
    """Return the arguments that hand operands to a skill, or None where its parameters don't take them.

    Args:
        skill: What to call.
        values: The operands in their order; for `EXPRESSION` its text.
        prompt: What other parameters are filled from.
        attempt: With 1, the operands take the next type that is allowed too.
    """
    fixed = dict(skill.fixed)
    if skill.operation == EXPRESSION:
        fixed[skill.operands[0].path] = values[0]
    elif skill.as_list:
        items = _list_of(skill, values, attempt)
        if items is None:
            return None
        fixed[skill.operands[0].path] = items
    else:
        if len(values) != len(skill.operands):
            return None
        for leaf, value in zip(skill.operands, values, strict=True):
            typed = cast(value, leaf.options, attempt) if not isinstance(value, str) else MISSING
            if typed is MISSING:
                return None
            fixed[leaf.path] = typed
    # Parameters that aren't operands must not pick the operands' numbers up again.
    words = re.sub(r"[0-9]", " ", prompt)
    return fill_arguments(skill.tool.schema, Evidence(words, words), fixed)


def _list_of(skill: Skill, values: Sequence[Number | str], attempt: int) -> list[Any] | None:
    for option in skill.operands[0].options:
        most = option.get("maxItems")
        if kind(option) != "array" or (isinstance(most, int) and len(values) > most):
            continue
        choices = options(option.get("items"), skill.tool.schema)
        typed = [cast(value, choices, attempt) for value in values if not isinstance(value, str)]
        if len(typed) == len(values) and not any(value is MISSING for value in typed):
            return typed
    return None
