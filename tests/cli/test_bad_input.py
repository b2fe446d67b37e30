"""Runs that can't start: exit code 2, one clear message on stderr, nothing on stdout, no model call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from commands import Finished, Osmosis, run_osmosis
from osmosis_ai.testing import ScriptedEndpoint, text
from repos import ADDING, EXACT, write_repo


class Bad(NamedTuple):
    """A command line that can't be run in `repo` once `prepare` has changed something there."""

    arguments: list[str]
    says: list[str]
    prepare: Callable[[Path], object] = lambda repo: None


def write(name: str, content: str) -> Callable[[Path], object]:
    def prepare(repo: Path) -> None:
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text(content, encoding="utf-8")

    return prepare


def remove(name: str) -> Callable[[Path], object]:
    return lambda repo: (repo / name).unlink()


def row(**columns: object) -> str:
    return json.dumps({"system_prompt": "s", "user_prompt": "u", "ground_truth": "3"} | columns)


DATASETS = {
    "missing": Bad(["test", "-d", "gone.jsonl"], ["gone.jsonl", "no such file"]),
    "eval's option": Bad(["test", "--eval-fn", "reward_fn.rewards:exact"], ["--eval-fn", "osmosis eval"]),
    "as a command": Bad(["eval", "rows.jsonl"], ["-d rows.jsonl"], write("rows.jsonl", row())),
    "empty": Bad(["test", "-d", "rows.jsonl"], ["rows.jsonl", "empty"], write("rows.jsonl", "")),
    "no rows": Bad(["test", "-d", "rows.json"], ["rows.json", "no rows"], write("rows.json", "[]")),
    "bad json": Bad(
        ["test", "-d", "rows.jsonl"], ["rows.jsonl", "line 2", "JSON"], write("rows.jsonl", row() + "\n{'a': 1}\n")
    ),
    "missing column": Bad(
        ["test", "-d", "rows.jsonl"],
        ["rows.jsonl, line 2", "user_prompt", "system_prompt"],
        write("rows.jsonl", row() + '\n{"system_prompt": "s", "question": "u"}\n'),
    ),
    "empty column": Bad(
        ["test", "-d", "rows.csv"], ["rows.csv", "user_prompt"], write("rows.csv", "system_prompt,user_prompt\ns,\n")
    ),
    "many problems": Bad(
        ["test", "-d", "rows.jsonl"],
        ["rows.jsonl", *(f"line {number}" for number in (1, 5, 10)), "2 more"],
        write("rows.jsonl", "nonsense\n" * 12),
    ),
    "suffix": Bad(
        ["test", "-d", "rows.txt"], ["rows.txt", ".jsonl", ".json", ".csv", ".parquet"], write("rows.txt", row())
    ),
    "not parquet": Bad(["test", "-d", "rows.parquet"], ["rows.parquet"], write("rows.parquet", row())),
    "offset": Bad(["test", "--offset", "3"], ["test_data.jsonl", "3"]),
}

REPOSITORIES = {
    "no folder": Bad(["test", "--mcp", "gone"], ["--mcp gone", "no"]),
    "no main.py": Bad(["test", "--mcp", "reward_fn"], ["--mcp reward_fn", "no main.py", "rewards.py"]),
    "raises": Bad(
        ["test"],
        ["mcp/main.py:3", "ValueError", "no such thing as luck", "raise ValueError"],
        write("mcp/main.py", "import os\n\nraise ValueError('no such thing as luck')\n"),
    ),
    "raises in a module": Bad(
        ["test"],
        ["mcp/tools/luck.py:2", "ZeroDivisionError", "1 / 0"],
        lambda repo: (
            write("mcp/main.py", "import tools.luck\n")(repo),
            write("mcp/tools/luck.py", "\nX = 1 / 0\n")(repo),
        ),
    ),
    "exits": Bad(["test"], ["mcp/main.py:2", "SystemExit"], write("mcp/main.py", "import sys\nsys.exit(0)\n")),
    "syntax": Bad(["test"], ["mcp/main.py:1", "SyntaxError"], write("mcp/main.py", "def add(a, b)\n")),
    "no server": Bad(["test"], ["mcp/main.py", "no MCP server"], write("mcp/main.py", "x = 1\n")),
    "two servers": Bad(
        ["test"],
        ["mcp/main.py", "`first`", "`second`", "--mcp mcp/main.py:first"],
        write("mcp/main.py", "from fastmcp import FastMCP\nfirst, second = FastMCP('a'), FastMCP('b')\n"),
    ),
    "no such name": Bad(["test", "--mcp", "mcp/main.py:other"], ["mcp/main.py", "`other`", "`mcp`"]),
    "mcp.json": Bad(["test", "--mcp", "mcp.json"], ["mcp.json:1", "not JSON"], write("mcp.json", "{")),
    "no command": Bad(
        ["test", "--mcp", "mcp.json"],
        ["'gone'", "osmosis-no-such-command"],
        write("mcp.json", '{"mcpServers": {"gone": {"command": "osmosis-no-such-command"}}}'),
    ),
    "url": Bad(["test", "--mcp", "ftp://127.0.0.1/mcp"], ["ftp://127.0.0.1/mcp", "http"]),
    "nothing there": Bad(["test", "--mcp", "http://127.0.0.1:9/mcp"], ["http://127.0.0.1:9/mcp", "did not start"]),
}

