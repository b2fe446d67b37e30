"""The offline models: their answers and calls, as pure functions of a row, a conversation and the tools."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from osmosis_ai.config import RunConfig
from osmosis_ai.data.solution import read_solution
from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.models.engines import ENGINES
from osmosis_ai.models.host import create_model, import_model
from osmosis_ai.models.offline import offline_names
from osmosis_ai.models.offline.answers import render
from osmosis_ai.models.offline.schemas import smallest_arguments
from osmosis_ai.options import declared_options
from osmosis_ai.records import Completion, Message, ModelSpec, Row, Tool, Usage

pytestmark = pytest.mark.anyio

OPENING: list[Message] = [{"role": "system", "content": "End with `#### x`."}, {"role": "user", "content": "How many?"}]
SOLUTION: list[Any] = [
    [{"tool": "count", "arguments": {"kind": "a"}}, {"tool": "count", "arguments": {"kind": "b"}}],
    {"tool": "add", "arguments": {"a": "{{result[0]}}", "b": "{{result[1].items[-1].n}}", "note": "{{result[0]}}"}},
    "#### {{result[2]}}",
]


def tool(name: str, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


NUMBER = {"type": "number"}
TOOLS = [tool("count", kind={"type": "string"}), tool("add", a=NUMBER, b=NUMBER, note={"type": "string"})]


def row(solution: list[Any] | None = None, ground_truth: str | None = None) -> Row:
    steps = None if solution is None else read_solution(solution)
    return Row(3, "id", "End with `#### x`.", "How many?", ground_truth, solution=steps)


async def complete(name: str, row: Row, messages: list[Message], tools: list[Tool] = TOOLS) -> Completion:
    host = create_model(ModelSpec(name, "offline", name))
    await host.probe()
    assert host.price_known()
    completion = await host.for_rollout(row, 0).complete(messages, tools, {})
    await host.aclose()
    return completion


def calls(message: Message) -> list[tuple[str, dict[str, Any]]]:
    made = [call["function"] for call in message.get("tool_calls", [])]
    return [(call["name"], json.loads(call["arguments"])) for call in made]


async def play(row: Row, results: list[str]) -> list[Message]:
    """Return the oracle's conversation over a row whose calls give these results in turn."""
    messages = [*OPENING]
    given = iter(results)
    while True:
        completion = await complete("offline/oracle", row, messages)
        messages.append(completion.message)
        made = completion.message.get("tool_calls")
        assert completion.finish_reason == ("tool_calls" if made else "stop")
        if not made:
            return messages
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": next(given)} for call in made]


async def test_the_oracle_plays_a_solution() -> None:
    messages = await play(row(SOLUTION), ["2.0", '{"items": [{"n": 1}, {"n": 40.5}]}', "42.0"])
    assert calls(messages[2]) == [("count", {"kind": "a"}), ("count", {"kind": "b"})]
    # A number where a number is wanted; as the tool wrote it where a text is.
    assert calls(messages[5]) == [("add", {"a": 2, "b": 40.5, "note": "2.0"})]
    assert messages[-1] == {"role": "assistant", "content": "#### 42"}


async def test_a_tool_that_changes_changes_the_answer() -> None:
    messages = await play(row(SOLUTION), ["2", '{"items": [{"n": 40}]}', "Error: it is broken"])
    assert messages[-1]["content"] == "#### Error: it is broken"


async def test_a_reference_that_leads_nowhere_ends_the_rollout() -> None:
    with pytest.raises(
        ModelError, match=r"row 3's solution .*\{\{result\[1\].*there is no 'items' in the result: Error: broken"
    ) as caught:
        await play(row(SOLUTION), ["2", "Error: broken"])
    assert caught.value.kind == "solution"
    assert not caught.value.retryable


async def test_without_a_last_text_the_ground_truth_is_the_answer() -> None:
    assert (await play(row(SOLUTION[:1], "7"), ["1", "2"]))[-1]["content"] == "#### 7"
    assert (await play(row(SOLUTION[:1]), ["1", "2"]))[-1]["content"] == ""


