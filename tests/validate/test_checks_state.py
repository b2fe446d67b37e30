"""Module-level state that tools change: found in the source, and proved by playing solutions."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import run_osmosis
from osmosis_ai.discovery.scan import scan_tools
from osmosis_ai.validate.state import check_state
from repos import write_repo

HEAD = """
from collections import defaultdict
from functools import lru_cache

from fastmcp import Context, FastMCP

mcp = FastMCP("bank")
"""


def found(tmp_path: Path, code: str, **modules: str) -> list[tuple[str | None, int | None, str | None]]:
    """Return place and subject of each finding in a repository's tools."""
    (tmp_path / "mcp").mkdir(exist_ok=True)
    (tmp_path / "mcp" / "main.py").write_text(HEAD + code, encoding="utf-8")
    for name, text in modules.items():
        (tmp_path / "mcp" / f"{name}.py").write_text(text, encoding="utf-8")
    tools = scan_tools(tmp_path / "mcp", tmp_path).components
    return [(one.file, one.line, one.subject) for one in check_state(tmp_path / "mcp", tmp_path, tools)]


def tool(body: str, name: str = "pay", arguments: str = "user: str, amount: int") -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f'\n\n@mcp.tool\ndef {name}({arguments}) -> int:\n    """Do it."""\n{lines}'


LINE = HEAD.count("\n") + 1


@pytest.mark.parametrize(
    ("bound", "body"),
    [
        ("ACCOUNTS = {}", "ACCOUNTS[user] = amount"),
        ("ACCOUNTS: dict[str, int] = dict()", "ACCOUNTS[user] += amount"),
        ("ACCOUNTS = defaultdict(int)", "del ACCOUNTS[user]"),
        ("ACCOUNTS = {'ann': {'balance': 1}}", "ACCOUNTS[user]['balance'] -= amount"),
        ("ACCOUNTS = {'ann': {'balance': 1}}", "account = ACCOUNTS[user]\naccount['balance'] -= amount"),
        ("ACCOUNTS = []", "ACCOUNTS.append(user)"),
        ("ACCOUNTS = {u: [] for u in 'ab'}", "ACCOUNTS.setdefault(user, []).append(amount)"),
        ("ACCOUNTS = 0", "global ACCOUNTS\nACCOUNTS += amount"),
        ("ACCOUNTS = None", "global ACCOUNTS\nACCOUNTS = amount"),
    ],
)
def test_a_tool_that_changes_a_module_level_name_is_found(bound: str, body: str, tmp_path: Path) -> None:
    assert found(tmp_path, bound + tool(body)) == [("mcp/main.py", LINE, "ACCOUNTS")]


def test_a_helper_or_another_module_is_found_too(tmp_path: Path) -> None:
    helper = "ACCOUNTS = {}\n\n\ndef book(user, amount):\n    ACCOUNTS[user] = amount\n"
    assert found(tmp_path, helper + tool("book(user, amount)")) == [("mcp/main.py", LINE, "ACCOUNTS")]
    state = "LEDGER = []\n"
    for code in (
        "from state import LEDGER" + tool("LEDGER.append(amount)"),
        "import state" + tool("state.LEDGER.append(amount)"),
    ):
        assert found(tmp_path, code, state=state) == [("mcp/state.py", 1, "LEDGER")]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("PRICES = {'milk': 1}" + tool("return PRICES[user]"), id="only read"),
        pytest.param("ACCOUNTS = {}" + tool("ACCOUNTS = {}\nACCOUNTS[user] = amount"), id="a local name"),
        pytest.param("ACCOUNTS = {}" + tool("mine = dict(ACCOUNTS)\nmine[user] = amount"), id="a copy"),
        pytest.param("ACCOUNTS = {}" + tool("ACCOUNTS[user] = 1", arguments="user, ACCOUNTS"), id="a parameter"),
        pytest.param(
            "BASKETS = {}"
            + tool("BASKETS.setdefault(ctx.session_id, []).append(user)", arguments="user, ctx: Context"),
            id="by session",
        ),
        pytest.param("ALL = {}" + tool("ALL[current_rollout().id] = user"), id="by rollout"),
        pytest.param("_CACHE = {}" + tool("_CACHE[user] = amount"), id="a cache"),
        pytest.param("@lru_cache\ndef rate(user):\n    return 1\n" + tool("return rate(user)"), id="functools"),
        pytest.param(
            "TOOLS = []\n\n\ndef register(function):\n    TOOLS.append(function)\n    return function\n"
            + tool("return 1"),
            id="only at import",
        ),
        pytest.param(
            "ACCOUNTS = {}\n\n\n@osmosis_setup\ndef reset():\n    ACCOUNTS.clear()\n" + tool("return ACCOUNTS[user]"),
            id="only in a setup",
        ),
    ],
)
def test_what_rollouts_do_not_share_is_not_found(code: str, tmp_path: Path) -> None:
    assert found(tmp_path, code) == []


BANK = """
from fastmcp import FastMCP

mcp = FastMCP("bank")


class Bank:
    def __init__(self) -> None:
        self.balance = 100


bank = Bank()


@mcp.tool
def pay(amount: int) -> int:
    \"\"\"Pay an amount, and return the balance.\"\"\"
    bank.balance -= amount
    return bank.balance
"""
PAYING = [
    {
        "system_prompt": "Pay.",
        "user_prompt": f"Pay 30 for {item}.",
        "ground_truth": "70",
        "solution": [{"tool": "pay", "arguments": {"amount": 30}}, "70"],
    }
    for item in ("milk", "bread")
]


def leaks(root: Path) -> list[str]:
    done = run_osmosis("validate", "--json", cwd=root)
    return [one["message"] for one in done.json["findings"] if one["code"] == "OSM122"]


def test_a_result_that_depends_on_earlier_rollouts_is_proved(tmp_path: Path) -> None:
    # The source shows nothing: the state is an object of a class.
    root = write_repo(tmp_path / "repo", main=BANK, rows=PAYING)
    assert leaks(root) == [
        "row 1: pay answers '40' after other rollouts, and '70' in a fresh process: state leaks from one rollout into "
        "the next"
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bank.balance -= amount\n    return bank.balance", "return 100 - amount"),
        ("bank.balance -= amount\n    return bank.balance", "import os; return int.from_bytes(os.urandom(4), 'big')"),
        ("def pay(", "def pay("),
    ],
    ids=["no state", "random", "a setup"],
)
def test_a_repository_without_leaks_is_not_blamed(before: str, after: str, tmp_path: Path) -> None:
    main = BANK.replace(before, after)
    if before == after:
        main += "\n\nfrom osmosis_ai import osmosis_setup\n\n\n@osmosis_setup\ndef reset():\n    bank.balance = 100\n"
    assert leaks(write_repo(tmp_path / "repo", main=main, rows=PAYING)) == []


RACING = """
import asyncio
import os

from fastmcp import FastMCP

mcp = FastMCP("racing")


@mcp.tool
async def wait(name: str) -> str:
    \"\"\"Answer after a moment, the first call sometimes last.\"\"\"
    await asyncio.sleep(os.urandom(1)[0] / 5000)
    return name
"""


def test_concurrent_calls_that_end_in_another_order_are_no_leak(tmp_path: Path) -> None:
    calls = [{"tool": "wait", "arguments": {"name": name}} for name in "abcdefgh"]
    row = {"system_prompt": "Wait.", "user_prompt": "Go.", "ground_truth": "done", "solution": [calls, "done"]}
    rows = [{**row, "user_prompt": f"Go {number}."} for number in range(2)]
    assert leaks(write_repo(tmp_path / "repo", main=RACING, rows=rows)) == []
