"""What identifies a run, and which stored run an option resumes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from osmosis_ai.config import RunConfig, WorkersConfig
from osmosis_ai.errors import StartError
from osmosis_ai.runtime.protocol import Ready
from osmosis_ai.runtime.run.plan import RunPlan
from osmosis_ai.runtime.run.prepare import prepare
from osmosis_ai.runtime.run.resume import find_resumable, run_config, run_identity
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.store.tables import RunStatus

MODEL = {"model": "m", "base_url": "http://127.0.0.1:9/v1"}


def plan(repo: Path, **options: Any) -> RunPlan:
    return prepare(RunConfig.of(**{**MODEL, **options}), repo, {}).plan


def identity(plan: RunPlan, dataset: str = "hash of the rows") -> dict[str, Any]:
    return run_identity(plan, dataset, {"mcp/main.py": "hash of the tools"})


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one | other if one.get(name) != other.get(name)]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"limit": 2}, "rows"),
        ({"offset": 1}, "rows"),
        ({"model": "another"}, "model"),
        ({"base_url": "http://127.0.0.1:8/v1"}, "endpoint"),
        ({"temperature": 0.5}, "parameters"),
        ({"max_tokens": 7}, "parameters"),
        ({"param": {"top_p": 0.5}}, "parameters"),
        ({"max_turns": 3}, "parameters"),
        ({"max_tokens_total": 99}, "parameters"),
        ({"max_tool_output": 99}, "parameters"),
        ({"n": 2}, "n"),
        ({"baseline_model": "offline/empty"}, "baseline"),
    ],
)
def test_what_changes_a_rollout_is_compared(repo: Path, options: dict[str, Any], name: str) -> None:
    assert differing(identity(plan(repo)), identity(plan(repo, **options))) == [name]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2, "workers": 3, "isolation": "rollout", "worker_memory": "2GB"},
        {"timeout": 5.0, "tool_timeout": 5.0, "request_timeout": 5.0, "reward_timeout": 5.0, "max_cost": 3.0},
        {"eval_fn": ["exact"], "pass_threshold": 0.5, "fail_under": 0.5, "score_partial": True},
        {"api_key": "sk-another", "cache": True},
    ],
)
def test_what_no_rollout_depends_on_may_change(repo: Path, options: dict[str, Any]) -> None:
    assert identity(plan(repo)) == identity(plan(repo, **options))


def test_a_run_in_sandboxes_goes_on_in_sandboxes(repo: Path) -> None:
    without = plan(repo)
    workers = [WorkersConfig(isolation="sandbox"), WorkersConfig(isolation="sandbox", sandbox_network=True)]
    # Replaced in the plan: preparing one would look for bubblewrap.
    configs = [msgspec.structs.replace(without.config, workers=one) for one in workers]
    closed, open_ = (identity(msgspec.structs.replace(without, config=config)) for config in configs)
    assert differing(identity(without), closed) == differing(closed, open_) == ["sandbox"]


def test_a_temperature_is_compared_wherever_it_was_given(repo: Path) -> None:
    assert identity(plan(repo, temperature=0.5)) == identity(plan(repo, param={"temperature": 0.5}))


def test_the_datasets_content_counts_and_not_its_name(repo: Path) -> None:
    (repo / "same.jsonl").write_bytes((repo / "test_data.jsonl").read_bytes())
    assert identity(plan(repo)) == identity(plan(repo, dataset="same.jsonl"))
    assert differing(identity(plan(repo)), identity(plan(repo), "other rows")) == ["dataset"]


def test_every_module_beside_the_tools_is_their_code(repo: Path) -> None:
    before = identity(plan(repo))
    (repo / "reward_fn" / "more.py").touch()
    assert identity(plan(repo)) == before
    # A tool may import it at its next call.
    (repo / "mcp" / "later.py").touch()
    assert differing(before, identity(plan(repo))) == ["tool code"]


def test_without_a_folder_of_tools_their_imported_files_are_their_code(repo: Path) -> None:
    loop = msgspec.structs.replace(plan(repo), agent="agents:loop", agent_dir=None)
    one = run_identity(loop, "rows", {"agents.py": "1"})
    assert differing(one, run_identity(loop, "rows", {"agents.py": "2"})) == ["tool code"]
    assert differing(one, run_identity(plan(repo), "rows", {"agents.py": "1"})) == ["agent", "tool code"]


def test_a_runs_data_has_its_options_without_keys(repo: Path) -> None:
    stored = run_config(plan(repo, n=2, api_key="sk-secret", baseline_model="offline/empty"), Ready(functions=["f"]))
    assert (stored["model"], stored["baseline_model"], stored["n"]) == ("m", "offline/empty", 2)
    assert (stored["functions"], stored["tools"], stored["agent"]) == (["f"], [], None)
    assert b"sk-secret" not in msgspec.json.encode(stored)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(tmp_path) as opened:
        yield opened


def add(store: RunStore, status: RunStatus, rows: int = 1, command: str = "eval") -> str:
    async def create() -> str:
        run_id = await store.create_run(command, identity={"rows": rows, "model": "m"}, config={})
        await store.mark(run_id, status)
        return run_id

    return asyncio.run(create())


def find(store: RunStore, name: str | None = None, *, rows: int = 1, finished: bool = False) -> str:
    return find_resumable(store, "eval", {"rows": rows, "model": "m"}, name, finished=finished)


def test_the_latest_unfinished_run_that_matches_is_resumed(store: RunStore) -> None:
    add(store, "interrupted")
    latest = add(store, "interrupted")
    add(store, "interrupted", rows=2)
    add(store, "finished")
    add(store, "interrupted", command="test")
    # This process is alive, so it may still write that run.
    add(store, "running")
    assert find(store) == latest


def test_failed_rollouts_of_a_finished_run_can_be_retried(store: RunStore) -> None:
    finished = add(store, "finished")
    add(store, "running")
    with pytest.raises(StartError, match="there is no unfinished run of `osmosis eval` to continue; start a new one"):
        find(store)
    assert find(store, finished=True) == finished


def test_without_any_run_it_says_so(store: RunStore) -> None:
    with pytest.raises(StartError, match="there is no run of `osmosis eval` to continue"):
        find(store, finished=True)


def test_a_run_that_differs_is_refused_with_the_names_of_what_differs(store: RunStore) -> None:
    run = add(store, "interrupted")
    identity = {"rows": 1, "model": "another"}
    changes = re.escape("--model changed (m → another); use the same as that run")
    for name in (None, run):
        with pytest.raises(StartError, match=f"can't resume run {run}: {changes}"):
            find_resumable(store, "eval", identity, name, finished=False)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"limit": 2, "offset": 1}, "--limit changed (not set → 2), --offset changed (0 → 1)"),
        ({"max_turns": 3}, "--max-turns changed (10 → 3)"),
        ({"temperature": 0.5}, "--temperature changed (not set → 0.5)"),
        ({"param": {"top_p": 0.9}}, "--param top_p changed (not set → 0.9)"),
        ({"base_url": "http://localhost:9/v1"}, "--base-url changed (http://127.0.0.1:9/v1 → http://localhost:9/v1)"),
        ({"baseline_model": "offline/empty"}, "--baseline-model changed (not set → offline/empty)"),
        ({"n": 2}, "--n changed (1 → 2)"),
    ],
)
def test_each_option_that_differs_is_named_with_both_values(
    repo: Path, store: RunStore, options: dict[str, Any], change: str
) -> None:
    async def create() -> str:
        run_id = await store.create_run("eval", identity=identity(plan(repo)), config={})
        await store.mark(run_id, "interrupted")
        return run_id

    run = asyncio.run(create())
    with pytest.raises(StartError, match=re.escape(f"can't resume run {run}: {change}; use the same")):
        find_resumable(store, "eval", identity(plan(repo, **options)), None, finished=False)


def test_a_run_of_a_version_without_an_option_goes_on_while_the_option_has_its_default(
    repo: Path, store: RunStore
) -> None:
    before = identity(plan(repo))
    del before["tokenizer"]
    for name in ("max_turns", "max_tool_output"):
        del before["parameters"][name]

    async def create() -> str:
        run_id = await store.create_run("eval", identity=before, config={})
        await store.mark(run_id, "interrupted")
        return run_id

    run = asyncio.run(create())
    assert find_resumable(store, "eval", identity(plan(repo)), None, finished=False) == run
    with pytest.raises(StartError, match=re.escape("--max-turns changed (10 → 3); use the same")):
        find_resumable(store, "eval", identity(plan(repo, max_turns=3)), None, finished=False)


def test_a_named_run_is_found_by_the_beginning_of_its_id(store: RunStore) -> None:
    older = add(store, "finished")
    add(store, "interrupted")
    assert find(store, older[:-1]) == older


def test_a_named_run_must_exist_and_be_of_the_same_command(store: RunStore) -> None:
    run = add(store, "interrupted", command="test")
    with pytest.raises(StartError, match=f"run {run} is a run of `osmosis test`: resume it with that command"):
        find(store, run)
    with pytest.raises(StartError, match="there is no run 'nothing'"):
        find(store, "nothing")
