"""The choice of the model, its requests and failures; and its key, which must appear nowhere."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from commands import Osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, by_turn, drop, hang, status, text, tool_call
from repos import write_repo

NOWHERE = "http://127.0.0.1:9/v1"


def test_a_refused_connection_ends_the_run(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("test", "--base-url", NOWHERE, "--model", "m", "-q", cwd=repo)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.count("error:") == 1
    assert f"nothing answers at {NOWHERE}" in done.stderr
    assert "--base-url" in done.stderr


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        pytest.param(
            ScriptedEndpoint(api_key="the-right-key"), ["401", "--api-key", "OSMOSIS_API_KEY"], id="a wrong key"
        ),
        pytest.param(
            ScriptedEndpoint(models=["qwen3", "llama4"]), ["scripted", "--model", "qwen3", "llama4"], id="unknown model"
        ),
        pytest.param(ScriptedEndpoint(probe=status(404)), ["404", "--base-url"], id="nothing at this path"),
    ],
)
def test_an_endpoint_that_refuses_ends_the_run(
    endpoint: ScriptedEndpoint, says: list[str], osmosis: Osmosis, repo: Path
) -> None:
    with endpoint.run_in_thread():
        model = ["--base-url", endpoint.url, "--model", "scripted", "--api-key", "sk-the-wrong-key"]
        done = osmosis("eval", *model, "-q", cwd=repo)
        assert (done.code, done.stdout) == (2, "")
        assert done.stderr.count("error:") == 1
        assert endpoint.url in done.stderr
        for part in says:
            assert part in done.stderr
        assert "sk-the-wrong-key" not in done.stderr
        assert len(endpoint.requests) == 1
        assert endpoint.chats == []


@pytest.mark.litellm
def test_a_provider_without_its_key_ends_the_run(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("test", "--model", "gpt-5-mini", "-q", cwd=repo)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.count("error:") == 1
    for part in ("openai/gpt-5-mini", "OPENAI_API_KEY", "--api-key"):
        assert part in done.stderr


def test_the_baseline_is_probed_too(osmosis: Osmosis, repo: Path) -> None:
    with ScriptedEndpoint(by_turn(text("3"))).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        done = osmosis("eval", *model, "--baseline-model", "old", "--baseline-base-url", NOWHERE, "-q", cwd=repo)
        assert (done.code, done.stdout) == (2, "")
        assert NOWHERE in done.stderr
        assert endpoint.chats == []


def test_what_may_pass_is_tried_again(osmosis: Osmosis, repo: Path) -> None:
    """One row meets a rate limit, one a broken server and a dropped connection, one a reply that never comes."""
    faults = {
        "What is 1 + 2?": [status(429, headers={"Retry-After": "1"})],
        "What is 3 + 4?": [status(503), drop(), status(500)],
        "What is 5 + 6?": [hang()],
    }
    arrivals: dict[str, list[float]] = {prompt: [] for prompt in faults}

    def script(request: Request) -> Reply:
        prompt = request.messages[1]["content"]
        arrivals[prompt].append(request.time)
        if faults[prompt]:
            return faults[prompt].pop(0)
        return text({"What is 1 + 2?": "3", "What is 3 + 4?": "7", "What is 5 + 6?": "11"}[prompt])

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--request-timeout", "1"]
        done = osmosis("test", *model, "--json", cwd=repo)
    assert done.code == 0, done.stderr
    summary = done.json["summary"]
    assert (summary["passed"], summary["functions"]["reward_fn.rewards:exact"]["mean"]) == (3, 1.0)
    assert [len(times) for times in arrivals.values()] == [2, 4, 2]
    first, second = arrivals["What is 1 + 2?"]
    assert second - first >= 1
    assert summary["total_tokens"] == 45


def test_what_reaches_the_endpoint(osmosis: Osmosis, repo: Path) -> None:
    with ScriptedEndpoint(by_turn(text("3"))).run_in_thread() as endpoint:
        name = "openai/Org/Model:v2"
        done = osmosis(
            *("test", "--base-url", endpoint.url + "/", "--model", name, "--api-key", "sk-the-right-key"),
            *("--temperature", "0.25", "--max-tokens", "77", "--limit", "1", "--json"),
            *("--param", "top_p=0.5", "--param", 'stop=["END", "\\n"]', "--param", "seed=7"),
            *("--param", 'chat_template_kwargs={"thinking": false}'),
            cwd=repo,
        )
        assert done.code == 0, done.stderr
        assert done.json["config"]["base_url"] == endpoint.url
        probe, request = endpoint.requests
    assert probe.is_probe
    expected = {
        "temperature": 0.25,
        "max_tokens": 77,
        "top_p": 0.5,
        "stop": ["END", "\n"],
        "seed": 7,
        "chat_template_kwargs": {"thinking": False},
    }
    assert {key: request.body[key] for key in expected} == expected
    assert request.messages == [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": "What is 1 + 2?"},
    ]
    for sent in (probe, request):
        assert sent.model == name
        assert sent.headers["authorization"] == "Bearer sk-the-right-key"
    config = done.json["config"]
    assert (config["model"], config["params"]) == (name, expected)
    # The probe is no rollout: its two tokens count nowhere.
    assert done.json["summary"]["total_tokens"] == 15


@pytest.mark.litellm
def test_a_litellm_provider_with_an_endpoint_of_its_own(osmosis: Osmosis, repo: Path) -> None:
    with ScriptedEndpoint(by_turn(tool_call("add", a=1, b=2), text("3"))).run_in_thread() as endpoint:
        env = {"OPENAI_API_KEY": "sk-litellm-key", "OPENAI_API_BASE": endpoint.url, "OSMOSIS_MODEL": "openai/scripted"}
        done = osmosis("test", "--limit", "1", "--temperature", "0.5", "--json", cwd=repo, env=env)
        assert done.code == 0, done.stderr
        first, second = endpoint.chats
    assert done.json["results"][0]["reward"] == 1.0
    assert (first.model, first.body["temperature"]) == ("scripted", 0.5)
    assert second.messages[-1]["content"] == "3"
    assert "sk-litellm-key" not in done.stdout + done.stderr


def test_without_a_model_a_stand_in_runs_and_says_so(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("test", cwd=repo)
    assert done.code == 0
    assert "offline/oracle is a stand-in" in done.stderr
    assert "offline stand-in" in done.stdout
    oracle = osmosis("eval", "--model", "offline/oracle", "--baseline-model", "offline/empty", "--json", cwd=repo)
    assert oracle.code == 0
    assert oracle.json["config"]["stand_in"] is True
    assert oracle.json["summary"]["eval_fns"]["reward_fn.rewards:exact"]["mean"] == 1.0
    assert oracle.json["baseline"]["eval_fns"]["reward_fn.rewards:exact"]["mean"] == 0.0


KEYS = {
    "option": "sk-option-0123456789abcdef",
    "environment": "sk-environment-0123456789ab",
    "dotenv": "sk-dotenv-0123456789abcdef",
}

LEAKING = """
import os
import sys
from fastmcp import FastMCP

