"""Reloading is exact: after any save, only the new code runs."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import psutil
import pytest

from waiting import eventually
from watching import dataset, repository, rewards, server, watching, write

ONE_ROW = {"test_data.jsonl": dataset("answer", ground_truth="new")}
STATE = "class Known:\n    def value(self):\n        return {!r}\n\n\nKNOWN = Known()\n"
HELD = "from tools.state import KNOWN\n\n\nHELD = [KNOWN]\n"
EXTENSIONS = """
import sqlite3
import _decimal
import pyarrow

DATABASE = sqlite3.connect(':memory:', check_same_thread=False)
"""
THREADED = """
import threading

THREAD = threading.Thread(target=threading.Event().wait)
THREAD.start()
"""


class Proof(NamedTuple):
    """Files whose tool answers `old`, and the files to save so that it answers `new`."""

    before: dict[str, str | None]
    save: dict[str, str | None]


PROOFS = {
    "a default argument": Proof(
        {"mcp/main.py": server("value", parameters='value: str = "old"')},
        {"mcp/main.py": server("value", parameters='value: str = "new"')},
    ),
    "a renamed file": Proof(
        {"mcp/main.py": server("VALUE", "from tools.first import VALUE\n"), "mcp/tools/first.py": "VALUE = 'old'\n"},
        {
            "mcp/main.py": server("VALUE", "from tools.second import VALUE\n"),
            "mcp/tools/first.py": None,
            "mcp/tools/second.py": "VALUE = 'new'\n",
        },
    ),
    "the class of an instance in a module global": Proof(
        {
            "mcp/main.py": server("HELD[0].value()", "from tools.holder import HELD\n"),
            "mcp/tools/holder.py": HELD,
            "mcp/tools/state.py": STATE.format("old"),
        },
        {"mcp/tools/state.py": STATE.format("new")},
    ),
    "a constant that was imported by name": Proof(
        {"mcp/main.py": server("VALUE", "from settings import VALUE\n"), "mcp/settings.py": "VALUE = 'old'\n"},
        {"mcp/settings.py": "VALUE = 'new'\n"},
    ),
    "a new module": Proof(
        {"mcp/main.py": server("'old'")},
        {"mcp/tools/added.py": "VALUE = 'new'\n", "mcp/main.py": server("VALUE", "from tools.added import VALUE\n")},
    ),
    "beside C extensions": Proof(
        {"mcp/main.py": server("'old'", EXTENSIONS)},
        {"mcp/main.py": server("DATABASE.execute(\"select 'new'\").fetchone()[0]", EXTENSIONS)},
    ),
    "a server that has started a thread": Proof(
        {"mcp/main.py": server("'old'", THREADED)},
        {"mcp/main.py": server("'new'", THREADED)},
    ),
}


@pytest.mark.parametrize("name", PROOFS)
@pytest.mark.in_process
def test_the_new_code_runs(name: str, tmp_path: Path) -> None:
    proof = PROOFS[name]
    with watching(repository(tmp_path, {**ONE_ROW, **proof.before})) as watch:
        assert rewards(watch.next()) == [0.0]
        assert watch.answers() == ["old"]
        processes = len(watch.command.descendants())

        after = watch.save(proof.save)
        assert rewards(after) == [1.0]
        assert watch.answers() == ["new"]
        assert set(after["iteration"]["trigger"]) == set(proof.save)
        assert [flip["after"] for flip in after["iteration"]["flipped"]["passed"]] == [1.0]
        # The old code's processes end, whatever it has started.
        eventually(lambda: len(watch.command.descendants()) == processes)
        watch.command.interrupt()
        assert watch.command.wait().code == 130


@pytest.mark.in_process
def test_a_removed_tool(tmp_path: Path) -> None:
    both = server('"new"') + "\n\n@mcp.tool\ndef gone() -> str:\n    return 'still here'\n"
    rows = dataset("answer", "gone", ground_truth="new")
    with watching(repository(tmp_path, {"mcp/main.py": both, "test_data.jsonl": rows}), "--no-cache") as watch:
        assert rewards(watch.next()) == [1.0, 0.0]
        assert sorted(watch.answers()) == ["new", "still here"]
        after = watch.save({"mcp/main.py": server('"new"')})
        assert after["iteration"]["tools"] == {"added": [], "removed": ["gone"], "changed": []}
        assert "still here" not in watch.answers()
        assert [tool["function"]["name"] for tool in watch.endpoint.chats[-1].tools] == ["answer"]

        typed = server("str(value)", parameters="value: int = 1")
        assert watch.save({"mcp/main.py": typed})["iteration"]["tools"]["changed"] == ["answer"]


def test_thirty_saves_in_three_seconds(tmp_path: Path) -> None:
    """The last save wins, no results mix two versions, no process is left, and memory doesn't grow."""
    rows = dataset(*(f"answer {row}" for row in range(20)), ground_truth="right")
    scored = 'return float(solution_str.split()[1]) if solution_str[:1] == "v" else -1.0\n'
    reward = (
        "from osmosis_ai import osmosis_reward\n\n\n@osmosis_reward\n"
        f"def version(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:\n    {scored}"
    )

    def saves(first: int) -> None:
        started = monotonic()
        for number in range(30):
            sleep(max(started + number * 0.1 - monotonic(), 0))
            write(tmp_path, {"mcp/main.py": server(f'"v {first + number}"')})

    repository(tmp_path, {"test_data.jsonl": rows, "reward_fn/rewards.py": reward, "mcp/main.py": server('"v 0"')})
    with watching(tmp_path, "--no-cache") as watch:
        assert set(rewards(watch.next())) == {0.0}
        processes = len(watch.command.descendants())
        command = psutil.Process(watch.command.process.pid)
        held = []
        for first in (100, 200):
            saves(first)
            while set(rewards(line := watch.next())) != {first + 29.0}:
                assert len(set(rewards(line))) == 1
                assert len(line["results"]) == 20
            eventually(lambda: len(watch.command.descendants()) == processes)
            held.append(command.memory_info().rss)
        assert not watch.more()
        # What the first thirty took is what it needs; the second thirty take nothing.
        assert held[1] - held[0] < 6_000_000, held
        watch.command.interrupt()
        assert watch.command.wait().code == 130


@pytest.mark.in_process
def test_a_save_of_the_same_size_in_the_same_second(tmp_path: Path) -> None:
    """Neither side trusts Python's bytecode cache, which identifies a source by size and modification second."""
    text = (tmp_path / "x").with_name("reward_fn") / "rewards.py"
    with watching(repository(tmp_path)) as watch:
        assert rewards(watch.next()) == [1.0, 1.0]
        source = text.read_text(encoding="utf-8")
        for digit in "23456":
            line = watch.save({"reward_fn/rewards.py": source.replace("1.0", f"{digit}.0")})
            assert rewards(line) == [float(digit)] * 2, json.dumps(line)
            assert watch.save({"mcp/main.py": server(f'"{digit}"')})
            assert watch.answers()[-2:] == [digit, digit]
            watch.save({"mcp/main.py": server('"1"')})
        assert not list(tmp_path.rglob("__pycache__"))
