"""A fault in user code or an endpoint fails only the rollout that caused it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from commands import Finished, run_osmosis
from osmosis_ai.testing import (
    Gate,
    Reply,
    Request,
    ScriptedEndpoint,
    broken_json,
    drop,
    hang,
    raw_json,
    text,
    tool_call,
    tool_calls,
)
from repos import ADDING, copy_repo, seen, write_repo, write_rows

EXACT, FAULTY = "reward_fn.scores:exact", "reward_fn.scores:faulty"

TOOL_FAULTS = {
    # What ends the worker or holds it for good ends the rollout.
    "exits": r"worker: exited with code 7 \(while running exits\)",
    "segfaults": r"worker: killed by SIGSEGV \(while running segfaults\)",
    "leaks": r"worker: it held \d+ MiB .*, over the limit of 700 MiB \(--worker-memory\) \(while running leaks\)",
    "leaves_children_and_dies": r"worker: exited with code 8 \(while running leaves_children_and_dies\)",
    "forks_and_dies": r"worker: exited with code 9 \(while running forks_and_dies\)",
    "blocks_the_loop": r"timeout: user code held the event loop for \d+ s \(while running blocks_the_loop\)",
    "holds_the_interpreter": r"timeout: .* held the interpreter for \d+ s \(while running holds_the_interpreter\)",
    "stops_itself": r"timeout: user code stopped the process \(SIGSTOP\) \(while running stops_itself\)",
    # The rest is an answer for the model, good or bad, and the rollout goes on.
    "stops_its_parent": None,
    "raises_system_exit": None,
    "raises_keyboard_interrupt": None,
    "blocks_a_thread": None,
    "leaves_children": None,
    "detaches": None,
    "forks": None,
    "floods": None,
    "returns_much": None,
    "returns_an_object": None,
}
TOOL_ERRORS = {
    "raises_system_exit": "exception",
    "raises_keyboard_interrupt": "exception",
    "blocks_a_thread": "timeout",
    "returns_an_object": "exception",
}
SCORE_FAULTS = {
    "exits": r"reward: exited with code 7",
    "segfaults": r"reward: killed by SIGSEGV",
    "leaks": r"reward: it held \d+ MiB of memory, over the limit of 700 MiB \(--worker-memory\)",
    "forks_and_dies": r"reward: exited with code 9",
    "holds_the_interpreter": r"reward: .* held the interpreter for \d+ s",
    "blocks": r"reward: took longer than 2 s",
    "stops_itself": r"reward: user code stopped the process \(SIGSTOP\)",
    "stops_its_parent": None,
    "raises_system_exit": r"reward: SystemExit: 3",
    "raises_keyboard_interrupt": r"reward: KeyboardInterrupt",
    "returns_much": r"reward: TypeError: .* returned 'x+\.\.\.x+', which is of type str; .*",
    "returns_an_object": r"reward: TypeError: .* returned <unlocked .*, which is of type lock; .*",
    "leaves_children": None,
    "floods": None,
}
FINE = 12


def call_then_answer(request: Request) -> Reply:
    """A model that calls the tool its prompt names, if any, and says `done`."""
    prompt = request.messages[1]["content"]
    return tool_call(prompt) if request.turn == 0 and prompt != "answer" else text("done")


class Faults(NamedTuple):
    """One run in which everything goes wrong at once."""

    root: Path
    done: Finished
    rows: dict[str, dict[str, Any]]


def run_faults(folder: Path) -> Faults:
    names = [f"tool:{name}" for name in TOOL_FAULTS] + [f"score:{name}" for name in SCORE_FAULTS]
    names += [f"fine:{number}" for number in range(FINE)]
    # Spread, so that what misbehaves has what doesn't beside it all the time.
    names.sort(key=lambda name: hash_of(name))
    rows = []
    for name in names:
        kind, _, what = name.partition(":")
        prompt = {"tool": what, "fine": "fine", "score": "answer"}[kind]
        rows.append({"user_prompt": prompt, "name": name, "fault": what if kind == "score" else None})
    root = copy_repo("misbehaving", folder, rows)
    with ScriptedEndpoint(call_then_answer).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        limits = ["--tool-timeout", "2", "--reward-timeout", "2", "--timeout", "60", "--worker-memory", "700MB"]
        done = run_osmosis("test", *model, *limits, "--workers", "2", "--batch-size", "6", "--json", cwd=root)
        results = done.json["results"]
        assert [result["row_index"] for result in results] == list(range(len(names))), done.stderr
        return Faults(root, done, dict(zip(names, results, strict=True)))


def hash_of(name: str) -> int:
    return sum(ord(letter) * (index + 7) ** 2 for index, letter in enumerate(name)) % 1009


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return run_faults(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", TOOL_FAULTS)
@pytest.mark.xdist_group("faults")
def test_a_tool_fault_is_its_own_rollouts(name: str, faults: Faults) -> None:
    result = faults.rows[f"tool:{name}"]
    pattern = TOOL_FAULTS[name]
    if pattern is None:
        assert (result["success"], result["error"], result["finish_reason"]) == (True, None, "stop")
        assert result["scores"] == {EXACT: 1.0, FAULTY: 0.5}
    else:
        assert result["success"] is False
        assert re.fullmatch(pattern, result["error"]), result["error"]
        assert result["finish_reason"] == ("timeout" if pattern.startswith("timeout") else "error")
        assert (result["scores"], result["scoring_errors"]) == ({}, {})
    assert result["tool_calls"] == 1


@pytest.mark.parametrize("name", SCORE_FAULTS)
@pytest.mark.xdist_group("faults")
def test_a_reward_fault_costs_its_own_score(name: str, faults: Faults) -> None:
    result = faults.rows[f"score:{name}"]
    pattern = SCORE_FAULTS[name]
    assert (result["success"], result["error"]) == (True, None)
    assert result["scores"] == {EXACT: 1.0, FAULTY: None if pattern else 0.5}
    if pattern is None:
        assert result["scoring_errors"] == {}
    else:
        assert result["scoring_errors"].keys() == {FAULTY}
        assert re.fullmatch(pattern, result["scoring_errors"][FAULTY]), result["scoring_errors"]


@pytest.mark.xdist_group("faults")
def test_all_others_are_untouched(faults: Faults) -> None:
    fine = [result for name, result in faults.rows.items() if name.startswith("fine:")]
    assert len(fine) == FINE
    for result in fine:
        assert (result["success"], result["error"], result["reward"]) == (True, None, 0.75)
        assert (result["scores"], result["scoring_errors"]) == ({EXACT: 1.0, FAULTY: 0.5}, {})


@pytest.mark.xdist_group("faults")
def test_the_summary_counts_each_fault_once(faults: Faults) -> None:
    summary = faults.done.json["summary"]
    ended = sum(pattern is not None for pattern in TOOL_FAULTS.values())
    unscored = sum(pattern is not None for pattern in SCORE_FAULTS.values())
    assert (summary["total"], summary["failed"], summary["missing"]) == (len(faults.rows), ended, 0)
    assert summary["scoring_errors"] == unscored
    assert faults.done.code == 1
    errors = {name: tool["errors"] for name, tool in summary["tools"].items() if tool["errors"]}
    ends = {name: pattern.partition(":")[0] for name, pattern in TOOL_FAULTS.items() if pattern is not None}
    assert errors == {name: {kind: 1} for name, kind in {**TOOL_ERRORS, **ends}.items()}


@pytest.mark.xdist_group("faults")
def test_the_log_of_a_flood_is_bounded(faults: Faults) -> None:
    (log,) = (faults.root / ".osmosis" / "logs").glob("*.log")
    assert log.stat().st_size < 40 << 20
    assert "further output left out" in log.read_text(encoding="utf-8")


def test_what_was_paid_for_is_not_paid_again_for_a_score(tmp_path: Path) -> None:
    """A function that crashes its worker causes no further model call."""
    names = ["exits", "fine", "segfaults", "forks_and_dies", "fine"]
    rows = [{"user_prompt": "answer", "fault": name} for name in names]
    root = copy_repo("misbehaving", tmp_path, rows)
    with ScriptedEndpoint(call_then_answer).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--workers", "2"]
        done = run_osmosis("test", *model, "--json", "-q", cwd=root)
        assert done.json["summary"]["scoring_errors"] == 3
        assert len(endpoint.chats) == len(names)


def test_who_waits_for_the_model_is_never_blamed(tmp_path: Path) -> None:
    """A rollout completes even if its neighbours crash worker after worker."""
    names = [str(number) for number in range(10)]
    rows = [{"user_prompt": "answer"}, *({"user_prompt": "exits", "system_prompt": name} for name in names)]
    root = copy_repo("misbehaving", tmp_path, rows)
    all_have_begun = Gate()
    begun = set()

    def script(request: Request) -> Reply:
        system, user = request.messages[:2]
        if user["content"] == "answer":
            return text("done").after(all_have_begun)
        begun.add(system["content"])
        if len(begun) == len(names):
            all_have_begun.open()
        return call_then_answer(request)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        done = run_osmosis("test", *model, "--workers", "1", "--batch-size", "2", "--json", "-q", cwd=root)
        first, *others = done.json["results"]
        assert (first["error"], first["reward"]) == (None, 0.75), done.stdout
        assert {result["error"] for result in others} == {"worker: exited with code 7 (while running exits)"}


def test_every_fault_with_a_process_for_each_rollout(tmp_path: Path) -> None:
    names = ["exits", "segfaults", "fine", "blocks_the_loop", "forks_and_dies", "leaves_children_and_dies"]
    names += ["leaves_children", "detaches", "forks"]
    root = copy_repo("misbehaving", tmp_path, [{"user_prompt": name} for name in names])
    with ScriptedEndpoint(call_then_answer).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--tool-timeout", "2"]
        done = run_osmosis("test", *model, "--isolation", "rollout", "--json", "-q", cwd=root)
        for name, result in zip(names, done.json["results"], strict=True):
            pattern = TOOL_FAULTS.get(name)
            if pattern is None:
                assert (result["error"], result["reward"]) == (None, 0.75)
            else:
                assert re.fullmatch(pattern, result["error"]), result["error"]
        pids = [pid for name, pid in seen(root) if not name.startswith("score")]
        assert len(pids) == len(set(pids)) == len(names)


def test_processes_that_end_at_the_same_moment_take_none_along(tmp_path: Path) -> None:
    number = 24
    rows = [{"user_prompt": "exits", "system_prompt": str(row)} for row in range(number)]
    root = copy_repo("misbehaving", tmp_path, rows)
    all_have_begun = Gate()
    begun = set()

    def script(request: Request) -> Reply:
        begun.add(request.messages[0]["content"])
        if len(begun) == number:
            all_have_begun.open()
        return tool_call("exits").after(all_have_begun)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--batch-size", str(number)]
        done = run_osmosis("test", *model, "--isolation", "rollout", "--json", "-q", cwd=root)
        errors = {result["error"] for result in done.json["results"]}
        assert errors == {"worker: exited with code 7 (while running exits)"}
        assert len(seen(root)) == len(endpoint.chats) == number


SOMETIMES_BROKEN = """
from pathlib import Path

