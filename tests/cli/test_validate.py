"""`osmosis validate`: whole repositories, good, broken and hostile, through the installed command."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import yaml

from commands import Finished, Osmosis, run_osmosis
from repos import EXACT, write_repo
from running import running
from waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "calculator"
FIELDS = ["code", "severity", "file", "line", "subject", "message", "hint"]


def validate(repo: Path, *options: str, **env: str) -> Finished:
    """Run it to its end, and check that it leaves no process behind."""
    done = run_osmosis("validate", repo.name, *options, cwd=repo.parent, env=env)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def found(done: Finished) -> dict[str, dict[str, Any]]:
    """The findings by code; the last one of each."""
    return {one["code"]: one for one in done.json["findings"]}


def errors(done: Finished) -> set[str]:
    return {one["code"] for one in done.json["findings"] if one["severity"] == "error"}


@pytest.fixture
def example(tmp_path: Path) -> Path:
    folder = tmp_path / "calculator"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".osmosis"))
    return folder


def test_the_example_has_no_errors(example: Path) -> None:
    done = validate(example)
    assert done.code == 0, done.stdout
    lines = done.stdout.splitlines()
    # What was found comes first, then what the controls say, then the findings, then the sum.
    assert lines[0] == "tools (6)"
    assert any(line.startswith("answer_clarity_rubric") for line in lines)
    assert "controls of reward_fn.compute_reward:numbers_match_reward: accepts #### x; tells right from wrong" in lines
    assert re.search(r"✓ #### x +1\.000 +0\.000 +0\.000 +0\.000 +0\.000", done.stdout)
    assert re.fullmatch(r"0 errors, \d+ warnings", lines[-1])


def test_json_has_components_and_findings(example: Path) -> None:
    done = validate(example, "--json")
    assert set(done.json) == {"components", "findings", "ignored"}
    names = [(one["kind"], one["name"]) for one in done.json["components"]]
    assert names[:2] == [("tool", "add"), ("tool", "subtract")]
    assert ("reward", "numbers_match_reward") in names
    assert ("rubric", "answer_clarity_rubric") in names
    assert all(one["file"] and one["line"] for one in done.json["components"])
    assert all(list(one) == FIELDS for one in done.json["findings"])
    assert errors(done) == set()


def test_strict_counts_warnings(repo: Path) -> None:
    assert validate(repo, "--static").code == 0
    strict = validate(repo, "--static", "--strict", "--json")
    assert strict.code == 1
    assert errors(strict) == set()
    assert {"OSM004", "OSM601"} <= set(found(strict))


def test_a_small_sound_repository_has_no_errors(repo: Path) -> None:
    done = validate(repo, "--json")
    assert (done.code, errors(done)) == (0, set())


def test_annotations_for_a_pull_request(repo: Path) -> None:
    (repo / "reward_fn" / "rewards.py").write_text("def broken(:\n", encoding="utf-8")
    done = validate(repo, "--static", "--format", "github")
    assert done.code == 1
    lines = done.stdout.splitlines()
    assert all(re.match(r"::(error|warning) (file=[^:,]+,)?(line=\d+,)?title=OSM\d{3}::.", line) for line in lines)
    assert "::error file=repo/reward_fn/rewards.py,line=1,title=OSM001::SyntaxError: invalid syntax" in lines
    assert re.search(r"1 error, \d+ warnings", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere doesn't exist"),
        (("repo/test_data.jsonl",), "is a file, not a folder"),
        (("repo", "--answer-form", "Result: x"), "{answer}"),
        (("repo", "--format", "xml"), "--format xml"),
        (("repo", "-d", "none.jsonl"), "there is no such file"),
    ],
)
def test_what_cannot_start(osmosis: Osmosis, repo: Path, arguments: tuple[str, ...], said: str) -> None:
    done = osmosis("validate", *arguments, cwd=repo.parent)
    assert done.code == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = validate(tmp_path / "empty", "--json")
    assert (done.code, errors(done)) == (1, {"OSM003"})


# Running


def test_static_runs_nothing(tmp_path: Path) -> None:
    mark = "from pathlib import Path\nPath('ran').touch()\nPath(__file__).with_name('ran').touch()\n"
    repo = write_repo(tmp_path / "repo", main=mark, rewards=mark + EXACT)
    done = validate(repo, "--static", "--json")
    assert errors(done) == set()
    assert not list(tmp_path.rglob("ran"))
    assert errors(validate(repo, "--json")) == {"OSM102"}
    assert list(tmp_path.rglob("ran"))


REWARDS = """
import os, time
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    print("noise")
    return 1.0 if solution_str.strip() == ground_truth else 0.0