mcp = FastMCP("leaking")


@mcp.tool
def leak(how: str) -> str:
    \"\"\"Show the keys.\"\"\"
    keys = os.environ["SEARCH_API_KEY"] + " " + os.environ["MAIL_TOKEN"]
    if how == "print":
        print(keys)
        print(keys, file=sys.stderr)
        os.write(1, keys.encode() + b"\\n")
    if how == "raise":
        raise RuntimeError(keys)
    return keys
"""

LEAKING_REWARD = """
import os
from osmosis_ai import osmosis_reward

print("imported with", os.environ["MAIL_TOKEN"])


@osmosis_reward
def leaking(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    raise ValueError("no score for " + os.environ["SEARCH_API_KEY"] + os.environ["MAIL_TOKEN"])
"""


def leaks(root: Path, *texts: str) -> list[str]:
    """Find the files outside .env that contain a key, plain or in base64."""
    files = [file for file in root.rglob("*") if file.is_file() and file.name != ".env"]
    contents = {str(file): file.read_bytes() for file in files}
    contents.update({f"stream {number}": text.encode() for number, text in enumerate(texts)})
    forms = {key.encode() for key in KEYS.values()} | {base64.b64encode(key.encode())[:-4] for key in KEYS.values()}
    return [name for name, content in contents.items() if any(form in content for form in forms)]


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_key_is_never_shown_or_written(output: str, osmosis: Osmosis, tmp_path: Path) -> None:
    """Tools, a reward function, the model and the endpoint's errors all show the keys; the rows hold them, too."""
    ways = ["return", "print", "raise", "echo", "refuse"]
    rows = [{"system_prompt": "s", "user_prompt": f"{way}, not {KEYS['environment']}"} for way in ways]
    repo = write_repo(tmp_path / "repo", main=LEAKING, rewards=LEAKING_REWARD, rows=[])
    (repo / ".env").write_text(f'MAIL_TOKEN="{KEYS["dotenv"]}"\n', encoding="utf-8")

    def script(request: Request) -> Reply:
        way = request.messages[1]["content"].partition(",")[0]
        everything = " ".join(KEYS.values())
        if way == "refuse":
            return status(400, body={"error": {"message": f"bad request with {request.headers['authorization']}"}})
        if way == "echo" or request.turn:
            encoded = base64.b64encode(everything.encode()).decode()
            return text(f"{everything} {encoded}", message={"reasoning_content": everything})
        return tool_call("leak", how=way)

    dataset = tmp_path / "data" / "rows.jsonl"
    dataset.parent.mkdir()
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        done = osmosis(
            *("eval", "--base-url", endpoint.url, "--model", "scripted", "--api-key", KEYS["option"], "-d", dataset),
            *("--debug", "-o", repo / "results.json", *(["--json"] if output == "json" else [])),
            cwd=repo,
            env={"SEARCH_API_KEY": KEYS["environment"]},
        )
        assert len(endpoint.chats) == 8
        assert endpoint.chats[0].headers["authorization"] == f"Bearer {KEYS['option']}"
    assert done.code == 1
    dataset.unlink()
    assert leaks(tmp_path, done.stdout, done.stderr) == []
    assert (repo / ".osmosis" / "runs.db").stat().st_size > 0
    results = json.loads((repo / "results.json").read_text(encoding="utf-8"))
    failed = results["rows"][4]["runs"][0]
    assert failed["error"].startswith("model: ")
    assert "bad request with" in failed["error"]
    assert results["summary"]["scoring_errors"] == 4


SHOWING = """
import os
from fastmcp import FastMCP

mcp = FastMCP("showing")


@mcp.tool
def show() -> list[str]:
    \"\"\"Show some variables.\"\"\"
    return [os.environ[name] for name in ("IN_THREE", "IN_TWO", "IN_ONE")]
"""


def test_env_files_of_the_working_directory_then_of_the_root(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", main=SHOWING)
    (repo / ".env").write_text(
        "IN_THREE=root\nIN_TWO=root\nIN_ONE='root'\nOSMOSIS_MODEL=root-model\n", encoding="utf-8"
    )
    (tmp_path / ".env").write_text(
        "IN_THREE=folder\nexport IN_TWO=folder\nOSMOSIS_API_KEY=sk-from-the-folder\n", encoding="utf-8"
    )
    with ScriptedEndpoint(by_turn(tool_call("show"), text("done"))).run_in_thread() as endpoint:
        done = osmosis(
            *("test", "--mcp", "repo/mcp", "--base-url", endpoint.url, "--limit", "1", "-q"),
            cwd=tmp_path,
            env={"IN_THREE": "environment"},
        )
        assert done.code == 0, done.stderr
        first, second = endpoint.chats
    assert json.loads(second.messages[-1]["content"]) == ["environment", "folder", "root"]
    assert first.model == "root-model"
    assert first.headers["authorization"] == "Bearer sk-from-the-folder"
    assert "sk-from-the-folder" not in done.stdout + done.stderr