with Path("loads").open("a") as loads:
    loads.write("x")
    loads.flush()
    number = loads.tell() - 1
if number in {broken}:
    raise RuntimeError(f"load {number} went wrong")
"""
DIES = '''

@mcp.tool
def dies() -> None:
    """End the process."""
    import os

    os._exit(7)
'''


def add_or_die(request: Request) -> Reply:
    if request.turn > 0:
        return text("3")
    return tool_call("dies") if "1 + 2" in request.messages[1]["content"] else tool_call("add", a=1, b=2)


@pytest.mark.parametrize("isolation", ["session", "rollout"])
def test_a_server_that_fails_while_starting_ends_the_run(isolation: str, tmp_path: Path) -> None:
    main = SOMETIMES_BROKEN.replace("{broken}", "range(100)") + ADDING
    root = write_repo(tmp_path / "repo", main=main)
    with ScriptedEndpoint(add_or_die).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--isolation", isolation]
        done = run_osmosis("test", *model, "-q", cwd=root)
        assert (done.code, done.stdout) == (2, "")
        assert "mcp/main.py:9: RuntimeError: load" in done.stderr
        assert "Traceback" not in done.stderr
        assert endpoint.requests == []


def test_a_server_that_fails_on_one_reload_is_loaded_again(tmp_path: Path) -> None:
    main = SOMETIMES_BROKEN.replace("{broken}", "{1}") + ADDING.replace("\n\nif __name__", DIES + "\n\nif __name__")
    root = write_repo(tmp_path / "repo", main=main)
    with ScriptedEndpoint(add_or_die).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--workers", "1", "--batch-size", "1"]
        done = run_osmosis("test", *model, "-q", "--json", cwd=root)
        errors = [result["error"] for result in done.json["results"]]
        assert errors == ["worker: exited with code 7 (while running dies)", None, None]
        assert done.code == 1


def test_a_server_that_fails_on_every_reload_leaves_no_row_without_a_record(tmp_path: Path) -> None:
    main = SOMETIMES_BROKEN.replace("{broken}", "range(1, 100)") + ADDING.replace(
        "\n\nif __name__", DIES + "\n\nif __name__"
    )
    root = write_repo(tmp_path / "repo", main=main)
    with ScriptedEndpoint(add_or_die).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--workers", "1", "--batch-size", "1"]
        done = run_osmosis("test", *model, "-q", "--json", cwd=root)
        results = done.json["results"]
        assert [result["row_index"] for result in results] == [0, 1, 2]
        for result in results:
            assert result["error"].startswith("worker: ")
            assert "mcp/main.py:9: RuntimeError: load" in result["error"]
        assert done.code == 1


def same_ids(*ids: str | None) -> Reply:
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": f'{{"a": {index}, "b": 10}}'}}
        | ({} if call_id is None else {"id": call_id})
        for index, call_id in enumerate(ids)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return raw_json({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})


def ids_then_results(request: Request, *ids: str | None) -> Reply:
    """A model that makes calls with these ids, then answers with the results in order, if every id is unique."""
    if request.turn == 0:
        return same_ids(*ids)
    calls = request.messages[2]["tool_calls"]
    results = request.messages[3:]
    assert [call["id"] for call in calls] == [result["tool_call_id"] for result in results]
    assert len({call["id"] for call in calls}) == len(calls)
    return text(" ".join(result["content"] for result in results))


ENDPOINT_FAULTS: dict[str, tuple[Any, str | None]] = {
    "hangs": (hang(), r"model: .* gave no answer within 1 s \(after 6 attempts\)"),
    "drops": (drop(), r"model: .* \(after 6 attempts\)"),
    "broken JSON": (broken_json(), r"model: .* answered with broken JSON .*"),
    "no choices": (raw_json({"choices": []}), r"model: .* has an empty `choices`: not a chat completion"),
    "no id": (lambda request: ids_then_results(request, None, None), None),
    "the same id": (lambda request: ids_then_results(request, "call", "call"), None),
    "fine": (lambda request: tool_calls([("add", {"a": 0, "b": 10}), ("add", {"a": 1, "b": 10})])
             if request.turn == 0 else text("10 11"), None),
}  # fmt: skip


EndpointFaults = tuple[Finished, dict[str, Any], list[Request]]


@pytest.fixture(scope="module")
def endpoint_faults(tmp_path_factory: pytest.TempPathFactory) -> EndpointFaults:
    root = write_repo(tmp_path_factory.mktemp("endpoint") / "repo")
    write_rows(root, [{"user_prompt": name, "ground_truth": "10 11"} for name in ENDPOINT_FAULTS])

    def script(request: Request) -> Reply:
        reply, _ = ENDPOINT_FAULTS[request.messages[1]["content"]]
        return reply(request) if callable(reply) else reply

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--request-timeout", "1"]
        done = run_osmosis("test", *model, "--batch-size", "7", "-q", "--json", cwd=root)
        return done, dict(zip(ENDPOINT_FAULTS, done.json["results"], strict=True)), endpoint.chats


@pytest.mark.parametrize("name", ENDPOINT_FAULTS)
@pytest.mark.xdist_group("endpoint faults")
def test_an_endpoint_fault_is_its_own_rollouts(name: str, endpoint_faults: EndpointFaults) -> None:
    done, results, requests = endpoint_faults
    result = results[name]
    pattern = ENDPOINT_FAULTS[name][1]
    attempts = sum(request.messages[1]["content"] == name for request in requests)
    if pattern is None:
        assert (result["error"], result["reward"], attempts) == (None, 1.0, 2), done.stderr
    else:
        assert re.fullmatch(pattern, result["error"]), result["error"]
        assert result["finish_reason"] == "error"
        assert attempts == (6 if "6 attempts" in pattern else 1)