@osmosis_reward
def contained(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if ground_truth in solution_str else 0.0


@osmosis_reward
def dies(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    os._exit(3)


@osmosis_reward
def raises(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return float(int(solution_str) == int(ground_truth))


@osmosis_reward
def whole(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1 if solution_str == ground_truth else 0.0


def last(messages: list, ground_truth: str, metadata: dict) -> float:
    return float(messages[-1]["content"] == ground_truth and messages[-2]["role"] == "tool")


last = osmosis_reward(last)
"""


def test_every_function_is_judged_in_the_same_run(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rewards=REWARDS)
    done = validate(repo, "--json")
    assert done.code == 1
    said = {(one["subject"], one["code"]) for one in done.json["findings"] if one["code"].startswith("OSM3")}
    assert said == {("contained", "OSM302"), ("dies", "OSM318"), ("raises", "OSM312"), ("whole", "OSM314")}
    raised = found(done)["OSM312"]
    assert (raised["file"], raised["line"]) == ("reward_fn/rewards.py", 24)
    assert "noise" not in done.stdout + done.stderr


def test_a_function_of_the_full_form_gets_a_conversation_with_a_tool_call(tmp_path: Path) -> None:
    rewards = (
        "from osmosis_ai import osmosis_reward\n\n\n@osmosis_reward\n"
        "def used_the_tool(messages: list, ground_truth: str, metadata: dict) -> float:\n"
        "    called = [call['function']['name'] for m in messages for call in m.get('tool_calls') or []]\n"
        "    return float(called == ['add'] and messages[-1]['content'] == ground_truth)\n"
    )
    done = validate(write_repo(tmp_path / "repo", rewards=rewards))
    assert "reward_fn.rewards:used_the_tool: accepts plain; tells right from wrong" in done.stdout


def test_an_answer_form_of_ones_own(tmp_path: Path) -> None:
    rewards = EXACT.replace("solution_str.strip() == ground_truth", "solution_str == f'R={ground_truth}'")
    repo = write_repo(tmp_path / "repo", rewards=rewards)
    assert "OSM301" in found(validate(repo, "--json"))
    assert "OSM301" not in found(validate(repo, "--json", "--answer-form", "R={answer}"))


def test_only_rewards_that_never_look_at_the_ground_truth(tmp_path: Path) -> None:
    rewards = EXACT.replace("solution_str.strip() == ground_truth", "solution_str.startswith('####')")
    assert errors(validate(write_repo(tmp_path / "repo", rewards=rewards), "--json")) == {"OSM308"}


def test_a_tool_module_that_nobody_imports(repo: Path) -> None:
    (repo / "mcp" / "extra.py").write_text(
        "from main import mcp\n\n\n@mcp.tool\ndef forgotten(a: int) -> int:\n    '''F.'''\n"
    )
    one = found(validate(repo, "--json"))["OSM107"]
    assert (one["file"], one["line"], one["subject"]) == ("mcp/extra.py", 5, "forgotten")


def test_broken_tools_do_not_keep_functions_from_being_tried(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", main="import nowhere_to_be_found\n", rewards=REWARDS)
    done = validate(repo, "--json")
    assert {"OSM102", "OSM302", "OSM312"} <= errors(done)
    assert (found(done)["OSM102"]["file"], found(done)["OSM102"]["line"]) == ("mcp/main.py", 1)


# Bad input


def test_a_main_that_never_returns(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", main="while True:\n    pass\n")
    started = monotonic()
    done = validate(repo, "--json", "--timeout", "1")
    assert errors(done) == {"OSM103"}
    assert "did not finish within 1 s" in found(done)["OSM103"]["message"]
    assert monotonic() - started < 60


@pytest.mark.in_process
def test_interrupted(tmp_path: Path) -> None:
    repo = write_repo(
        tmp_path / "repo", main="from pathlib import Path\nPath('started').touch()\nwhile True:\n    pass\n"
    )
    with running("validate", cwd=repo) as command:
        eventually((repo / "started").exists)
        command.interrupt()
        done = command.wait()
    assert (done.code, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr
    assert "interrupted" in done.stderr


def test_a_main_that_ends_its_process(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", main="import os\nos._exit(7)\n")
    done = validate(repo, "--json")
    assert errors(done) == {"OSM103"}
    assert "exited with code 7" in found(done)["OSM103"]["message"]


def test_a_reward_module_that_never_loads_costs_only_itself(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rewards=REWARDS)
    (repo / "reward_fn" / "stuck.py").write_text(
        EXACT.replace("def exact", "def stuck") + "\nwhile True:\n    pass\n", encoding="utf-8"
    )
    done = validate(repo, "--json", "--timeout", "3")
    assert found(done)["OSM203"]["file"] == "reward_fn/stuck.py"
    assert "OSM302" in errors(done)


def test_hostile_files_are_findings(repo: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("", encoding="utf-8")
    (repo / "mcp" / "link.py").symlink_to(outside)
    (repo / "mcp" / "latin.py").write_bytes(b"x = '\xe9'\n")
    for pipe in ("mcp/pipe.py", "reward_fn/pipe.py", "configs/eval/pipe.toml", "reward_rubric/pipe.yaml"):
        (repo / pipe).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(repo / pipe)
    with (repo / "configs" / "eval" / "big.toml").open("wb") as file:
        file.truncate(100_000_000)
    (repo / "pyproject.toml").write_bytes(b"\xff")
    (repo / ".env").write_bytes(b"NAME=\xff\n")
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    (repo / "rubric_configs.yaml").write_text(bomb, encoding="utf-8")
    with (repo / "test_data.jsonl").open("a", encoding="utf-8") as data:
        data.write(json.dumps({"system_prompt": "s", "user_prompt": "x" * 10_000_000, "ground_truth": "1"}) + "\n")
        data.write("{\n")
    started = monotonic()
    done = validate(repo, "--json")
    places = {(one["code"], one["file"], one["line"]) for one in done.json["findings"]}
    assert {
        ("OSM002", "mcp/link.py", None),
        ("OSM001", "mcp/latin.py", 1),
        ("OSM001", "mcp/pipe.py", None),
        ("OSM001", "reward_fn/pipe.py", None),
        ("OSM501", "configs/eval/pipe.toml", None),
        ("OSM501", "configs/eval/big.toml", None),
        ("OSM005", "pyproject.toml", 1),
        ("OSM006", ".env", None),
        ("OSM408", "test_data.jsonl", 4),
        ("OSM402", "test_data.jsonl", 5),
    } <= places
    assert {file for code, file, _ in places if code == "OSM210"} == {"rubric_configs.yaml", "reward_rubric/pipe.yaml"}
    assert "OSM009" not in found(done)
    assert len(done.stdout) < 50_000
    assert monotonic() - started < 60


def test_links_in_place_of_the_repositorys_own_folders(tmp_path: Path) -> None:
    other = write_repo(tmp_path / "other")
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "mcp").symlink_to(other / "mcp")
    (repo / "reward_fn").symlink_to(tmp_path / "nowhere")
    (repo / "configs").mkdir()
    (repo / "configs" / "eval").symlink_to(tmp_path / "other")
    done = validate(repo, "--json")
    links = {one["file"] for one in done.json["findings"] if one["code"] == "OSM002"}
    assert links == {"mcp", "reward_fn", "configs/eval"}


def test_keys_are_never_shown(repo: Path) -> None:
    key = "sk-" + "aB3dE6gH9jK2mN5pQ8sT1vW4"
    (repo / "mcp" / "main.py").write_text(f"raise RuntimeError('{key}')\n", encoding="utf-8")
    done = validate(repo, "--json", OPENAI_API_KEY=key)
    assert {"OSM102", "OSM208"} <= errors(done)
    assert key not in done.stdout + done.stderr


# The hook


def test_the_hook_runs_the_static_checks(repo: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    command, *arguments = hook["entry"].split()
    assert command == "osmosis"
    assert hook["pass_filenames"] is False
    done = run_osmosis(*arguments, cwd=repo)
    assert done.code == 0, done.stdout
    assert "source only; nothing was run" in done.stdout
