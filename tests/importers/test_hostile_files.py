"""Whatever a file has where something else belongs costs at most its own sample."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fuzz import CASES, generator, mutated
from osmosis_ai.errors import UsageError
from osmosis_ai.importers import IMPORT_FORMATS
from osmosis_ai.importers.base import Problem, RunFile
from osmosis_ai.runtime.run.imported import import_run
from osmosis_ai.store.queries import RolloutFilter
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.store.transcript import transcript
from osmosis_ai.store.views import encode_view, rollout_detail, run_view

FILES = Path(__file__).parents[1] / "data" / "imports"
RUNS = {"inspect": "sums.json", "verifiers": "traces.jsonl", "vf-eval": "vf-eval/results.jsonl"}
PROMPTFOO = {
    "prompts": ["Say {{a}}", '[{"role": "system", "content": "x"}, {"role": "user", "content": "{{a}}"}]'],
    "defaultTest": {"vars": {"b": "c"}, "assert": [{"type": "contains", "value": "d"}]},
    "tests": [{"vars": {"a": ["x", "y"]}, "assert": [{"type": "equals", "value": "x"}], "description": "e"}],
}


def first(name: str) -> Any:
    text = (FILES / name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return json.loads(text.splitlines()[0])
    log = json.loads(text)
    return {**log, "samples": log["samples"][:1]}


def write(file: Path, value: Any) -> None:
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "[" * 10_000
    file.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.anyio
async def test_a_mutated_log_is_imported_or_refused_and_what_is_imported_can_be_shown(
    name: str, tmp_path: Path
) -> None:
    chance, value = generator(), first(RUNS[name])
    file = tmp_path / f"log{Path(RUNS[name]).suffix}"
    with RunStore.open(tmp_path) as store:
        for _ in range(CASES // 30):
            write(file, mutated(value, chance))
            try:
                run, new, *_ = await import_run(store, IMPORT_FORMATS[name], file)
            except UsageError:
                continue
            encode_view(run_view(run))
            for scored in store.scored(run.id, RolloutFilter(), with_trajectory=True):
                encode_view(rollout_detail(scored))
                assert list(transcript(scored))
            if new:
                await store.delete_run(run.id)


def test_an_encrypted_archive_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.eval"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.json", "{}")
    content = bytearray(file.read_bytes())
    # The flag in the member's header, and in the directory's entry of it.
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + at] |= 1
    file.write_bytes(content)
    read = IMPORT_FORMATS["inspect"].read_run
    assert read is not None
    (problem,) = read(file, RunFile(tool="inspect_ai"))
    assert isinstance(problem, Problem)
    assert "encrypted" in problem.reason


def test_a_prompt_too_deep_for_json_is_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"prompts": ["[" * 100_000], "tests": [{}]}), encoding="utf-8")
    read = IMPORT_FORMATS["promptfoo"].read_rows
    assert read is not None
    (row,) = read(tmp_path / "config.json")
    assert not isinstance(row, Problem)


@pytest.mark.parametrize("name", ["promptfoo", "eval-protocol"])
def test_a_mutated_dataset_gives_rows_or_problems(name: str, tmp_path: Path) -> None:
    chance = generator()
    value = PROMPTFOO if name == "promptfoo" else first("eval_protocol.jsonl")
    file = tmp_path / ("config.json" if name == "promptfoo" else "rows.jsonl")
    read = IMPORT_FORMATS[name].read_rows
    assert read is not None
    problems = 0
    for _ in range(CASES):
        write(file, mutated(value, chance))
        problems += any(isinstance(each, Problem) for each in read(file))
    assert 0 < problems < CASES
