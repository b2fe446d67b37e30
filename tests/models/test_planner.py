"""The offline planner: as a pure function, and on tools it has never seen."""

from __future__ import annotations

import ast
import json
import operator
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import anyio
import jsonschema
import pytest
from fastmcp import Client, FastMCP
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from osmosis_ai.models.planner import PlannerModel, plan

Messages = list[dict[str, Any]]
HASHES = "Use the tools. End with the answer as `#### x`."


def tool(name: str, description: str = "", /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


NUMBER = {"type": "number"}
ADD = tool("add", "Add two numbers.", a=NUMBER, b=NUMBER)
DIVIDE = tool("divide", "Divide a by b.", a=NUMBER, b=NUMBER)


def ask(prompt: str, system: str = "") -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def answered(messages: Messages, reply: dict[str, Any], *results: str) -> Messages:
    """The conversation after a reply and the results of its calls."""
    made = zip(reply["tool_calls"], results, strict=True)
    return [*messages, reply, *({"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in made)]


# ---------------------------------------------------------------- arithmetic without tools, against Python's parser

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def python_value(text: str) -> float:
    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        assert isinstance(node, ast.Constant)
        return node.value

    return value(ast.parse(text, mode="eval").body)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner, st.booleans(), st.booleans())
    joined = pair.map(lambda p: f"{'(' * p[3]}{p[0]}{' ' * p[4]}{p[1]}{' ' * p[4]}{p[2]}{')' * p[3]}")
    squares = inner.map(lambda text: f"({text}) ** 2")
    return joined | squares | inner.map(lambda text: f"-({text})")


NUMBERS = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)


@given(st.recursive(NUMBERS, combined, max_leaves=8).filter(lambda text: any(sign in text for sign in "+-*/%")))
def test_expressions_mean_what_they_mean_in_python(text: str) -> None:
    answer = plan(ask(f"What is {text}?"), [])["content"]
    try:
        expected = python_value(text)
    except ZeroDivisionError:
        assert answer == "undefined"
    else:
        if answer == "unknown":  # a sign before a number is not arithmetic yet
            assert isinstance(ast.parse(text, mode="eval").body, ast.UnaryOp)
        else:
            assert float(answer) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is 2 + 3 * 4?", "14"),
        ("12 × 3 − 5 ÷ 5", "35"),
        ("-2^2", "-4"),
        ("2**3**2", "512"),
        ("1,234.5 + 2", "1236.5"),
        ("17 % 5", "2"),
        ("15% of 80", "12"),
        ("0.1 + 0.2", "0.3"),
        ("2(3 + 4)", "14"),
        ("**3 + 4**", "7"),
        ("((((1 + 2", "3"),
        ("sqrt(16) + max(3, 4, 5)", "9"),
        ("the square root of 16 plus 2", "6"),
        ("5! / 10", "12"),
        ("the sum of 3 and 4", "7"),
        ("the sum of [1, 2, 3]", "6"),
        ("the product of 3 and the sum of 4 and 5", "27"),
        ("the difference between 10 and 4, times 2", "6"),
        ("subtract 3 from 10", "7"),
        ("add 3 to 4", "7"),
        ("12 divided by 4", "3"),
        ("the average of 3, 4 and 8", "5"),
        ("the remainder when 17 is divided by 5", "2"),
        ("raise 2 to the power of 10", "1024"),
        ("twenty-five minus six", "19"),
        ("Add 3 and 4, then multiply the result by 5. Then subtract 2.", "33"),
        ("Round 10 / 3 to two decimals: round it to 2 decimals", "3.33"),
        ("3 / 0", "undefined"),
        ("9 ** 9 ** 9", "undefined"),
        ("Meet on 2024-01-15 at 10:30", "unknown"),
        ("Call 555-123-4567", "unknown"),
        ("Hello!", "unknown"),
    ],
)
def test_answers_directly_without_tools(prompt: str, answer: str) -> None:
    assert plan(ask(prompt), [])["content"] == answer


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("Answer as `#### x`.", "#### 7"),
        ("#### <number>", "#### 7"),
        ("Put your final answer in \\boxed{}.", "\\boxed{7}"),
        ("Reply with <answer>x</answer>.", "<answer>7</answer>"),
        ("Think first, then reply in <answer> tags.", "<answer>7</answer>"),
        ("Reply with <answer>\\boxed{x}</answer>.", "<answer>\\boxed{7}</answer>"),
        ('Reply as JSON: {"reasoning": "…", "answer": <number>}', '{"reasoning": "", "answer": 7}'),
        ("End with `Final answer: <number>`.", "Final answer: 7"),
        ("#### Rules\nBe kind.", "7"),
        ("Be kind.", "7"),
    ],
)
def test_answers_in_the_form_asked_for(system: str, content: str) -> None:
    assert plan(ask("3 + 4", system), [])["content"] == content


