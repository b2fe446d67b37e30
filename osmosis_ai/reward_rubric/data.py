"""Read records to judge: JSONL with a `solution_str` in every line, or the answers in a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from osmosis_ai.conversation import last_answer
from osmosis_ai.errors import DatasetError
from osmosis_ai.records import Record
from osmosis_ai.reward_rubric.reply import finite_number
from osmosis_ai.store.queries import Queries, RolloutFilter, RunInfo
from osmosis_ai.store.verdicts import HUMAN

__all__ = ["MAX_LINE_BYTES", "RubricRecord", "holds_solutions", "load_records", "records_of_run"]

MAX_LINE_BYTES = 16 << 20
SHOWN_PROBLEMS = 10

_TEXTS = ("conversation_id", "rubric_id", "original_input", "system_prompt")
_OBJECTS = ("metadata", "extra_info")
_NUMBERS = ("score_min", "score_max")


class RubricRecord(Record, frozen=True):
    """One record to judge.

    `index` is its position among the file's records, from 0; `values` are its columns as in the file.
    """

    index: int
    line: int
    solution_str: str
    values: dict[str, Any]
    conversation_id: str | None = None
    rubric_id: str | None = None
    original_input: str | None = None
    ground_truth: str | None = None
    metadata: dict[str, Any] | None = None
    extra_info: dict[str, Any] | None = None
    system_prompt: str | None = None
    score_min: float | None = None
    score_max: float | None = None

    @property
    def id(self) -> str:
        """Its name in reports."""
        return self.conversation_id or f"record-{self.index}"


def load_records(path: Path) -> list[RubricRecord]:
    """Read and check every record of a JSONL file.

    Raises:
        DatasetError: The file is missing, empty or unreadable, or records are invalid; the first ten are listed.
    """
    records: list[RubricRecord] = []
    problems: list[str] = []
    for line, data in _lines(path):
        try:
            records.append(_record(len(records), line, data))
        except _BadRecord as error:
            problems.append(f"line {line}: {error}")
    if len(problems) == 1:
        raise DatasetError(f"{path}, {problems[0]}")
    if problems:
        more = [f"and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
        listed = "\n".join(f"  {problem}" for problem in [*problems[:SHOWN_PROBLEMS], *more])
        raise DatasetError(f"{path}: {len(problems)} problems\n{listed}")
    if not records:
        raise DatasetError(f"{path}: the file has no records.")
    return records


def records_of_run(runs: Queries, run: RunInfo, *, with_verdict: bool) -> list[RubricRecord]:
    """Make a record of every answer in a run, as rubrics judged it there; a person's verdict is its label.

    Failed rollouts have no answer. `with_verdict` leaves out those without a verdict.

    Raises:
        DatasetError: The run has no such answer.
        StoreError: It can't be read.
    """
    records: list[RubricRecord] = []
    for scored in runs.scored(run.id, RolloutFilter(with_verdict=with_verdict), with_trajectory=True):
        rollout, row = scored.stored.rollout, scored.row
        solution = last_answer(rollout.messages)
        if rollout.failure is not None or not solution.strip():
            continue
        label = {} if scored.verdict is None else {HUMAN: scored.verdict.value}
        name = f"row {rollout.row_index}, attempt {rollout.run_index}"
        name += "" if rollout.policy == "policy" else f", {rollout.policy}"
        values = {**row.extra, "conversation_id": name, "solution_str": solution, **label}
        asked, truth = row.user_prompt or None, row.ground_truth
        records.append(RubricRecord(len(records), 0, solution, values, name, original_input=asked, ground_truth=truth))
    if not records:
        advice = " with a verdict: give some in `osmosis view`, with the keys 1 and 0" if with_verdict else ""
        raise DatasetError(f"run {run.id} has no answer{advice}")
    return records


def holds_solutions(path: Path) -> bool:
    """Return True if the first record of a JSONL file has a `solution_str` instead of prompts."""
    _, data = next(_lines(path), (0, None))
    try:
        values = msgspec.json.decode(data or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(values, dict) and "solution_str" in values


class _BadRecord(Exception):  # noqa: N818 - says what the record is, and never leaves this module
    """One record can't be used."""


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and bytes of every non-blank line; None for one that is too long."""
    try:
        if not path.is_file():
            found = "a folder, where a JSONL file is expected" if path.is_dir() else "no such file"
            raise DatasetError(f"{path}: {found}.")
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    # Skip the rest of the line without holding it in memory.
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    yield number, None
                    continue
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield number, line
    # A path with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None


def _record(index: int, line: int, data: bytes | None) -> RubricRecord:
    if data is None:
        raise _BadRecord(f"larger than {MAX_LINE_BYTES >> 20} MiB, the most a record may take")
    try:
        values = msgspec.json.decode(data)
    except UnicodeDecodeError as error:
        raise _BadRecord(f"not UTF-8: {error.reason}") from None
    except RecursionError:
        raise _BadRecord("nested too deeply") from None
    except msgspec.DecodeError as error:
        raise _BadRecord(f"not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise _BadRecord(f"{_kind(values)}, where an object is expected")
    solution = values.get("solution_str")
    if "solution_str" not in values:
        found = ", ".join(map(repr, list(values)[:20])) or "no column"
        raise _BadRecord(f"column solution_str is missing (found: {found})")
    if not isinstance(solution, str) or not solution.strip():
        raise _BadRecord(f"column solution_str: {_kind(solution)}, where text is expected")
    fields: dict[str, Any] = {}
    for name in (*_TEXTS, *_OBJECTS, *_NUMBERS):
        value = values.get(name)
        if value is not None:
            fields[name] = _checked(name, value)
    low, high = fields.get("score_min"), fields.get("score_max")
    if low is not None and high is not None and low >= high:
        raise _BadRecord(f"score_min ({low:g}) must be less than score_max ({high:g})")
    truth = values.get("ground_truth")
    if truth is not None and not isinstance(truth, str):
        truth = msgspec.json.encode(truth, order="deterministic").decode()
    return RubricRecord(index, line, solution, values, ground_truth=truth, **fields)


def _checked(name: str, value: Any) -> Any:
    if name == "conversation_id" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if name in _TEXTS:
        if not isinstance(value, str):
            raise _BadRecord(f"column {name}: {_kind(value)}, where text is expected")
        return value if value.strip() else None
    if name in _OBJECTS:
        if not isinstance(value, dict):
            raise _BadRecord(f"column {name}: {_kind(value)}, where an object is expected")
        return value
    number = finite_number(value)
    if number is None:
        raise _BadRecord(f"column {name}: {_kind(value)}, where a finite number is expected")
    return number


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text" if value.strip() else "only whitespace" if value else "an empty string"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"
