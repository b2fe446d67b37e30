"""`validate_agent_loop`: one code for each way a loop can be wrong."""

from __future__ import annotations

from typing import Any

import pytest
from loops import ADD, Adding, loop_that

from osmosis_ai.rollout import (
    AgentLoopError,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    validate_agent_loop,
)


def codes(loop: Any) -> list[str]:
    return [issue.code for issue in validate_agent_loop(loop).errors]


def with_tools(*tools: Any) -> Any:
    return loop_that(lambda ctx: None, tools)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "description": "Adds.", **function}}


def named(name: Any) -> Any:
    loop = Adding()
    loop.name = name
    return loop


@pytest.mark.parametrize("loop", [Adding(), Adding], ids=["instance", "class"])
def test_a_good_loop_is_valid(loop: Any) -> None:
    result = validate_agent_loop(loop)
    assert result.valid
    assert (result.errors, result.warnings) == ([], [])
    assert (result.agent_name, result.tool_count) == ("adding", 1)
    result.raise_if_invalid()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (None, "MISSING_NAME"),
        (5, "INVALID_NAME_TYPE"),
        (b"x", "INVALID_NAME_TYPE"),
        ("", "EMPTY_NAME"),
        (" ", "EMPTY_NAME"),
    ],
)
def test_the_name(name: Any, code: str) -> None:
    result = validate_agent_loop(named(name))
    assert [issue.code for issue in result.errors] == [code]
    assert result.agent_name is None


def test_an_object_that_is_not_a_loop_has_every_error() -> None:
    assert codes(object()) == ["MISSING_NAME", "RUN_NOT_ASYNC", "GET_TOOLS_EXCEPTION"]


def test_run_must_be_async() -> None:
    class Sync(Adding):
        def run(self, ctx: Any) -> Any:  # type: ignore[override]
            return None

    class Generator(Adding):
        async def run(self, ctx: Any) -> Any:  # type: ignore[override]
            yield

    assert codes(Sync()) == codes(Generator()) == ["RUN_NOT_ASYNC"]
    assert "async generator" in validate_agent_loop(Generator()).errors[0].message


def raising() -> None:
    raise ValueError("no tools today")


async def coroutine() -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("tools", "code"),
    [
        (lambda: None, "GET_TOOLS_RETURNS_NONE"),
        (lambda: "add", "GET_TOOLS_INVALID_TYPE"),
        (lambda: {"add": 1}, "GET_TOOLS_INVALID_TYPE"),
        (lambda: iter([]), "GET_TOOLS_INVALID_TYPE"),
        (coroutine, "GET_TOOLS_INVALID_TYPE"),
        (lambda: ["add"], "GET_TOOLS_INVALID_TYPE"),
        (raising, "GET_TOOLS_EXCEPTION"),
    ],
)
def test_get_tools_must_return_a_list_of_tools(tools: Any, code: str) -> None:
    assert codes(loop_that(lambda ctx: None, tools)) == [code]


def test_an_exception_of_get_tools_is_shown() -> None:
    (issue,) = validate_agent_loop(loop_that(lambda ctx: None, raising)).errors
    assert str(issue) == "GET_TOOLS_EXCEPTION: get_tools raised ValueError: no tools today"


def test_no_tools_are_fine() -> None:
    result = validate_agent_loop(with_tools())
    assert (result.valid, result.warnings, result.tool_count) == (True, [], 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"function": ADD["function"]}, ["MISSING_TOOL_TYPE"]),
        ({**ADD, "type": "code"}, ["UNKNOWN_TOOL_TYPE"]),
        ({"type": "function"}, ["MISSING_FUNCTION"]),
        ({"type": "function", "function": "add"}, ["MISSING_FUNCTION"]),
        ({}, ["MISSING_TOOL_TYPE", "MISSING_FUNCTION"]),
        ({"type": "function", "function": {"description": "Adds."}}, ["MISSING_FUNCTION_NAME"]),
        (tool(name=""), ["INVALID_FUNCTION_NAME"]),
        (tool(name=5), ["INVALID_FUNCTION_NAME"]),
        (tool(name="add numbers"), ["INVALID_FUNCTION_NAME"]),
        (tool(name="x" * 65), ["INVALID_FUNCTION_NAME"]),
        (tool(parameters={"type": "array"}), ["PARAMETERS_TYPE_NOT_OBJECT"]),
        (tool(parameters={"properties": {}}), ["PARAMETERS_TYPE_NOT_OBJECT"]),
        (tool(parameters="object"), ["PARAMETERS_TYPE_NOT_OBJECT"]),
        (tool(parameters=None), []),
        (tool(parameters={}), []),
        (tool(name="x" * 64), []),
    ],
)
def test_each_tool(given: dict[str, Any], expected: list[str]) -> None:
    assert codes(with_tools(given)) == expected


def test_tools_as_models_are_checked_the_same() -> None:
    model = OpenAIFunctionToolSchema(type="other", function=OpenAIFunctionSchema(name=""))
    result = validate_agent_loop(with_tools(model))
    assert [issue.code for issue in result.errors] == ["UNKNOWN_TOOL_TYPE", "INVALID_FUNCTION_NAME"]
    assert [issue.code for issue in result.warnings] == ["MISSING_DESCRIPTION"]


def test_two_tools_of_one_name_are_an_error() -> None:
    assert codes(with_tools(ADD, ADD)) == ["DUPLICATE_FUNCTION_NAME"]


@pytest.mark.parametrize("description", [None, "", "  "])
def test_a_missing_description_is_a_warning(description: Any) -> None:
    result = validate_agent_loop(with_tools(tool(description=description)))
    assert result.valid
    assert [(issue.code, issue.subject) for issue in result.warnings] == [("MISSING_DESCRIPTION", "add")]


def test_an_invalid_loop_is_raised_with_all_its_errors() -> None:
    loop = loop_that(lambda ctx: None, [{}, tool(name="")])
    with pytest.raises(AgentLoopError) as caught:
        validate_agent_loop(loop).raise_if_invalid()
    lines = str(caught.value).splitlines()
    assert lines[0] == "the agent loop made can't be served:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "MISSING_TOOL_TYPE",
        "MISSING_FUNCTION",
        "INVALID_FUNCTION_NAME",
    ]


def test_a_class_that_cant_be_made_without_arguments_is_an_error() -> None:
    class Needy(Adding):
        def __init__(self, key: str) -> None:
            super().__init__()

    (issue,) = validate_agent_loop(Needy).errors
    assert issue.code == "CANNOT_BE_CREATED"
    assert "Needy() raised TypeError" in issue.message