# ---------------------------------------------------------------- tool results


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ("7", "#### 7"),
        ("7.0", "#### 7"),
        ('{"result": 7}', "#### 7"),
        ('{"a": 3, "b": 4, "total": "7"}', "#### 7"),
        ('{"data": {"value": 7.5}}', "#### 7.5"),
        ("[7]", "#### 7"),
        ("The sum is 7", "#### 7"),
        ("3 + 4 = 7", "#### 7"),
        ("7 comes from 3 and 4", "#### 7"),
        ("1,234", "#### 1234"),
        ("-7", "#### -7"),
    ],
)
def test_reads_the_number_a_tool_returns(result: str, answer: str) -> None:
    messages = ask("What is 3 + 4?", HASHES)
    assert plan(answered(messages, plan(messages, [ADD]), result), [ADD])["content"] == answer


@pytest.mark.parametrize(
    "error",
    [
        "Error: down",
        "Error calling tool 'add': down",
        '{"error": "down"}',
        "1 validation error for call[add]",
        "ok",
        "",
    ],
)
def test_a_failing_tool_is_tried_once_more_with_another_type(error: str) -> None:
    messages = ask("What is 3 + 4?", HASHES)
    first = plan(messages, [ADD])
    assert first["tool_calls"][0]["function"]["arguments"] == '{"a": 3, "b": 4}'
    messages = answered(messages, first, error)
    second = plan(messages, [ADD])
    assert second["tool_calls"][0]["function"]["arguments"] == '{"a": 3.0, "b": 4.0}'
    assert plan(answered(messages, second, error), [ADD])["content"] == "#### 7"


def test_what_no_tool_can_do_is_worked_out_without_one() -> None:
    messages = ask("What is 7 / (3 + 4)?", HASHES)
    first = plan(messages, [ADD])
    assert calls_of(first) == [("add", {"a": 3, "b": 4})]
    assert plan(answered(messages, first, "7"), [ADD])["content"] == "#### 1"


