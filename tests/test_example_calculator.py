"""The example repository: its running server, its rows and their solutions, and its functions."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import jsonschema
import pytest
from fastmcp import Client
from fastmcp.client.transports import StdioTransport

from osmosis_ai.data.dataset import open_dataset
from osmosis_ai.models.offline.engine import OracleModel
from osmosis_ai.records import Row

REPO = Path(__file__).parents[1] / "examples" / "calculator"
ROWS = [json.loads(line) for line in (REPO / "test_data.jsonl").read_text(encoding="utf-8").splitlines()]
EXPRESSIONS = [row for row in ROWS if row["kind"] == "expression"]
WORDS = [row for row in ROWS if row["kind"] == "word"]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exact(node: ast.AST) -> Fraction:
    """Evaluate a Python expression in exact fractions."""
    if isinstance(node, ast.Expression):
        return exact(node.body)
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        assert isinstance(node.op, ast.USub)
        return -exact(node.operand)
    assert isinstance(node, ast.BinOp)
    left, right = exact(node.left), exact(node.right)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Mod():
            return left % right
        case ast.Pow():
            return Fraction(left**right)
        case other:
            raise AssertionError(other)


def expression_of(prompt: str) -> ast.Expression:
    text = re.sub(r"^(What is|Compute|Calculate|Evaluate) |[.?]$", "", prompt)
    text = text.replace("×", "*").replace("÷", "/").replace("−", "-").replace(",", "")
    return ast.parse(text, mode="eval")


async def play(rows: list[Row]) -> list[list[dict[str, Any]]]:
    """The trajectories of the rows' solutions, against `python mcp/main.py`."""
    server = StdioTransport(sys.executable, ["main.py"], cwd=str(REPO / "mcp"))
    async with Client(server) as client:
        tools, schemas = [], {}
        for tool in await client.list_tools():
            schema = tool.model_dump(by_alias=True)["inputSchema"]
            schemas[tool.name] = schema
            function = {"name": tool.name, "description": tool.description, "parameters": schema}
            tools.append({"type": "function", "function": function})
        trajectories = []
        for row in rows:
            messages = [
                {"role": "system", "content": row.system_prompt},
                {"role": "user", "content": row.user_prompt},
            ]
            for _ in range(10):
                completion = await OracleModel(row).complete(messages, tools, {})
                messages.append(completion.message)
                if "tool_calls" not in completion.message:
                    break
                for call in completion.message["tool_calls"]:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    jsonschema.validate(arguments, schemas[name])
                    result = await client.call_tool(name, arguments, raise_on_error=False)
                    text = "".join(block.text for block in result.content)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            assert "tool_calls" not in messages[-1], "it takes no more than the default number of turns"
            trajectories.append(messages)
        return trajectories


def test_rows_are_enough_and_of_both_kinds() -> None:
    assert len(ROWS) >= 40
    assert len(EXPRESSIONS) >= 25
    assert len(WORDS) >= 12
    assert len({row["user_prompt"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert set(row) == {"system_prompt", "user_prompt", "ground_truth", "solution", "kind", "difficulty"}
        assert "####" in row["system_prompt"]
        float(row["ground_truth"])


@pytest.mark.parametrize("row", EXPRESSIONS, ids=[row["user_prompt"] for row in EXPRESSIONS])
def test_ground_truth_of_expressions(row: dict[str, str]) -> None:
    assert exact(expression_of(row["user_prompt"])) == Fraction(row["ground_truth"])


def test_every_solution_earns_the_full_reward_through_its_tool_calls() -> None:
    reward = load(REPO / "reward_fn" / "compute_reward.py")
    rows = list(open_dataset(REPO / "test_data.jsonl").rows())
    for row, messages in zip(rows, anyio.run(play, rows), strict=True):
        answer = messages[-1]["content"]
        assert reward.numbers_match_reward(answer, row.ground_truth) == 1.0, row.user_prompt
        assert reward.answer_format_reward(answer, row.ground_truth) == 1.0, row.user_prompt
        calls = [call for message in messages for call in message.get("tool_calls", [])]
        assert calls, row.user_prompt
        if row.extra["kind"] == "expression":
            # Every step of the expression is a call of its own: nothing was worked out without the tools.
            steps = [node for node in ast.walk(expression_of(row.user_prompt)) if isinstance(node, ast.BinOp)]
            assert len(calls) == len(steps), row.user_prompt


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("The answer is\n#### 42", "42", 1.0),
        ("#### 42.0", "42", 1.0),
        ("#### 1,234.50", "1234.5", 1.0),
        ("#### $12", "12", 1.0),
        ("#### -8", "-8", 1.0),
        ("#### 3\n…no:\n#### 4", "4", 1.0),
        ("#### 0.333333333", "0.3333333333", 1.0),
        ("#### 43", "42", 0.0),
        ("42", "42", 0.0),
        ("#### forty-two", "42", 0.0),
        ("", "42", 0.0),
        ("#### 42", "no number", 0.0),
    ],
)
def test_numbers_match_reward(solution: str, truth: str, score: float) -> None:
    assert load(REPO / "reward_fn" / "compute_reward.py").numbers_match_reward(solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("So:\n#### 42", 1.0),
        ("#### 42\n", 1.0),
        ("#### 42 apples", 0.0),
        ("#### 42\nDone.", 0.0),
        ("42", 0.0),
        ("", 0.0),
    ],
)
def test_answer_format_reward(solution: str, score: float) -> None:
    assert load(REPO / "reward_fn" / "compute_reward.py").answer_format_reward(solution, "42") == score


def test_rubric_has_the_form_of_one() -> None:
    rubric = load(REPO / "reward_rubric" / "reward_rubric_openai.py")
    assert rubric.answer_clarity_rubric.__wrapped__.__name__ == "answer_clarity_rubric"
