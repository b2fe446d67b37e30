"""Run a `--watch` command beside the test, against a model that calls the tool its prompt names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commands import Command
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call
from running import running
from waiting import eventually

SERVER = """
from fastmcp import FastMCP
{imports}
mcp = FastMCP("answers")


@mcp.tool
def answer({parameters}) -> str:
    return {value}
"""

REWARD = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str == ground_truth else 0.0
"""


def server(value: str, imports: str = "", parameters: str = "") -> str:
    """Return the text of an mcp/main.py whose one tool, `answer`, returns this expression."""
    return SERVER.format(value=value, imports=imports, parameters=parameters)


def calls_the_tool(request: Request) -> Reply:
    """Call the tool that the prompt's first word names, then answer with its result."""
    last = request.messages[-1]
    return tool_call(last["content"].split()[0]) if last["role"] == "user" else text(last["content"])


def write(root: Path, files: dict[str, str | None]) -> None:
    """Save files atomically, as an editor does; delete those whose text is None."""
    for name, content in files.items():
        path = root / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.tmp").write_text(content, encoding="utf-8")
        path.with_name(f"{path.name}.tmp").replace(path)


def dataset(*prompts: str, ground_truth: str = "1") -> str:
    """Return the text of a dataset with these prompts."""
    rows = ({"system_prompt": "Use the tool.", "user_prompt": p, "ground_truth": ground_truth} for p in prompts)
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def repository(root: Path, files: dict[str, str | None] | None = None) -> Path:
    """Write a repository with two rows, whose tool returns the right answer, 1."""
    usual = {
        "mcp/main.py": server('"1"'),
        "reward_fn/rewards.py": REWARD,
        "test_data.jsonl": dataset("answer a", "answer b"),
    }
    write(root, {**usual, **(files or {})})
    return root


class Watching:
    """A running `--watch` command, its output lines, and the requests to its model."""

    def __init__(self, command: Command, root: Path, endpoint: ScriptedEndpoint) -> None:
        self.command = command
        self.endpoint = endpoint
        self._root = root
        self._read = 0
        self._asked = 0

    def save(self, files: dict[str, str | None]) -> dict[str, Any]:
        """Save files and return the next line."""
        write(self._root, files)
        return self.next()

    def next(self) -> dict[str, Any]:
        """Wait for the next line and return it."""

        def line() -> str | None:
            lines = self.command.printed().split("\n")
            return lines[self._read] if len(lines) > self._read + 1 else None

        found = eventually(line, lambda: f"no line {self._read + 1}: {self.command.said()}")
        self._read += 1
        return json.loads(found)

    def more(self) -> bool:
        """Return True if there are unread lines."""
        return self.command.printed().count("\n") > self._read

    def requests(self) -> int:
        """Return the number of model requests since the last call."""
        before, self._asked = self._asked, len(self.endpoint.chats)
        return self._asked - before

    def answers(self) -> list[str]:
        """Return the tool's results in the requests since the last call."""
        before, self._asked = self._asked, len(self.endpoint.chats)
        chats = self.endpoint.chats[before : self._asked]
        return [chat.messages[-1]["content"] for chat in chats if chat.messages[-1]["role"] == "tool"]


@contextmanager
def watching(root: Path, *options: str, script: Any = calls_the_tool, command: str = "test") -> Iterator[Watching]:
    """Run `--watch` on a repository against a scripted model, whose address is `{url}` in the options."""
    with (
        ScriptedEndpoint(script).run_in_thread() as endpoint,
        running(
            command,
            *("--watch", "--json", "--base-url", endpoint.url, "--model", "m"),
            *(option.format(url=endpoint.url) for option in options),
            cwd=root,
        ) as process,
    ):
        yield Watching(process, root, endpoint)


def rewards(line: dict[str, Any]) -> list[float | None]:
    """Return the rewards of an iteration, in row order."""
    assert "error" not in line, line
    return [result["reward"] for result in line["results"]]


def redone(line: dict[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of re-run rollouts, scores and cached turns of an iteration."""
    assert "error" not in line, line
    counts = line["iteration"]["redone"]
    return counts["rollouts"], counts["scores"], counts["cached_turns"]
