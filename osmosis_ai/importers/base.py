"""The interface of import formats, and helpers that their readers share. Imports neither the store nor pyarrow.

Anything that a file doesn't record stays unknown: None where a record allows it, 0 for a time that can't be None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from osmosis_ai.bounds import count_of, too_deep
from osmosis_ai.data.formats.source import Source, not_utf8, text_lines, too_large
from osmosis_ai.data.formats.source import too_deep as nested_too_deep
from osmosis_ai.records import JsonObject, Message, Rollout, Score, Tool, ToolCall, Turn, Usage
from osmosis_ai.text import json_text

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "Attempt",
    "BadSampleError",
    "ImportFormat",
    "ImportedRow",
    "Left",
    "Problem",
    "RunFile",
    "calls_in",
    "converted",
    "finite",
    "ground_truth",
    "json_lines",
    "json_object",
    "milliseconds",
    "moment",
    "numbers",
    "opening",
    "parts_text",
    "plain",
    "total",
]

MAX_DOCUMENT_BYTES = 512 * 1024 * 1024
"""Maximum size of a file that is read at once; JSONL files and archives may be larger."""

MAX_DURATION, MAX_MOMENT = 1e9, 1e11
"""Upper bounds in seconds, 30 years and the year 5138, within which values can be shown."""

T = TypeVar("T")


class BadSampleError(Exception):
    """One sample is unreadable; later ones may be fine."""


class Problem(NamedTuple):
    """Something unreadable: its place in the file, and the reason. Reading stops after a `final` problem."""

    where: str
    reason: str
    final: bool = False


class Left(NamedTuple):
    """Something left out on purpose, described by a phrase that can be counted."""

    reason: str


class Attempt(NamedTuple):
    """A rollout that another tool ran.

    Attempts with the same `key` belong to the same row. `rollout` has no row number yet; `run_index` is None if the
    file doesn't number attempts. `finished_at` is in seconds since the epoch, None if unknown.
    """

    key: str
    system_prompt: str
    user_prompt: str
    ground_truth: str | None
    extra: JsonObject
    rollout: Rollout
    scores: Sequence[Score] = ()
    run_index: int | None = None
    finished_at: float | None = None


class ImportedRow(NamedTuple):
    """A dataset row; an empty `system_prompt` means that the file has none."""

    system_prompt: str
    user_prompt: str
    ground_truth: object
    extra: JsonObject


@dataclass
class RunFile:
    """A file's description of its run. Readers fill it in as they go, so it is complete once all attempts are read.

    Attributes:
        tool: The tool that ran it and its version.
        task: The name of the task.
        models: The models, each once.
        ended: False if the file says that the run didn't finish.
        planned: The number of rollouts planned; None if unknown.
        created_at: The run's start in seconds since the epoch.
        scorers: The functions that scored it; those found in scores are added.
        notes: Notes on the scores for the user.
    """

    tool: str
    task: str | None = None
    models: dict[str, None] = field(default_factory=dict)
    base_url: str | None = None
    stand_in: bool = False
    params: JsonObject = field(default_factory=dict)
    tools: dict[str, Tool] = field(default_factory=dict)
    scorers: dict[str, None] = field(default_factory=dict)
    pass_threshold: float = 1.0
    planned: int | None = None
    created_at: float | None = None
    finished_at: float | None = None
    ended: bool = True
    notes: dict[str, None] = field(default_factory=dict)

    def offer(self, tool: Mapping[str, object]) -> None:
        """Add a tool's name, description and parameters, if `tool` has the form of a schema."""
        name = tool.get("name")
        if isinstance(name, str) and name not in self.tools:
            function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
            self.tools[name] = {"type": "function", "function": function}


ReadRun: TypeAlias = "Callable[[Path, RunFile], Iterator[Attempt | Problem | Left]]"
ReadRows: TypeAlias = "Callable[[Path], Iterator[ImportedRow | Problem]]"


class ImportFormat(NamedTuple):
    """An import format, with a reader of runs or of rows.

    Attributes:
        description: The files it reads, for help and errors.
        recognises: Returns True for its files, given the path and the file's start, up to its first line break or
            `HEAD_BYTES`.
        read_run: Yields the attempts of a run and fills in the `RunFile`. Readers don't raise: they yield a `Problem`.
        read_rows: Yields dataset rows.
    """

    name: str
    description: str
    recognises: Callable[[Path, bytes], bool]
    read_run: ReadRun | None = None
    read_rows: ReadRows | None = None


