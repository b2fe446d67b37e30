"""Repositories with their own agent loops, by `-m`: workers, records, scores and limits as in MCP repositories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Finished, Osmosis, run_osmosis
from osmosis_ai.store.queries import Queries, ScoredRollout
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, by_turn, status, text, tool_call
from repos import copy_repo, seen, write_rows
from running import running
from watching import Watching

INSTANCE = ("-m", "server:agent_loop")
CLASS = ("-m", "calculator.agents:CalculatorAgent")
BAD = ("-m", "agents:agent")
SUMS = [
    {"user_prompt": "What is 1 + 2?", "ground_truth": "3", "level": 4},
    {"user_prompt": "What is 3 + 4?", "ground_truth": "7"},
]


def adding(request: Request) -> Reply:
    """Calls the tool, then answers with its result."""
    if request.turn:
        return text(request.messages[-1]["content"])
    first, second = (int(word.strip("?")) for word in request.messages[1]["content"].split()[2::2])
    return tool_call("add", a=first, b=second)


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(adding).run_in_thread() as endpoint:
        yield endpoint


def run(command: str, root: Path, endpoint: ScriptedEndpoint, *options: str, **environ: str) -> Finished:
    model = ("--base-url", endpoint.url, "--model", "scripted", "--json")
    return run_osmosis(command, *model, *options, cwd=root, env=environ)


def recorded(root: Path) -> list[ScoredRollout]:
    """The rollouts of the latest run."""
    store = Queries(root / ".osmosis" / "runs.db")
    return list(store.scored(store.find_run("latest").id, with_trajectory=True))


def by_word(result: dict[str, Any], words: list[str]) -> dict[str, dict[str, Any]]:
    assert len(result["results"]) == len(words)
    return {words[row["row_index"]]: row for row in result["results"]}


def test_an_instance_runs_unmodified_and_is_scored(tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    root = copy_repo("agent_instance", tmp_path, SUMS)
    fns = ("--eval-fn", "rewards:compute_reward", "--eval-fn", "rewards:used_a_tool")
    done = run("eval", root, endpoint, *INSTANCE, *fns, "--n", "2", "--temperature", "0.25")
    assert done.code == 0, done.stderr
    assert "agent: server:agent_loop (calculator)\ntools: add" in done.stderr
    summary = done.json["summary"]
    assert {name: one["mean"] for name, one in summary["eval_fns"].items()} == {
        "rewards:compute_reward": 1.0,
        "rewards:used_a_tool": 1.0,
    }
    assert summary["tools"]["add"]["calls"] == 4
    assert done.json["config"]["agent"] == "server:agent_loop"

    chats = endpoint.chats
    assert [chat.tools for chat in chats] == [chats[0].tools] * 8
    assert chats[0].tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {name: {"type": "number", "description": "A number"} for name in "ab"},
        "required": ["a", "b"],
    }
    assert {chat.body["temperature"] for chat in chats} == {0.25}

    first = recorded(root)[0].stored.rollout
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [turn.usage.total_tokens for turn in first.turns] == [15, 15]
    assert [(call.name, call.turn, call.error) for call in first.tool_calls] == [("add", 0, None)]
    assert first.agent is not None
    assert (first.agent.name, first.agent.finish_reason, first.agent.score) == ("calculator", "stop", None)
    assert first.agent.metrics["num_tool_calls"] == 1
    # What the loop prints goes to the run's log, with the row it belongs to.
    (log,) = (root / ".osmosis" / "logs").iterdir()
    assert "[row 1 run 1 stdout] adding {'a': 3, 'b': 4}" in log.read_text(encoding="utf-8")


def test_a_class_in_a_package_gives_rewards_of_its_own(tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    wrong = {"user_prompt": "What is 5 + 5?", "ground_truth": "11"}
    root = copy_repo("agent_class", tmp_path, [*SUMS, wrong])
    (root / "reward_fn").mkdir()
    (root / "reward_fn" / "rewards.py").write_text(
        "from osmosis_ai import osmosis_reward\n\n\n@osmosis_reward\n"
        "def half(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:\n    return 0.5\n",
        encoding="utf-8",
    )
    done = run("test", root, endpoint, *CLASS, "--temperature", "0.25", "--max-tokens", "7", ROLLOUT_DEBUG_DIR="debug")
    assert done.code == 0, done.stderr
    functions = done.json["summary"]["functions"]
    assert {name: one["mean"] for name, one in functions.items()} == {
        "calculator-agent": 0.75,
        "reward_fn.rewards:half": 0.5,
    }
    assert [row["scores"]["calculator-agent"] for row in done.json["results"]] == [1.0, 1.0, 0.25]
    assert [row["reward"] for row in done.json["results"]] == [0.75, 0.75, 0.375]
    assert [row["finish_reason"] for row in done.json["results"]] == ["stop"] * 3

    # The tools' schema arrives as it is, the row's columns in the request's metadata, the loop's own parameters over
    # those of the command.
    schema = endpoint.chats[0].tools[0]["function"]["parameters"]
    assert schema["$defs"]["number"]["anyOf"][1] == {"type": "string", "pattern": "^[0-9]+$"}
    assert schema["additionalProperties"] is False
    assert {chat.tools[0]["function"]["description"] for chat in endpoint.chats} == {"add, level 4", "add, level any"}
    assert {(chat.body["temperature"], chat.body["max_tokens"]) for chat in endpoint.chats} == {(0.5, 7)}

    rollouts = recorded(root)
    reports = [scored.stored.rollout.agent for scored in rollouts]
    assert [report.finish_reason for report in reports if report] == ["answered"] * 3
    events = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((root / "debug").iterdir())]
    assert [(event["event_type"], event["right"]) for event in events] == [
        ("finished", True),
        ("finished", True),
        ("finished", False),
    ]

    # A later rescore leaves the loop's own rewards alone.
    again = run_osmosis("runs", "rescore", "latest", "--json", cwd=root)
    assert again.code == 0, again.stderr
    assert [set(scored.scores) for scored in recorded(root)] == [{"calculator-agent", "reward_fn.rewards:half"}] * 3


def test_a_loops_own_reward_is_enough_for_eval(tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    root = copy_repo("agent_class", tmp_path, SUMS)
    done = run("eval", root, endpoint, *CLASS, "--n", "3", "--fail-under", "0.9")
    assert done.code == 0, done.stderr
    assert done.json["summary"]["eval_fns"]["calculator-agent"]["pass_at_1"] == 1.0

    without = copy_repo("agent_instance", tmp_path, SUMS)
    done = run("eval", without, endpoint, *INSTANCE)
    assert done.code == 1
    assert "nothing was scored" in done.stderr
    again = run_osmosis("runs", "rescore", cwd=root)
    assert again.code == 2
    assert "an agent loop's own rewards need a new run" in " ".join(again.stderr.split())


WRONGS = {
    "throw": "agent: ValueError: this loop is broken",
    "report": "agent: it did not work out",
    "edit": "agent: messages are append-only: message 1 (role 'user') differs",
    "edit-again": "agent: messages are append-only: message 1 (role 'user') differs",
    "wrong": "agent: run returned a dict, not a RolloutResult",
    "unsendable": "agent: final_messages can't be used",
    "binary": "agent: final_messages can't be used: message 3 holds bytes",
    "leave": "agent: SystemExit: 3",
    "no-tools": "agent: get_tools raised LookupError: these tools can't be found",
    "none-tools": "agent: get_tools must return a list of tools, not NoneType",
    "exit": "worker: exited with code 7",
    "exit-tools": "worker: exited with code 5",
    "hang": "timeout: the rollout took longer than 6 s",
    "cling": "timeout: the rollout took longer than 6 s",
    "block": "timeout: user code held the event loop for",
}
GOOD = ["fine", "endless", "odd-reward"]


def test_what_a_loop_does_wrong_costs_its_own_rollout(tmp_path: Path) -> None:
    words = [*WRONGS, "endless", "odd-reward", *["fine"] * 6]
    root = copy_repo("agent_misbehaving", tmp_path, [{"user_prompt": f"{word} {n}"} for n, word in enumerate(words)])
    (root / "rewards.py").write_text("def one(messages, ground_truth, metadata):\n    return 1.0\n", encoding="utf-8")
    with ScriptedEndpoint(by_turn(text("ok"))).run_in_thread() as endpoint:
        options = ("--timeout", "6", "--max-turns", "3", "--workers", "2", "-o", "results.json", "-q")
        model = ("--base-url", endpoint.url, "--model", "scripted", "--eval-fn", "rewards:one")
        done = run_osmosis("eval", *BAD, *model, *options, cwd=root)
    assert done.code == 1, done.stderr
    result = json.loads((root / "results.json").read_text(encoding="utf-8"))
    rows = {words[row["row_index"]]: row["runs"][0] for row in result["rows"]}
    assert len(result["rows"]) == len(words)
    for word, error in WRONGS.items():
        assert str(rows[word]["error"]).startswith(error), (word, rows[word])
    for row in result["rows"]:
        if words[row["row_index"]] in GOOD:
            assert row["runs"][0]["success"], row
            assert row["runs"][0]["scores"]["rewards:one"] == 1.0
    assert rows["endless"]["finish_reason"] == "max_turns"
    assert rows["odd-reward"]["scoring_errors"]["misbehaving"].startswith("agent: the loop's reward is nan, not a")

    stored = {words[scored.stored.rollout.row_index]: scored.stored.rollout for scored in recorded(root)}
    thrown = stored["throw"].failure
    assert thrown is not None
    assert thrown.file == "agents.py"
    assert thrown.line is not None
    assert "raise ValueError" in (root / "agents.py").read_text(encoding="utf-8").splitlines()[thrown.line - 1]
    lines = (root / "agents.py").read_text(encoding="utf-8").splitlines()
    for word, method in {"wrong": "async def run", "binary": "async def run", "none-tools": "def get_tools"}.items():
        failure = stored[word].failure
        assert failure is not None
        assert failure.line is not None, word
        assert lines[failure.line - 1].strip().startswith(method), (word, failure)
    # What there was of the conversation is kept, also when the process is gone.
    for word in ("exit", "hang", "block", "throw"):
        assert [message["role"] for message in stored[word].messages] == ["system", "user", "assistant"], word
    assert len(stored["endless"].turns) == 3
    assert [message["content"] for message in stored["edit"].messages] == ["Do it.", "edit 2", "ok"]


def test_rewrites_are_allowed_when_asked_for(tmp_path: Path) -> None:
    root = copy_repo("agent_misbehaving", tmp_path, [{"user_prompt": "edit-again now"}])
    with ScriptedEndpoint(by_turn(text("ok"), text("done"))).run_in_thread() as endpoint:
        done = run("test", root, endpoint, *BAD, "--allow-rewrites")
    assert done.code == 0, done.stderr
    messages = recorded(root)[0].stored.rollout.messages
    assert [message["content"] for message in messages] == ["Do it.", "something else", "ok", "done"]


def test_a_failing_model_is_the_models_failure(tmp_path: Path) -> None:
    root = copy_repo("agent_instance", tmp_path, SUMS[:1])
    with ScriptedEndpoint(lambda request: status(400)).run_in_thread() as endpoint:
        done = run("test", root, endpoint, *INSTANCE)
    assert done.code == 1
    (row,) = done.json["results"]
    assert row["error"].startswith("model: ")


@pytest.mark.parametrize("options", [("--workers", "0"), ("--isolation", "rollout")])
def test_loops_run_in_this_process_and_in_processes_of_their_own(tmp_path: Path, options: tuple[str, ...]) -> None:
    root = copy_repo("agent_misbehaving", tmp_path, [{"user_prompt": f"fine {n}"} for n in range(3)])
    with ScriptedEndpoint(by_turn(text("ok"))).run_in_thread() as endpoint:
        done = run("test", root, endpoint, *BAD, *options)
    assert done.code == 0, done.stderr
    processes = {pid for _, pid in seen(root)}
    assert len(processes) == (1 if options[0] == "--workers" else 3)


def test_runs_resume_and_replies_are_cached(tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    root = copy_repo("agent_class", tmp_path, SUMS)
    assert run("eval", root, endpoint, *CLASS, "--cache").code == 0
    asked = len(endpoint.chats)
    again = run("eval", root, endpoint, *CLASS, "--cache")
    assert again.json["summary"]["total_tokens"] == 0
    assert len(endpoint.chats) == asked

    (root / "more.py").write_text("from calculator.agents import CalculatorAgent\n", encoding="utf-8")
    other = run("eval", root, endpoint, "-m", "more:CalculatorAgent", "--resume-run", "latest")
    assert other.code == 2
    assert "--module changed (calculator.agents:CalculatorAgent → more:CalculatorAgent)" in other.stderr
    same = run("eval", root, endpoint, *CLASS, "--resume-run", "latest")
    assert same.code == 0, same.stderr
    assert len(endpoint.chats) == asked


@pytest.mark.in_process
def test_a_save_reruns_what_it_makes_stale(tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    root = copy_repo("agent_class", tmp_path, SUMS)
    options = ("--watch", "--json", "--base-url", endpoint.url, "--model", "m")
    with running("test", *CLASS, *options, cwd=root) as process:
        watching = Watching(process, root, endpoint)
        first = watching.next()
        assert [row["reward"] for row in first["results"]] == [1.0, 1.0]
        source = (root / "calculator" / "arithmetic.py").read_text(encoding="utf-8")
        wrong = watching.save({"calculator/arithmetic.py": source.replace("a + b", "a - b")})
        assert [row["reward"] for row in wrong["results"]] == [0.25, 0.25]
        assert wrong["iteration"]["redone"]["rollouts"] == 2
        # The first turn's request is unchanged, so only what comes after it is asked for.
        assert wrong["iteration"]["redone"]["cached_turns"] == 2
        broken = watching.save({"calculator/arithmetic.py": "def add(a, b)\n"})
        assert broken["error"]["file"] == "calculator/arithmetic.py"
        assert broken["error"]["line"] == 1
        mended = watching.save({"calculator/arithmetic.py": source})
        assert [row["reward"] for row in mended["results"]] == [1.0, 1.0]


def test_stepping_through_a_loop(tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    root = copy_repo("agent_instance", tmp_path, SUMS)
    lines = ("n", "n", "call add {}", "m", "c", "q")
    done = run_osmosis(
        *("test", *INSTANCE, "-i", "--base-url", endpoint.url, "--model", "scripted"),
        cwd=root,
        env={"TERM": "dumb"},
        typed="".join(f"{line}\n" for line in lines),
    )
    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "an agent loop runs its tools itself" in done.stdout
    assert [len(scored.stored.rollout.turns) for scored in recorded(root)] == [2]


REFUSED = {
    ("-m", "server"): "the name of the loop is missing; write MODULE:ATTRIBUTE, for example server:agent_loop",
    ("-m", "server.py:agent_loop"): "the module is written with dots, as in an import: server:agent_loop",
    ("-m", "srver:agent_loop"): "there is no module srver in",
    ("-m", "server:agent_lop"): "there is no agent_lop in server.py; did you mean agent_loop?",
    ("-m", "server:ADD"): "server.py: `ADD` is of type OpenAIFunctionToolSchema, not an agent loop",
    ("-m", "server:agent_loop", "--mcp", "."): "-m and --mcp each name an agent",
    ("-m", "unnamed:agent"): "unnamed.Unnamed is an agent loop without a name",
}


def test_what_cant_be_run_is_said_before_anything_is_asked(tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    root = copy_repo("agent_instance", tmp_path, SUMS)
    (root / "unnamed.py").write_text(
        "from osmosis_ai.rollout import RolloutAgentLoop\n\n\nclass Unnamed(RolloutAgentLoop):\n"
        "    def get_tools(self, request):\n        return []\n\n    async def run(self, ctx):\n        ...\n\n\n"
        "agent = Unnamed()\n",
        encoding="utf-8",
    )
    for options, said in REFUSED.items():
        done = run("test", root, endpoint, *options)
        assert done.code == 2, (options, done.stderr)
        assert said in done.stderr, (options, done.stderr)
        assert "Traceback" not in done.stderr
    assert endpoint.requests == []


BAD_TOOLS = """
from osmosis_ai.rollout import RolloutAgentLoop


