"""Exports are whole or absent, lossless as JSON lines, and of one schema as Parquet."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from osmosis_ai.exports import EXPORT_FORMATS, format_of
from osmosis_ai.exports.base import ExportOptions
from osmosis_ai.exports.rollouts import ExportedRollout, Selection, exported_rollouts
from osmosis_ai.folders import replaced_file
from osmosis_ai.records import (
    Failure,
    Logprobs,
    Rollout,
    Row,
    Score,
    TokenIds,
    TokenLogprob,
    ToolCall,
    Turn,
    Usage,
    Verdict,
)
from osmosis_ai.store.queries import RolloutFilter, RunInfo
from osmosis_ai.store.run_store import RunStore

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "look"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "annotations": [1],
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}, "index": 0},
            {"id": "b", "type": "function", "function": {"name": "add", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "2"},
    {"role": "assistant", "content": "2"},
]


def unmasked(data: bytes) -> bytes:
    return data


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(tmp_path) as opened:
        yield opened


def save(store: RunStore, rollouts: list[tuple[Rollout, Row, list[Score]]], **config: Any) -> RunInfo:
    async def run() -> str:
        run_id = await store.create_run("eval", identity={}, config=config)
        for rollout, row, scores in rollouts:
            key = await store.save_rollout(run_id, rollout, row)
            await store.save_scores({key: scores})
        return run_id

    return store.find_run(asyncio.run(run()))


def entry(index: int, *scores: Score, policy: str = "policy", **fields: Any) -> tuple[Rollout, Row, list[Score]]:
    values = {"messages": MESSAGES, "finish_reason": "stop", "duration_ms": 2.0, **fields}
    rollout = Rollout(f"{policy}{index}", index, f"r{index}", 0, policy, **values)
    return rollout, Row(index, f"r{index}", "s", "u", "2", {"big": 10**30, "mixed": [None, "x"]}), list(scores)


write_jsonl, write_parquet = (EXPORT_FORMATS[name].write for name in ("jsonl", "parquet"))


def objects(store: RunStore, run: RunInfo, **selection: Any) -> list[ExportedRollout]:
    return list(exported_rollouts(store, run, Selection(**selection), RolloutFilter()))


def parquet(items: list[ExportedRollout], functions: list[str]) -> Any:
    sink = io.BytesIO()
    assert write_parquet(iter(items), sink, ExportOptions(functions, unmasked)).records == len(items)
    return pq.read_table(io.BytesIO(sink.getvalue()))


def test_json_lines_keep_everything(store: RunStore) -> None:
    turn = Turn(
        0, "stop", Usage(3, 4, 7), 5.0, "served", {"temperature": 0.5},
        logprobs=Logprobs([TokenLogprob("2", -0.1)]),
        token_ids=TokenIds([1, 2], [3]),
    )  # fmt: skip
    call = ToolCall(0, "a", "add", '{"a":1}', 1.0)
    run = save(
        store,
        [entry(4, Score("m:f", 0.1 + 0.2), turns=[turn], tool_calls=[call], usage=Usage(3, 4, 7), cost_usd=0.25)],
        model="the model",
        tools=TOOLS,
    )
    asyncio.run(store.save_verdict(run.id, "policy4", Verdict(1, "clear")))
    sink = io.BytesIO()
    exported = exported_rollouts(store, run, Selection(), RolloutFilter())
    assert write_jsonl(exported, sink, ExportOptions([], unmasked)) == (1, {})
    assert json.loads(sink.getvalue()) == {
        "id": "policy4",
        "run_id": run.id,
        "row_id": "r4",
        "row_index": 4,
        "run_index": 0,
        "policy": "policy",
        "model": "the model",
        "messages": MESSAGES,
        "tools": TOOLS,
        "reward": 0.1 + 0.2,
        "rewards": {"m:f": 0.1 + 0.2},
        "scoring_errors": {},
        "finish_reason": "stop",
        "error": None,
        "human": 1,
        "human_note": "clear",
        "ground_truth": "2",
        "metadata": {"big": 10**30, "mixed": [None, "x"]},
        "token_usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "cost_usd": 0.25,
        "duration_ms": 2.0,
        "turns": [
            {
                "finish_reason": "stop",
                "model": "served",
                "params": {"temperature": 0.5},
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "duration_ms": 5.0,
                "attempts": 1,
                "logprobs": {"content": [{"token": "2", "logprob": -0.1}]},
                "prompt_token_ids": [1, 2],
                "token_ids": [3],
            }
        ],
    }


def test_parquet_nests_what_has_a_form_and_keeps_the_rest_as_json(store: RunStore) -> None:
    turn = Turn(0, "stop", Usage(), 5.0, params={"top_p": 1}, logprobs=Logprobs([]), token_ids=TokenIds([1, 2**63 - 1]))
    run = save(store, [entry(0, Score("m:f", 1.0), turns=[turn])], tools=TOOLS)
    (row,) = parquet(objects(store, run), ["m:f", "m:g"]).to_pylist()
    assert row["rewards"] == {"m:f": 1.0, "m:g": None}
    assert json.loads(row["tools"]) == TOOLS
    assert json.loads(row["metadata"]) == {"big": 10**30, "mixed": [None, "x"]}
    assert json.loads(row["messages"][1]["content"]) == MESSAGES[1]["content"]
    reply = row["messages"][2]
    assert (reply["content"], reply["reasoning_content"]) == (None, "hm")
    assert reply["tool_calls"][0] == {
        "id": "a",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a":1}'},
    }
    assert json.loads(reply["extra"]) == {"annotations": [1], "tool_calls": MESSAGES[2]["tool_calls"]}
    assert row["messages"][4]["extra"] is None
    assert row["messages"][4]["tool_calls"] is None
    assert json.loads(row["turns"][0]["logprobs"]) == {"content": []}
    assert (row["turns"][0]["prompt_token_ids"], row["turns"][0]["token_ids"]) == ([1, 2**63 - 1], None)


def test_the_schema_of_parquet_does_not_depend_on_the_rows(store: RunStore) -> None:
    full = save(store, [entry(0, Score("m:f", 1.0), turns=[Turn(0, "stop", Usage(), 1.0)])], tools=TOOLS, model="x")
    bare = save(store, [entry(0, messages=[])])
    assert parquet(objects(store, full), ["m:f"]).schema == parquet(objects(store, bare), ["m:f"]).schema
    assert parquet([], ["m:f"]).num_rows == 0
    assert "rewards" not in parquet(objects(store, bare), []).column_names


def test_parquet_is_written_in_groups(store: RunStore) -> None:
    run = save(store, [entry(0)])
    (item,) = objects(store, run)
    sink = io.BytesIO()
    write_parquet((item for _ in range(2500)), sink, ExportOptions([], unmasked))
    metadata = pq.ParquetFile(io.BytesIO(sink.getvalue())).metadata
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [1000, 1000, 500]


def test_the_format_of_a_file() -> None:
    assert format_of(None).name == format_of("run").name == format_of("run.jsonl").name == "jsonl"
    assert format_of("a/run.parquet").name == "parquet"


def test_the_documentation_lists_every_format() -> None:
    page = (Path(__file__).parents[1] / "docs" / "runs.md").read_text(encoding="utf-8")
    for name, each in EXPORT_FORMATS.items():
        assert f"| `{name}` | `{each.suffix}` |" in page


def test_selections(store: RunStore) -> None:
    failure = Failure("timeout", "too slow")
    run = save(
        store,
        [
            entry(0, Score("f", 1.0), Score("g", 0.0)),
            entry(1, Score("f", 1.0), Score("g", 1.0)),
            entry(2, Score("f", 1.0), Score("g", failure=Failure("reward", "broke"))),
            entry(3, Score("f", 1.0), failure=failure, finish_reason="timeout"),
            entry(4),
            entry(4, Score("f", 1.0), policy="baseline"),
        ],
        model="ours",
        baseline_model="theirs",
    )

    def indices(**selection: Any) -> list[int]:
        return [item.row_index for item in objects(store, run, **selection)]

    assert indices() == [0, 1, 2, 3, 4]
    assert indices(min_reward=0.5) == [0, 1]
    assert indices(min_score=0.5) == [1]
    assert indices(policy="all") == [0, 1, 2, 3, 4, 4]
    assert [item.model for item in objects(store, run, policy="baseline")] == ["theirs"]
    broken, failed = objects(store, run)[2:4]
    assert (broken.reward, broken.scoring_errors) == (None, {"g": "reward: broke"})
    assert (failed.error, failed.finish_reason) == ("timeout: too slow", "timeout")


def test_a_broken_export_leaves_what_was_there(store: RunStore, tmp_path: Path) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    target = folder / "out.jsonl"

    def broken() -> Iterator[ExportedRollout]:
        yield from objects(store, save(store, [entry(0)]))
        raise RuntimeError("halfway")

    def export() -> None:
        with replaced_file(target) as sink:
            write_jsonl(broken(), sink, ExportOptions([], unmasked))

    with pytest.raises(RuntimeError, match="halfway"):
        export()
    assert list(folder.iterdir()) == []
    target.write_text("earlier", encoding="utf-8")
    with pytest.raises(RuntimeError, match="halfway"):
        export()
    assert [path.name for path in folder.iterdir()] == ["out.jsonl"]
    assert target.read_text(encoding="utf-8") == "earlier"


def test_a_replaced_file_keeps_its_link_and_its_permissions(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old", encoding="utf-8")
    real.chmod(0o600)
    link.symlink_to(real)
    with replaced_file(link) as sink:
        sink.write(b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert real.stat().st_mode & 0o777 == 0o600


def test_a_file_is_private_until_it_is_whole_and_then_like_any_new_one(tmp_path: Path) -> None:
    ordinary, private = tmp_path / "ordinary", tmp_path / "private"
    ordinary_mode = (tmp_path / "other").touch() or (tmp_path / "other").stat().st_mode
    with replaced_file(ordinary) as sink:
        (partial,) = tmp_path.glob("*.partial")
        assert partial.stat().st_mode & 0o77 == 0
        sink.write(b"rows")
    assert ordinary.stat().st_mode == ordinary_mode
    private.touch(0o644)
    with replaced_file(private, private=True) as sink:
        sink.write(b"rows")
    assert private.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with replaced_file(pipe) as sink:
        sink.write(b"rows")
    reader.join()
    assert read == [b"rows"]
    assert pipe.is_fifo()