def test_independent_steps_go_out_together_and_results_are_used() -> None:
    messages = ask("What is (1 + 2) / (3 + 4)?")
    first = plan(messages, [ADD, DIVIDE])
    assert calls_of(first) == [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
    # The results are the tool's, right or wrong.
    second = plan(answered(messages, first, "100", "8"), [ADD, DIVIDE])
    assert calls_of(second) == [("divide", {"a": 100, "b": 8})]
    ids = [call["id"] for message in (first, second) for call in message["tool_calls"]]
    assert len(set(ids)) == 3


def test_ids_stay_unique_beside_foreign_ones_and_after_another_question() -> None:
    messages = ask("What is 3 + 4?")
    first = plan(messages, [ADD])
    used = first["tool_calls"][0]["id"]
    messages = [*answered(messages, first, "7"), {"role": "assistant", "content": "7"}]
    later = plan([*messages, {"role": "user", "content": "And 3 + 4 again?"}], [ADD])
    assert later["tool_calls"][0]["id"] != used
    foreign = [{"role": "assistant", "content": None, "tool_calls": [{**first["tool_calls"][0], "id": "call_1_0"}]}]
    assert plan([*foreign, *ask("What is 3 + 4?")], [ADD])["tool_calls"][0]["id"] != "call_1_0"


@pytest.mark.parametrize(
    ("choice", "arguments"),
    [
        (tool("calc_plus", a={"type": "integer"}, b={"type": "integer"}), {"a": 3, "b": 4}),
        (tool("soma", "Returns the sum of x and y", x=NUMBER, y=NUMBER), {"x": 3, "y": 4}),
        (tool("f", "Computes a + b", a=NUMBER, b=NUMBER), {"a": 3, "b": 4}),
        (tool("sum", numbers={"type": "array", "items": NUMBER}), {"numbers": [3, 4]}),
        (tool("add", a={"type": "string"}, b={"type": "string"}), {"a": "3", "b": "4"}),
        (tool("add", a={"anyOf": [{"type": "null"}, NUMBER]}, b={"type": ["number", "null"]}), {"a": 3, "b": 4}),
        (tool("calc", op={"enum": ["SUB", "ADD"]}, a=NUMBER, b=NUMBER), {"op": "ADD", "a": 3, "b": 4}),
        (tool("calc", op={"enum": ["-", "+"]}, a=NUMBER, b=NUMBER), {"op": "+", "a": 3, "b": 4}),
        (
            tool("evaluate", "Evaluates an arithmetic expression", expression={"type": "string"}),
            {"expression": "3 + 4"},
        ),
    ],
    ids=lambda value: None,
)
def test_recognises_addition(choice: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert calls_of(plan(ask("What is 3 + 4?"), [choice])) == [(choice["function"]["name"], arguments)]


@pytest.mark.parametrize(
    "choice",
    [
        tool("add_user", "Adds a user", name={"type": "string"}, age={"type": "integer"}),
        tool("multiply_add", a=NUMBER, b=NUMBER),
        tool("add", a={"type": "number", "maximum": 2}, b=NUMBER),
    ],
    ids=lambda value: value["function"]["name"],
)
def test_what_only_looks_like_addition_is_not_used_for_it(choice: dict[str, Any]) -> None:
    plus = tool("f", "Returns the sum.", p=NUMBER, q=NUMBER)
    assert calls_of(plan(ask("What is 3 + 4?"), [choice, plus])) == [("f", {"p": 3, "q": 4})]


# ---------------------------------------------------------------- repositories it has never seen


def enum_server() -> FastMCP:
    server: FastMCP = FastMCP("enum")

    @server.tool
    def calculate(
        operation: Literal["addition", "subtraction", "multiplication", "division"], left: float, right: float
    ) -> dict[str, float]:
        """Perform one arithmetic operation."""
        names = {"addition": ast.Add, "subtraction": ast.Sub, "multiplication": ast.Mult, "division": ast.Div}
        return {"result": OPERATORS[names[operation]](left, right)}

    return server


def expression_server() -> FastMCP:
    server: FastMCP = FastMCP("expression")

    @server.tool
    def evaluate(expression: str, precision: int = 6) -> str:
        """Evaluate a mathematical expression."""
        return f"Result: {python_value(expression):.{precision}f}"

    return server


def list_server() -> FastMCP:
    server: FastMCP = FastMCP("lists")

    @server.tool
    def sum_numbers(numbers: list[float]) -> float:
        """Return the total of a list of numbers."""
        return sum(numbers)

    @server.tool
    def prod(values: list[int]) -> str:
        """Multiply all values."""
        product = 1
        for value in values:
            product *= value
        return f"The product is {product}"

    return server


def text_server() -> FastMCP:
    server: FastMCP = FastMCP("text")

    @server.tool
    def reverse_text(text: str) -> str:
        """Reverse a text."""
        return text[::-1]

    @server.tool
    def to_upper(s: str) -> str:
        """Convert to upper case letters."""
        return s.upper()

    @server.tool
    def count_letter(text: str, letter: Annotated[str, Field(min_length=1, max_length=1)]) -> int:
        """Count how often a letter occurs in a text."""
        return text.count(letter)

    @server.tool
    def concat(first: str, second: str, separator: str = "") -> str:
        """Join two strings."""
        return first + separator + second

    return server


def lookup_server() -> FastMCP:
    server: FastMCP = FastMCP("lookup")

    @server.tool
    def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
        """Current weather of a city."""
        return f"{city}: {21 if unit == 'celsius' else 70} degrees"

    @server.tool
    def search(query: str, limit: Annotated[int, Field(ge=1, le=10)] = 3, tags: list[str] | None = None) -> str:
        """Search documents."""
        return f"{limit} documents on {query}"

    @server.tool
    def book_table(restaurant: str, date: str, people: int, outdoor: bool = False) -> str:
        """Book a table at a restaurant."""
        return f"{restaurant}, {date}, {people}, {'outside' if outdoor else 'inside'}"

    return server


def game_server() -> FastMCP:
    server: FastMCP = FastMCP("game")
    place = [0, 0]

    @server.tool
    def start_game() -> dict[str, str]:
        """Start a new game."""
        return {"game_id": "g-17"}

    @server.tool
    def move(game_id: str, direction: Literal["up", "down", "left", "right"]) -> str:
        """Move one field."""
        if game_id != "g-17":
            raise ValueError("unknown game")
        x, y = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}[direction]
        place[:] = [place[0] + x, place[1] + y]
        return f"at {place}"

    return server


def counter_server() -> FastMCP:
    server: FastMCP = FastMCP("counter")
    count = [0]

    @server.tool
    def increment(by: int) -> str:
        """Add to the counter."""
        count[0] += by
        return "done"

    @server.tool
    def get_value() -> int:
        """Read the counter's value."""
        return count[0]

    return server


class Operands(BaseModel):
    lhs: float
    rhs: float


class Request(BaseModel):
    kind: Literal["plus", "times", "minus"]
    operands: Operands
    note: str | None = None


class Item(BaseModel):
    sku: str
    quantity: int = Field(ge=1)


def nested_server() -> FastMCP:
    server: FastMCP = FastMCP("nested")

    @server.tool
    def run(request: Request) -> dict[str, Any]:
        """Run one calculation."""
        names = {"plus": ast.Add, "times": ast.Mult, "minus": ast.Sub}
        return {"status": "ok", "answer": OPERATORS[names[request.kind]](request.operands.lhs, request.operands.rhs)}

    @server.tool
    def create_order(customer: str, items: list[Item], express: bool) -> str:
        """Create an order for a customer."""
        return f"{sum(item.quantity for item in items)} x {items[0].sku}, {'express' if express else 'normal'}"

    return server


def submit_server() -> FastMCP:
    server: FastMCP = FastMCP("submit")

    @server.tool
    def minus(subtrahend: int, minuend: int) -> int:
        """Difference."""
        return minuend - subtrahend

    @server.tool
    def submit_answer(answer: float) -> str:
        """Hand the answer in."""
        return "received"

    return server


async def play(server: FastMCP, prompt: str, system: str) -> Messages:
    async with Client(server) as client:
        tools, schemas = [], {}
        for listed in await client.list_tools():
            schema = listed.model_dump(by_alias=True)["inputSchema"]
            schemas[listed.name] = schema
            function = {"name": listed.name, "description": listed.description, "parameters": schema}
            tools.append({"type": "function", "function": function})
        messages = ask(prompt, system)
        for _ in range(10):
            completion = await PlannerModel().complete(messages, tools, {"temperature": 1.0})
            messages.append(completion.message)
            if "tool_calls" not in completion.message:
                return messages
            for call in completion.message["tool_calls"]:
                name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, schemas[name])
                result = await client.call_tool(name, arguments, raise_on_error=False)
                text = "".join(block.text for block in result.content)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    raise AssertionError("it never finished")