class Base(RolloutAgentLoop):
    name = "odd"

    def get_tools(self, request):
        return [{{"function": {{"parameters": {{"type": "array"}}}}}}]

    async def run(self, ctx):
        return ctx.complete([])


class Empty(Base):
    name = " "


class Number(Base):
    name = 7


class Plain(Base):
    def run(self, ctx):
        return ctx.complete([])


class Nothing(Base):
    def get_tools(self, request):
        return None


class Needing(Base):
    def __init__(self, key):
        self.key = key


class Raises(Base):
    def get_tools(self, request):
        raise KeyError("level")
"""


def test_validate_says_what_is_wrong_with_a_loop(tmp_path: Path, osmosis: Osmosis) -> None:
    root = copy_repo("agent_instance", tmp_path, SUMS)
    (root / "odd.py").write_text(BAD_TOOLS.replace("{{", "{").replace("}}", "}"), encoding="utf-8")
    good = osmosis("validate", *INSTANCE, "-v", cwd=root)
    assert good.code == 0, good.stderr
    assert "agent calculator, server.py:" in good.stdout
    assert "add: Add two numbers" in good.stdout
    assert "no problems found" in good.stdout
    for name, code in {
        "Base": "MISSING_TOOL_TYPE",
        "Empty": "EMPTY_NAME",
        "Number": "INVALID_NAME_TYPE",
        "Plain": "RUN_NOT_ASYNC",
        "Nothing": "GET_TOOLS_RETURNS_NONE",
        "Raises": "GET_TOOLS_EXCEPTION",
    }.items():
        done = osmosis("validate", "-m", f"odd:{name}", "--json", cwd=root)
        assert done.code == 1, done.stderr
        found = {finding["code"]: finding for finding in done.json["findings"]}
        assert code in found, (name, found)
        assert found[code]["severity"] == "error"
        assert found[code]["file"] == "odd.py"
    needing = osmosis("validate", "-m", "odd:Needing", cwd=root)
    assert needing.code == 1
    # Every line of a message stands below its first.
    (line,) = (line for line in needing.stdout.splitlines() if "Write an instance of it" in line)
    assert line.startswith(" " * 26), needing.stdout
    missing = osmosis("validate", "-m", "unnamed:agent", "--json", cwd=root)
    assert missing.code == 2
    (root / "unnamed.py").write_text(
        BAD_TOOLS.replace("{{", "{").replace("}}", "}").replace('name = "odd"', "pass"), encoding="utf-8"
    )
    missing = osmosis("validate", "-m", "unnamed:Base", "--json", cwd=root)
    assert missing.code == 1
    assert [finding["code"] for finding in missing.json["findings"]] == ["MISSING_NAME"]


def test_an_edited_dataset_row_keeps_what_is_recorded(tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    """A loop's changes to a row's metadata are not recorded."""
    root = copy_repo("agent_instance", tmp_path, SUMS)
    (root / "spoils.py").write_text(
        "from server import CalculatorLoop\n\n\nclass Spoils(CalculatorLoop):\n"
        "    async def run(self, ctx):\n        ctx.request.metadata.clear()\n"
        "        ctx.request.completion_params['temperature'] = 9.0\n        return await super().run(ctx)\n",
        encoding="utf-8",
    )
    write_rows(root, SUMS)
    done = run("test", root, endpoint, "-m", "spoils:Spoils", "--workers", "0", "--temperature", "0.5")
    assert done.code == 0, done.stderr
    assert [scored.row.extra for scored in recorded(root)] == [{"level": 4}, {}]
    assert {chat.body["temperature"] for chat in endpoint.chats} == {9.0}
