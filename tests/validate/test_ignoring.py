"""Findings that are ignored: by option, in pyproject.toml, in a comment."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import run_osmosis
from repos import write_repo

CONSTANT = """
from osmosis_ai import osmosis_reward


@osmosis_reward{decorator}
def half(
    solution_str: str, ground_truth: str, extra_info: dict = None{header}
) -> float:
    return 0.5{body}
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return write_repo(tmp_path / "repo", rewards=CONSTANT.format(decorator="", header="", body=""))


def codes(repo: Path, *options: str) -> tuple[set[str], set[str]]:
    """Return the codes that count, and those that are ignored."""
    found = run_osmosis("validate", "--json", *options, cwd=repo).json
    return {one["code"] for one in found["findings"]}, {one["code"] for one in found["ignored"]}


def test_an_option_ignores_a_code(repo: Path) -> None:
    counted, ignored = codes(repo)
    assert {"OSM004", "OSM308", "OSM310"} <= counted
    assert ignored == set()
    counted, ignored = codes(repo, "--ignore", "OSM310", "--ignore", "OSM308")
    assert not {"OSM308", "OSM310"} & counted
    assert ignored == {"OSM308", "OSM310"}


def test_ignored_findings_do_not_count_for_the_exit_code_and_are_counted_in_the_report(repo: Path) -> None:
    assert run_osmosis("validate", cwd=repo).code == 1
    done = run_osmosis("validate", "--ignore", "OSM310", "--ignore", "OSM308", cwd=repo)
    assert done.code == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith(", 2 ignored")


def test_pyproject_ignores_codes_and_runs_accept_its_table(repo: Path) -> None:
    (repo / "pyproject.toml").write_text('[tool.osmosis.validate]\nignore = ["OSM310"]\n', encoding="utf-8")
    counted, ignored = codes(repo)
    assert "OSM310" not in counted
    assert ignored == {"OSM310"}
    assert run_osmosis("config", cwd=repo).code == 0


@pytest.mark.parametrize("place", ["decorator", "header", "above", "same line"])
def test_a_comment_beside_a_function_ignores_its_findings(place: str, repo: Path) -> None:
    comment = "  # osmosis: ignore[OSM310, OSM308]"
    where = {"decorator": "", "header": "", "body": ""}
    if place in where:
        where[place] = comment
    text = CONSTANT.format(**where)
    if place == "above":
        text = text.replace("@osmosis_reward", f"{comment.strip()}\n@osmosis_reward")
    if place == "same line":
        text = text.replace("def half(", f"def half({comment}")
    (repo / "reward_fn" / "rewards.py").write_text(text, encoding="utf-8")
    assert codes(repo)[1] == {"OSM308", "OSM310"}


def test_a_comment_in_a_body_counts_for_its_line_only(repo: Path) -> None:
    text = CONSTANT.format(decorator="", header="", body="  # osmosis: ignore[OSM310]")
    (repo / "reward_fn" / "rewards.py").write_text(text, encoding="utf-8")
    assert "OSM310" in codes(repo)[0]


@pytest.mark.parametrize("place", ["option", "file", "comment"])
def test_an_unknown_code_is_an_error_that_suggests_the_right_one(place: str, repo: Path) -> None:
    options: tuple[str, ...] = ()
    if place == "option":
        options, source = ("--ignore", "OMS310"), "--ignore OMS310"
    elif place == "file":
        (repo / "pyproject.toml").write_text('[tool.osmosis.validate]\nignore = ["OMS310"]\n', encoding="utf-8")
        source = "pyproject.toml: [tool.osmosis.validate] ignore = OMS310"
    else:
        text = CONSTANT.format(decorator="  # osmosis: ignore[OMS310]", header="", body="")
        (repo / "reward_fn" / "rewards.py").write_text(text, encoding="utf-8")
        source = "reward_fn/rewards.py:5: # osmosis: ignore[…] OMS310"
    done = run_osmosis("validate", "--static", *options, cwd=repo)
    assert done.code == 2
    assert f"error: {source}: there is no such code; did you mean OSM310?\n" in done.stderr


TOOLS = """
from fastmcp import Context, FastMCP

mcp = FastMCP("shop")


@mcp.tool
def buy(item: str, amount: int, ctx: Context) -> str:
    \"\"\"Buy something.\"\"\"
    return item


@mcp.tool
def sell(item: str, ctx: Context) -> str:
    \"\"\"Sell something.\"\"\"
    return item
"""


def test_the_report_shows_what_the_model_sees_repeats_no_advice_and_ends_with_errors(tmp_path: Path) -> None:
    constant = CONSTANT.format(decorator="", header="", body="")
    root = write_repo(tmp_path / "repo", main=TOOLS, rewards=constant)
    done = run_osmosis("validate", cwd=root)
    assert "ctx" not in done.stdout
    assert done.stdout.count("OSM111") == 1
    assert (
        "3 parameters have no description: item of buy, line 8, amount of buy, line 8, item of sell, line 14"
        in done.stdout
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    severities = [line[1] for line in lines if len(line) > 2 and line[2].startswith("OSM")]
    assert severities == sorted(severities, reverse=True)
    assert severities[-1] == "error"