@pytest.mark.parametrize(
    ("server", "prompt", "called", "answer"),
    [
        (enum_server, "What is (3 + 4) * 2 - 10 / 4?", ["calculate"] * 4, "#### 11.5"),
        (enum_server, "Subtract 3 from 10, then multiply the result by 6", ["calculate"] * 2, "#### 42"),
        (expression_server, "What is (3 + 4) * 2 - 10 / 4?", ["evaluate"], "#### 11.5"),
        (expression_server, "What is 2^3 + 1?", ["evaluate"], "#### 9"),
        (list_server, "What is 1 + 2 + 3 + 4?", ["sum_numbers"], "#### 10"),
        (list_server, "2 * 3 * 4 + 1", ["prod", "sum_numbers"], "#### 25"),
        (list_server, "What is the average of 3, 4 and 8?", ["sum_numbers"], "#### 5"),
        (text_server, "Reverse the text 'hello world'", ["reverse_text"], "#### dlrow olleh"),
        (text_server, "Reverse 'abc', and then convert it to upper case", ["reverse_text", "to_upper"], "#### CBA"),
        (text_server, "How many times does the letter 'r' occur in 'strawberry'?", ["count_letter"], "#### 3"),
        (text_server, "Concatenate 'foo' and 'bar'", ["concat"], "#### foobar"),
        (text_server, "Reverse 'abc' and 'def'", ["reverse_text"] * 2, "#### fed"),
        (lookup_server, "What's the weather in New York in fahrenheit?", ["get_weather"], "#### New York: 70 degrees"),
        (lookup_server, "Search for red pandas, limit 5", ["search"], "#### 5 documents on red pandas"),
        (
            lookup_server,
            "Book a table at Luigi's on 2026-03-04 for 4 people, outdoor please",
            ["book_table"],
            "#### Luigi's, 2026-03-04, 4, outside",
        ),
        (game_server, "Start a game and move up, up, then left.", ["start_game"] + ["move"] * 3, "#### at [-1, 2]"),
        (game_server, "Move right", ["start_game", "move"], "#### at [1, 0]"),
        (
            counter_server,
            "Increment the counter by 5, then by 3, and report the value.",
            ["increment", "increment", "get_value"],
            "#### 8",
        ),
        (nested_server, "What is (3 + 4) * 2 - 1?", ["run"] * 3, "#### 13"),
        (nested_server, "Create an express order for Anna: 3 of 'A-17'", ["create_order"], None),
        (submit_server, "What is 10 - 3?", ["minus", "submit_answer"], "#### 7"),
        (text_server, "Tell me a story.", None, None),
        (lookup_server, "", None, None),
    ],
)
def test_unseen_repositories(
    server: Callable[[], FastMCP], prompt: str, called: list[str] | None, answer: str | None
) -> None:
    messages = anyio.run(play, server(), prompt, HASHES)
    if called is not None:
        assert [name for message in messages for name, _ in calls_of(message)] == called
    if answer is not None:
        assert messages[-1]["content"] == answer