async def test_without_a_solution_the_oracle_answers_with_the_ground_truth() -> None:
    completion = await complete("offline/oracle", row(None, "42"), OPENING)
    assert completion.message == {"role": "assistant", "content": "#### 42"}
    assert (completion.usage, completion.cost_usd, completion.model) == (Usage(), 0.0, "offline/oracle")


async def test_a_tool_that_samples_gets_the_ground_truth() -> None:
    completion = await complete("offline/oracle", row(SOLUTION, "42"), OPENING, [])
    assert completion.message == {"role": "assistant", "content": "#### 42"}


async def test_without_anything_to_play_the_oracle_calls_every_tool() -> None:
    completion = await complete("offline/oracle", row(), OPENING)
    assert completion == await complete("offline/smoke", row(), OPENING)
    assert completion.model == "offline/smoke"


async def test_smoke_calls_every_tool_once_and_then_stops() -> None:
    first = await complete("offline/smoke", row(SOLUTION, "42"), OPENING)
    assert calls(first.message) == [("count", {"kind": "a"}), ("add", {"a": 1, "b": 1, "note": "a"})]
    second = await complete("offline/smoke", row(), [*OPENING, first.message])
    assert second.message == {"role": "assistant", "content": ""}
    assert (await complete("offline/smoke", row(), OPENING, [])).message == second.message


async def test_empty_says_nothing() -> None:
    completion = await complete("offline/empty", row(SOLUTION, "42"), OPENING)
    assert completion.message == {"role": "assistant", "content": ""}


def test_an_offline_model_that_does_not_exist() -> None:
    for use in (create_model, import_model):
        with pytest.raises(ModelStartError, match="offline/other"):
            use(ModelSpec("offline/other", "offline", "offline/other"))


@pytest.mark.parametrize("name", offline_names())
def test_every_offline_model_is_there(name: str) -> None:
    import_model(ModelSpec(name, "offline", name))


def test_the_table_of_engines_imports_none_of_them() -> None:
    code = (
        "import sys, osmosis_ai.models.engines; print({'msgspec', 'anyio', 'aiohttp', 'litellm'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
    assert [info.prefix for info in ENGINES.values()].index("") == len(ENGINES) - 1, "it takes what no other takes"


@pytest.mark.parametrize(
    ("answer", "asked", "written"),
    [
        ("42", "Answer with a number.", "42"),
        ("42", "End with the final answer in the form `#### <number>`.", "#### 42"),
        ("42", "Put the final answer into \\boxed{}.", "\\boxed{42}"),
        ("42", "Answer as <answer>…</answer>.", "<answer>42</answer>"),
        ("1,250", 'Reply with {"answer": <number>}.', '{"answer": 1250}'),
        ("Paris", 'Reply with {"answer": "…"}.', '{"answer": "Paris"}'),
        ("42", "Finish with Answer: <number>", "Answer: 42"),
    ],
)
def test_the_form_an_answer_is_asked_for_in(answer: str, asked: str, written: str) -> None:
    assert render(answer, asked, "") == written
    assert render(answer, "", asked) == written


SCHEMAS: dict[str, tuple[Any, Any]] = {
    "integer": ({"type": "integer"}, 1),
    "a minimum": ({"type": "integer", "minimum": 5}, 5),
    "a maximum": ({"type": "number", "maximum": -2.5}, -2.5),
    "exclusive bounds": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
    "an exclusive minimum": ({"type": "integer", "exclusiveMinimum": 9.5}, 10),
    "a step": ({"type": "integer", "minimum": 12, "multipleOf": 5}, 15),
    "text": ({"type": "string"}, "a"),
    "a length": ({"type": "string", "minLength": 3, "maxLength": 4}, "aaa"),
    "empty text": ({"type": "string", "maxLength": 0}, ""),
    "a pattern": ({"type": "string", "pattern": "^[A-Z]{3}$"}, "AAA"),
    "a pattern of digits": ({"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}, "2000-01-01"),
    "a format": ({"type": "string", "format": "date-time"}, "2000-01-01T00:00:00Z"),
    "an example": ({"type": "string", "pattern": "^(x|y){2}z$", "examples": ["xyz"]}, "xyz"),
    "a default": ({"type": "string", "default": "d"}, "d"),
    "boolean": ({"type": "boolean"}, False),
    "const": ({"const": {"x": 1}}, {"x": 1}),
    "enum": ({"enum": ["b", "a"]}, "b"),
    "null": ({"type": "null"}, None),
    "optional": ({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 2}]}, 2),
    "types": ({"type": ["null", "string"]}, "a"),
    "oneOf": ({"oneOf": [{"type": "array", "items": {}}, {"type": "string"}]}, "a"),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, 3),
    "anything": ({}, "a"),
    "an array": ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 1]),
    "unique numbers": ({"type": "array", "items": {"type": "integer"}, "minItems": 3, "uniqueItems": True}, [1, 2, 3]),
    "unique values": ({"items": {"enum": ["x", "y"]}, "minItems": 2, "uniqueItems": True}, ["x", "y"]),
    "a tuple": ({"type": "array", "prefixItems": [{"type": "string"}, NUMBER], "minItems": 2}, ["a", 1]),
    "required alone": ({"properties": {"x": NUMBER, "y": NUMBER}, "required": ["y"]}, {"y": 1}),
    "minProperties": ({"properties": {"x": NUMBER, "y": NUMBER}, "minProperties": 1}, {"x": 1}),
    "a reference": ({"$ref": "#/$defs/Point"}, {}),
    "a reference to nothing": ({"$ref": "#/$defs/Nothing"}, "a"),
    "a list of references": ({"type": "array", "items": {"$ref": "#/$defs/Leaf"}, "minItems": 1}, [{"size": "s"}]),
}
DEFINITIONS = {
    "Point": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "to": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}},
        "required": ["x", "to"],
    },
    "Leaf": {"type": "object", "properties": {"size": {"enum": ["s", "m"]}, "more": {}}, "required": ["size"]},
}


