"""Rubric files: accepted and refused content, within bounded time and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest

from osmosis_ai.errors import UsageError
from osmosis_ai.reward_rubric.configs import MAX_FILE_BYTES, load_rubric, load_rubrics

GOOD = """\
version: 1
default_score_min: 1
default_score_max: 5
default_model_info: &judge {provider: openai, model: gpt-5-mini, timeout: 45}
rubrics:
  - id: support_followup
    title: Support Follow-Up Effectiveness
    rubric: |-
      Is the customer told
      what happens next?
    model_info: {<<: *judge, model: gpt-5}
    score_min: 0.0
    system_prompt: Be strict.
    original_input: Where is my parcel?
    ground_truth: Tomorrow.

  - id: tone
    rubric: Is it polite?
"""
ENTRY = "version: 1\nrubrics:\n  - id: a\n    rubric: r\n    model_info: {provider: openai, model: m}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rubric_configs.yaml"


def test_a_file_is_read_with_its_defaults(file: Path) -> None:
    file.write_text(GOOD, encoding="utf-8")
    full, short = load_rubrics(file)
    assert (full.id, full.title, full.line) == ("support_followup", "Support Follow-Up Effectiveness", 6)
    assert full.rubric == "Is the customer told\nwhat happens next?"
    assert full.model_info == {"provider": "openai", "model": "gpt-5", "timeout": 45}
    assert (full.score_min, full.score_max) == (0.0, 5.0)
    assert (full.system_prompt, full.original_input, full.ground_truth) == (
        "Be strict.",
        "Where is my parcel?",
        "Tomorrow.",
    )
    assert short.model_info == {"provider": "openai", "model": "gpt-5-mini", "timeout": 45}
    assert (short.score_min, short.score_max, short.line) == (1.0, 5.0, 17)
    assert load_rubric(file, "tone") == short
    with pytest.raises(UsageError, match=r"no rubric 'tonne'; did you mean tone\? It has: support_followup, tone"):
        load_rubric(file, "tonne")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "contains only comments"),
        ("just text", "it holds text"),
        ("rubrics: []", "`version` is missing; write `version: 1`"),
        ("version: 2\nrubrics: []", "version 2 is unknown; this release reads version 1"),
        ("version: true\nrubrics: []", "version True is unknown"),
        ("version: 1", "`rubrics` must be a list"),
        ("version: 1\nrubrics: []", "`rubrics` must be a list"),
        ("version: 1\nrubric: []", "the key 'rubric' is unknown; did you mean 'rubrics'"),
        ("version: 1\nrubrics: [text]", ":2: rubric 1: is text"),
        (ENTRY + "    extra_info: {a: 1}\n", ":3: rubric 'a': `extra_info` belongs to a record of the data"),
        (ENTRY + "    score_mx: 1\n", ":3: rubric 'a': the key 'score_mx' is unknown; did you mean 'score_max'"),
        (ENTRY.replace("model: m", "modell: m"), "'a': model_info: the key 'modell' is unknown; did you mean 'model'"),
        (ENTRY.replace("id: a", "title: a"), ":3: rubric 1: `id` is missing"),
        (ENTRY.replace("id: a", "id: 7"), 'rubric 1: `id` is a number .7., where text is expected; quote it: id: "7"'),
        (ENTRY.replace("rubric: r", "rubric: '  '"), "'a': `rubric` is empty"),
        (ENTRY.replace("rubric: r", "rubric: 2024-01-01"), "'a': `rubric` is a date"),
        (ENTRY + "    ground_truth: 42\n", "`ground_truth` is a number .42., where text is expected; quote it"),
        (ENTRY.replace("provider: openai, ", ""), "'a': model_info needs a 'provider'"),
        (ENTRY.replace("{provider: openai, model: m}", "gpt"), "'a': `model_info` is text"),
        (ENTRY.replace("    model_info: {provider: openai, model: m}\n", ""), "'a': `model_info` is missing"),
        (ENTRY.replace("m}", "m, timeout: soon}"), r"'a': model_info\['timeout'\] must be a number"),
        (ENTRY.replace("m}", "m, timeout: -1}"), "'a': model_info: timeout is -1"),
        (ENTRY + "    score_min: 1\n", r"'a': score_min \(1\) must be less than score_max \(1\)"),
        (ENTRY + "    score_min: low\n", "'a': `score_min` is text, where a number is expected"),
        (ENTRY + "    score_max: .nan\n", "'a': `score_max` is a number .nan., where a number is expected"),
        (ENTRY + "    score_max: .inf\n", "`score_max` is a number"),
        (ENTRY + "  - id: a\n    rubric: r\n", ":6: rubric 'a': `model_info` is missing"),
        (ENTRY + ENTRY.split("rubrics:\n")[1], ":6: rubric 2: line 3 already uses the id 'a'"),
        (ENTRY + "    title: x\n    title: y\n", ":7: duplicate key 'title'"),
        (ENTRY + "---\nversion: 1\n", "not valid YAML: but found another document"),
        (ENTRY + "    title: [\n", "not valid YAML"),
        (ENTRY + "    title: !!python/object/apply:os.getcwd []\n", ":6: not valid YAML: could not determine"),
        (ENTRY + "    title: \0\n", "not valid YAML"),
        (ENTRY + "    score_max: 0x" + "f" * 400 + "\n", "`score_max` is a number"),
    ],
    ids=range(35),
)
def test_a_mistake_is_shown_with_file_and_entry(content: str, message: str, file: Path) -> None:
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        load_rubrics(file)
    assert str(caught.value).startswith(str(file))


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_rubrics(tmp_path / "missing.yaml")
    with pytest.raises(UsageError, match="not a file"):
        load_rubrics(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("version: 1\n# Größe\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.yaml:2: not UTF-8 \(byte 0xf6\)"):
        load_rubrics(latin)


BILLION = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {k: v, l: w}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
BOMBS = {
    "aliases": (BILLION, "its aliases expand to more than 100,000 values"),
    "merges": (MERGES, "its aliases expand to more than 100,000 values"),
    "itself": ("a: &a [*a]\n", "contains itself"),
    "deep": ("a: " + "[" * 400_000, "nested too deeply"),
    "levels": ("a: " + "[" * 60 + "]" * 60, "nested more than 50 levels deep"),
    "long": ("#" * (MAX_FILE_BYTES + 1), "larger than 1 MiB"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_bounded_time(name: str, file: Path) -> None:
    content, message = BOMBS[name]
    file.write_text(content, encoding="utf-8")
    started = perf_counter()
    with pytest.raises(UsageError, match=message):
        load_rubrics(file)
    # Hundreds of times what it takes; unbounded expansion would take days.
    assert perf_counter() - started < 60


def test_a_bomb_takes_no_memory(file: Path) -> None:
    file.write_text(BILLION, encoding="utf-8")
    code = (
        "import resource, sys, pathlib\n"
        "from osmosis_ai.reward_rubric.configs import load_rubrics\n"
        "from osmosis_ai.errors import UsageError\n"
        "import yaml\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    load_rubrics(pathlib.Path(sys.argv[1]))\n"
        "except UsageError:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 50 << 20