# ---------------------------------------------------------------- never raises, always ends

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["a", "b", "x", "numbers", "operation", "expression", "text", "limit", "date", "char", ""])


def schema_parts(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null", "odd"])
            | st.lists(st.sampled_from(["string", "integer", "null"]), max_size=2)
            | JSON,
            "properties": st.dictionaries(NAMES, inner, max_size=4) | JSON,
            "required": st.lists(NAMES, max_size=4) | JSON,
            "items": inner,
            "prefixItems": st.lists(inner, max_size=2) | JSON,
            "anyOf": st.lists(inner, max_size=3) | JSON,
            "oneOf": st.lists(inner, max_size=3),
            "allOf": st.lists(inner, max_size=3) | JSON,
            "enum": st.lists(st.sampled_from(["add", "minus", "*", "red"]) | JSON, max_size=4) | JSON,
            "const": JSON,
            "default": JSON,
            "$ref": st.sampled_from(["#", "#/properties/a", "#/$defs/x", "#/$defs/none", "http://elsewhere", ""]),
            "$defs": st.fixed_dictionaries({"x": inner}) | JSON,
            "minimum": JSON,
            "maximum": JSON,
            "exclusiveMinimum": JSON,
            "multipleOf": JSON,
            "minLength": JSON,
            "maxItems": JSON,
            "minItems": st.integers(-1, 10**12) | JSON,
            "uniqueItems": JSON,
            "format": st.sampled_from(["date", "email", "uri", "odd"]) | JSON,
            "description": st.text(max_size=20) | JSON,
        },
    )


SCHEMAS = st.recursive(JSON | st.booleans(), schema_parts, max_leaves=10)
TOOLS = st.lists(
    st.builds(
        lambda name, description, parameters: {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        },
        st.sampled_from(["add", "sum_all", "calc", "evaluate", "search", "start", "submit", "move", ""]) | JSON,
        st.sampled_from(["Add a and b", "Evaluates an expression", "One of add, subtract", ""]) | JSON,
        schema_parts(SCHEMAS),
    )
    | JSON,
    max_size=4,
)
PROMPTS = st.text(max_size=80) | st.lists(
    st.sampled_from(
        [
            *"0123456789+-*/^%()[]{},.!?'\"\\=",
            "add",
            "sum",
            "of",
            "and",
            "then",
            "it",
            "by",
            "'q'",
            "3",
            "a=5",
            "up",
            "#### ",
        ]
    ),
    max_size=40,
).map(" ".join)
RESULTS = st.sampled_from(["7", '{"result": 3}', "Error: no", "[" * 5000, "9" * 5000, "1e999", "NaN", ""]) | st.text()