def json_object(data: bytes) -> JsonObject:
    """Parse a JSON object, with NaN and infinities as null; raise BadSampleError."""
    try:
        try:
            value = msgspec.json.decode(data)
        except msgspec.DecodeError:
            # Python's json module writes NaN and lone surrogates, which strict parsers reject.
            value = plain(json.loads(data))
    except UnicodeDecodeError as error:
        raise BadSampleError(not_utf8(error)) from None
    except RecursionError:
        raise BadSampleError(nested_too_deep()) from None
    except ValueError as error:
        raise BadSampleError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadSampleError("not a JSON object")
    if too_deep(value):
        raise BadSampleError(nested_too_deep())
    return value


def plain(value: object) -> object:
    """Convert a value to plain JSON data: NaN becomes null, dates become text, and text is valid Unicode.

    Raises:
        TypeError: A mapping has a key that can't be a name.
    """
    encoded = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace")
    return json.loads(encoded, parse_constant=lambda _: None)


def json_lines(path: Path, read: Callable[[JsonObject], Iterable[T]]) -> Iterator[T | Problem]:
    """Yield the results of `read` for each line of a JSONL file, or a `Problem`."""
    try:
        with Source(path) as source:
            for number, line in enumerate(text_lines(source.file), 1):
                where = f"line {number}"
                if line is None:
                    yield Problem(where, too_large())
                elif not line.isspace():
                    try:
                        yield from read(json_object(line))
                    except BadSampleError as error:
                        yield Problem(where, str(error))
    except OSError as error:
        yield Problem("", f"can't be read: {error.strerror or error}", final=True)


def converted(value: object, kind: type[T], what: str) -> T:
    """Convert a value to a record; raise BadSampleError if it isn't `what`."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadSampleError(f"not {what}: {error}") from None


def parts_text(content: str | list[JsonObject] | None) -> object:
    """Return a message's content, as text if it has only text parts."""
    if not isinstance(content, list):
        return content
    if all(part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content


def opening(messages: Sequence[Message]) -> tuple[str, str]:
    """Return the system prompt and the user prompt that a conversation starts with."""
    prompts: dict[str, list[str]] = {"system": [], "user": []}
    for message in messages:
        if message["role"] == "assistant":
            break
        if message["role"] in prompts:
            content = message.get("content")
            prompts[message["role"]].append(content if isinstance(content, str) else json_text(content))
    return "\n\n".join(prompts["system"]), "\n\n".join(prompts["user"])


def ground_truth(value: object) -> str | None:
    """Convert a reference answer to a row's ground truth: text, or JSON text for other values."""
    # inspect_ai allows several targets; a list of one is the target itself.
    if isinstance(value, list) and len(value) == 1:
        return ground_truth(value[0])
    if value is None or value == "" or isinstance(value, str):
        return value or None
    return json_text(value)


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    found = ((name, finite(value)) for name, value in values.items())
    return {name: value for name, value in found if value is not None}


def finite(value: object) -> float | None:
    """Return a finite number or a truth value as a float; None for anything else."""
    try:
        found = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        # JSON's integers have any number of digits.
        return None
    return found if math.isfinite(found) else None


def milliseconds(seconds: float | None) -> float:
    """Return a duration in milliseconds; 0 if it is unknown or out of range."""
    return round(seconds * 1000, 3) if seconds is not None and 0 <= seconds <= MAX_DURATION else 0.0


def moment(seconds: float | None) -> float | None:
    """Return a time in seconds since the epoch; None if it is unknown or out of range."""
    # Tools write 0 for a time that they don't know.
    return seconds if seconds is not None and 0 < seconds <= MAX_MOMENT else None


def calls_in(messages: Sequence[Message]) -> list[ToolCall]:
    """Return the tool calls of a conversation that have a result, for files that record nothing else about them."""
    replies = -1
    open_calls: dict[str, ToolCall] = {}
    found = []
    for message in messages:
        if message["role"] == "assistant":
            replies += 1
            for call in message.get("tool_calls") or ():
                function = call["function"]
                open_calls[call["id"]] = ToolCall(replies, call["id"], function["name"], function["arguments"], 0.0)
        elif message["role"] == "tool" and message["tool_call_id"] in open_calls:
            found.append(open_calls.pop(message["tool_call_id"]))
    return found


def total(turns: Iterable[Turn]) -> Usage:
    """Return the total tokens of model calls."""
    usages = [turn.usage for turn in turns]
    prompt, completion, both = (
        count_of(sum(getattr(usage, name) for usage in usages)) for name in Usage.__struct_fields__
    )
    return Usage(prompt, completion, both)