FUNCTIONS = {
    "name": Bad(["eval", "--eval-fn", "gone"], ["gone", "reward_fn.rewards:exact"]),
    "form": Bad(
        ["eval", "--eval-fn", "scores:length"],
        [
            "scores.py",
            "`length`",
            "`text",
            "(solution_str, ground_truth, extra_info)",
            "(messages, ground_truth, metadata)",
        ],
        write("scores.py", "def length(text, ground_truth): return len(text)\n"),
    ),
    "raises": Bad(
        ["eval", "--eval-fn", "scores:length"],
        ["scores.py:1", "ModuleNotFoundError", "no_such_package"],
        write("scores.py", "import no_such_package\ndef length(messages): return 1\n"),
    ),
    "signature": Bad(
        ["eval", "--eval-fn", "scores:length"],
        ["scores.py:", "TypeError", "ground_truth", "int"],
        write(
            "scores.py",
            "from osmosis_ai import osmosis_reward\n\n\n@osmosis_reward\n"
            "def length(solution_str: str, ground_truth: int, extra_info: dict = None) -> float: return 1.0\n",
        ),
    ),
    "one file of two": Bad(
        ["test"], ["reward_fn/more.py:1", "SyntaxError", "--keep-going"], write("reward_fn/more.py", "def (\n")
    ),
    "every file": Bad(["test"], ["reward_fn/rewards.py:1", "SyntaxError"], write("reward_fn/rewards.py", "def (\n")),
    "a missing package": Bad(
        ["test"],
        ["reward_fn/rewards.py:1", "ModuleNotFoundError", "pip install no_such_package"],
        write("reward_fn/rewards.py", f"import no_such_package\n{EXACT}"),
    ),
    "refused by its decorator": Bad(
        ["test"],
        ["reward_fn/rewards.py:", "TypeError", "ground_truth"],
        write("reward_fn/rewards.py", EXACT.replace("ground_truth: str", "ground_truth: int")),
    ),
    "a rubric file": Bad(
        ["test", "--rubric", "all"],
        ["rubric_configs.yaml:1", "YAML", "reward_rubric/tone.py:1"],
        lambda repo: (write("rubric_configs.yaml", "{")(repo), write("reward_rubric/tone.py", "def (\n")(repo)),
    ),
    "nothing left to score with": Bad(
        ["eval", "--keep-going"],
        ["reward_fn/rewards.py:1", "no_such_package"],
        write("reward_fn/rewards.py", f"import no_such_package\n{EXACT}"),
    ),
    "none at all": Bad(["eval"], ["nothing to score with", "--eval-fn"], remove("reward_fn/rewards.py")),
}

OPTIONS = {
    "batch size": Bad(["test", "--batch-size", "0"], ["--batch-size", "1"]),
    "timeout": Bad(["test", "--timeout", "soon"], ["--timeout", "valid"]),
    "unknown": Bad(["test", "--dataest", "x"], ["--dataest", "--dataset"]),
    "no value": Bad(["test", "--limit", "--model", "m"], ["--limit", "valid integer"]),
    "command": Bad(["evaluate"], ["evaluate", "eval"]),
    "argument": Bad(["test", "rows.jsonl"], ["rows.jsonl"]),
    "parameter": Bad(["test", "--param", "stop=END"], ["--param", "stop=END", "quotes"]),
    "output nobody can create": Bad(["test", "-o", "/proc/results.json"], ["-o /proc/results.json can't be written"]),
}


CASES = {
    f"{group}: {name}": bad
    for group, cases in (
        ("dataset", DATASETS),
        ("repository", REPOSITORIES),
        ("function", FUNCTIONS),
        ("option", OPTIONS),
    )
    for name, bad in cases.items()
}


class Attempt(NamedTuple):
    """A command's output, and its number of model calls."""

    done: Finished
    requests: int


def attempt(bad: Bad, folder: Path) -> Attempt:
    repo = write_repo(folder / "repo")
    bad.prepare(repo)
    command, *options = bad.arguments
    with ScriptedEndpoint(lambda request: text("3")).run_in_thread() as endpoint:
        if command in ("test", "eval"):
            options += ["--base-url", endpoint.url, "--model", "scripted"]
        return Attempt(run_osmosis(command, *options, cwd=repo), len(endpoint.requests))


@pytest.mark.parametrize("name", CASES)
def test_one_message_and_no_model_request(name: str, tmp_path: Path) -> None:
    done, requests = attempt(CASES[name], tmp_path)
    assert (done.code, done.stdout) == (2, ""), done
    assert done.stderr.count("error:") == 1, done.stderr
    assert "Traceback" not in done.stderr
    for part in CASES[name].says:
        assert part in done.stderr
    assert requests == 0


def test_quiet_does_not_hide_the_message_nor_does_json_change_it(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("test", "-q", "--json", "-d", "gone.jsonl", cwd=repo)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_is_no_repository(osmosis: Osmosis, tmp_path: Path) -> None:
    done = osmosis("test", cwd=tmp_path)
    assert (done.code, done.stdout) == (2, "")
    assert "no mcp folder" in done.stderr
    assert "--mcp DIR" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_everything_else_is_checked_before_the_model(osmosis: Osmosis, tmp_path: Path) -> None:
    broken = write_repo(tmp_path / "broken", main=ADDING + "\nraise OSError('no tools today')\n")
    nowhere = ["--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
    for arguments, expected in [
        (["eval", "-d", "gone.jsonl"], "gone.jsonl"),
        (["eval", "--eval-fn", "gone"], "no discovered function"),
        (["eval"], "no tools today"),
    ]:
        done = osmosis(*arguments, *nowhere, cwd=broken)
        assert done.code == 2
        assert expected in done.stderr
        assert "127.0.0.1:9" not in done.stderr.partition("error:")[2]