@settings(max_examples=300, deadline=None)
@given(PROMPTS, PROMPTS, TOOLS, st.data())
def test_always_a_valid_message_and_an_end(system: str, prompt: str, tools: list[Any], data: st.DataObject) -> None:
    messages = ask(prompt, system)
    names = {
        tool["function"]["name"]
        for tool in tools
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        if isinstance(tool["function"].get("name"), str)
    }
    seen: dict[tuple[str, str], int] = {}
    ids: set[str] = set()
    for _ in range(9):
        reply = plan(messages, tools)
        assert plan(messages, tools) == reply
        assert reply["role"] == "assistant"
        if "tool_calls" not in reply:
            assert isinstance(reply["content"], str)
            return
        assert reply["tool_calls"]
        for call in reply["tool_calls"]:
            function = call["function"]
            assert function["name"] in names
            assert isinstance(json.loads(function["arguments"], parse_constant=pytest.fail), dict)
            assert call["id"] not in ids
            ids.add(call["id"])
            key = function["name"], function["arguments"]
            seen[key] = seen.get(key, 0) + 1
            assert seen[key] <= 2
        messages = answered(messages, reply, *(data.draw(RESULTS) for _ in reply["tool_calls"]))
    pytest.fail("it never answered")


@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "tool_call_id"]), JSON)))
def test_messages_of_any_shape(messages: Messages) -> None:
    assert plan(messages, [ADD])["role"] == "assistant"


@pytest.mark.parametrize(
    "prompt",
    [
        "(" * 100_000,
        "1" * 100_000,
        "1+" * 100_000,
        "-" * 100_000,
        "((1+" * 25_000,
        "2^" * 50_000,
        "sum of " * 15_000,
        "add 1 and " * 10_000,
        "'" * 100_000,
        "a=" * 50_000,
        "a-" * 50_000,
        "/" * 100_000,
        "A " * 50_000,
        "x" * 100_000,
        "9" * 30 + "^9" * 50_000,
        "#" * 100_000,
        "<answer>" * 12_000,
        "{" * 100_000,
    ],
    ids=lambda prompt: prompt[:8],
)
def test_hostile_prompts_are_done_with_at_once(prompt: str) -> None:
    text = {"type": "string"}
    tools = [ADD, tool("read_file", path=text), tool("search", query=text, a=text), tool("f", day=text, email=text)]
    started = time.process_time()
    plan(ask(prompt, prompt), tools)
    # Far more than it takes, and far less than anything quadratic in the prompt would.
    assert time.process_time() - started < 3.0


def test_a_schema_that_refers_to_itself_ends() -> None:
    names = [f"n{number}" for number in range(30)]
    schema = {
        "$defs": {
            "node": {"type": "object", "properties": {n: {"$ref": "#/$defs/node"} for n in names}, "required": names}
        },
        "$ref": "#/$defs/node",
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/node"} for name in names},
        "required": names,
    }
    started = time.process_time()
    endless = {"type": "function", "function": {"name": "endless", "parameters": schema}}
    assert calls_of(plan(ask("go"), [endless]))[0][0] == "endless"
    assert time.process_time() - started < 3.0


def test_the_model_is_a_stand_in_without_tokens() -> None:
    async def run() -> None:
        model = PlannerModel()
        completion = await model.complete(ask("3 + 4"), [ADD], {})
        assert completion.model == "offline/planner"
        assert completion.finish_reason == "tool_calls"
        assert completion.usage.total_tokens == 0
        assert completion.cost_usd == 0.0
        assert (await model.complete(ask("3 + 4"), [], {})).finish_reason == "stop"
        await model.aclose()

    anyio.run(run)