@pytest.mark.parametrize(("schema", "value"), SCHEMAS.values(), ids=SCHEMAS)
def test_the_smallest_argument(schema: Any, value: Any) -> None:
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"], "$defs": DEFINITIONS}
    arguments = smallest_arguments(parameters)
    if "$ref" not in schema:
        assert arguments == {"p": value}
    if "Nothing" not in str(schema):
        jsonschema.validate(arguments, parameters)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"type": "object"},
        {"required": "p", "properties": []},
        {"required": ["p"], "properties": {"p": {"enum": [], "minLength": "x"}}},
        {"required": ["p"], "properties": {"p": {"type": "string", "pattern": "(", "minLength": 10**9}}},
        {"required": ["p"], "properties": {"p": {"$ref": "#/properties/p"}}},
        {"required": ["p"], "properties": {"p": {"$ref": "#"}}},
        {"required": ["p"], "properties": {"p": {"minItems": 10**9, "items": {"$ref": "#"}}}},
        {"required": ["p"], "properties": {"p": {"type": "number", "multipleOf": 0, "minimum": "x"}}},
        {"required": ["p"], "properties": {"p": {"allOf": [5, {"required": 3}], "required": ["q"]}}},
    ],
)
def test_no_schema_makes_it_fail(schema: Any) -> None:
    json.dumps(smallest_arguments(schema))


def test_a_pattern_that_backtracks_is_given_up() -> None:
    """Forty characters would take minutes."""
    schema = {"required": ["p"], "properties": {"p": {"type": "string", "pattern": r"^(([a-z])+.)+[A-Z]([a-z])+$"}}}
    assert isinstance(smallest_arguments(schema)["p"], str)


def test_help_and_documentation_name_every_offline_model() -> None:
    options = {option.name: option.option for option in declared_options(RunConfig)}
    assert ", ".join(offline_names()) in options["model"].help
    assert offline_names()[0] in options["model"].default
    documented = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in offline_names() if f"| `{name}` |" not in documented] == []
