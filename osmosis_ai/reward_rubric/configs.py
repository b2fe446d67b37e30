"""Read rubric files: YAML, bounded in size and depth, checked entry by entry."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osmosis_ai.errors import UsageError
from osmosis_ai.records import Record
from osmosis_ai.reward_rubric.reply import finite_number

if TYPE_CHECKING:
    import yaml

__all__ = ["DEFAULT_FILE", "MAX_FILE_BYTES", "Rubric", "did_you_mean", "load_rubric", "load_rubrics"]

DEFAULT_FILE = "rubric_configs.yaml"
MAX_FILE_BYTES = 1 << 20
MAX_NODES = 100_000
"""Values that a file may expand to through its aliases."""
MAX_DEPTH = 50
VERSION = 1

_TEXTS = ("id", "rubric", "title", "system_prompt", "original_input", "ground_truth")
_OPTIONAL = ("title", "score_min", "score_max", "system_prompt", "original_input", "ground_truth")
_ENTRY_KEYS = ("id", "rubric", "model_info", *_OPTIONAL)
_WITH_DEFAULT = ("model_info", "score_min", "score_max", "system_prompt", "original_input")
_FILE_KEYS = ("version", "rubrics", *(f"default_{name}" for name in _WITH_DEFAULT))
_JUDGE_KEYS = ("provider", "model", "api_key", "api_key_env", "api_base", "timeout", "reasoning_effort")
_MODEL_KEYS = (*_JUDGE_KEYS, "score_min", "score_max", "system_prompt", "original_input")


class Rubric(Record, frozen=True):
    """One entry of a rubric file, with the file's defaults filled in. `line` is its first line."""

    id: str
    rubric: str
    model_info: dict[str, Any]
    score_min: float
    score_max: float
    title: str | None = None
    system_prompt: str | None = None
    original_input: str | None = None
    ground_truth: str | None = None
    line: int = 0

    def __repr__(self) -> str:
        return f"Rubric(id={self.id!r})"


def load_rubrics(path: Path) -> list[Rubric]:
    """Read the entries of a rubric file, in order.

    Raises:
        UsageError: The file can't be read, is too large or isn't YAML, or an entry is invalid; the message names file,
            entry and line.
    """
    node, values = _parse(path, _read(path))
    return _Reader(path, node).rubrics(values)


def load_rubric(path: Path, rubric_id: str) -> Rubric:
    """Read one entry of a rubric file.

    Raises:
        UsageError: The file can't be used, or has no such entry; the message lists its entries.
    """
    rubrics = {rubric.id: rubric for rubric in load_rubrics(path)}
    if rubric_id not in rubrics:
        raise UsageError(
            f"{path} has no rubric {rubric_id!r}{did_you_mean(rubric_id, rubrics)} It has: {', '.join(rubrics)}. "
            "(A function of the repository is named as MODULE:FUNCTION.)"
        )
    return rubrics[rubric_id]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: a suggestion, or a full stop."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else "."


# YAML


def _read(path: Path) -> str:
    try:
        # A pipe or a device might block, or never end.
        if not path.is_file():
            raise UsageError(f"{path}: {'not a file' if path.exists() else 'no such file'}; a rubric file is YAML")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    # A path with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, too large for a rubric file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x})") from None
    if not text.strip():
        raise UsageError(f"{path} is empty; it needs `version: 1` and a list `rubrics`")
    return text


def _parse(path: Path, text: str) -> tuple[yaml.Node, Any]:
    """Return the document as nodes, which know their lines, and as values.

    Every use of an alias is counted before values are built, because a few lines of YAML can expand to more values than
    fit into memory.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise UsageError(f"{path} contains only comments; it needs `version: 1` and a list `rubrics`")
        _check(path, node, frozenset(), {})
        return node, loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise UsageError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply") from None
    # PyYAML lets them through for a date or a number that can't be.
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{path}: a value can't be read: {error}") from None


def _check(path: Path, node: yaml.Node, parents: frozenset[int], sizes: dict[int, int]) -> int:
    """Return the number of values that a node expands to. Refuse duplicate keys, of which YAML would keep the last."""
    import yaml

    place = f"{path}:{node.start_mark.line + 1}"
    if id(node) in parents:
        raise UsageError(f"{place}: a value that contains itself; write it out")
    # An alias is the same node again: its size counts again, but is known.
    if id(node) in sizes:
        return sizes[id(node)]
    if len(parents) > MAX_DEPTH:
        raise UsageError(f"{place}: nested more than {MAX_DEPTH} levels deep")
    inside: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inside = [part for pair in node.value for part in pair]
        names: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            # A mapping may have several merge keys, `<<`.
            if key.value in names and key.tag != "tag:yaml.org,2002:merge":
                raise UsageError(f"{path}:{key.start_mark.line + 1}: duplicate key {key.value!r}")
            names.add(key.value)
    elif isinstance(node, yaml.SequenceNode):
        inside = node.value
    total = 1 + sum(_check(path, part, parents | {id(node)}, sizes) for part in inside)
    if total > MAX_NODES:
        raise UsageError(f"{place}: its aliases expand to more than {MAX_NODES:,} values; use fewer")
    sizes[id(node)] = total
    return total


# Rules


class _Reader:
    """A converter of a parsed file into records."""

    def __init__(self, path: Path, node: yaml.Node) -> None:
        self._path = path
        self._node = node

    def rubrics(self, values: Any) -> list[Rubric]:
        if not isinstance(values, dict):
            raise self._error(None, f"it holds {_kind(values)}; it needs `version: 1` and a list `rubrics`")
        self._check_names(values, _FILE_KEYS, None)
        version = values.get("version")
        if version is None:
            raise self._error(None, "`version` is missing; write `version: 1`")
        # In Python, True equals 1.
        if version != VERSION or isinstance(version, bool):
            raise self._error(None, f"version {version!r} is unknown; this release reads version {VERSION}")
        entries = values.get("rubrics")
        if not isinstance(entries, list) or not entries:
            raise self._error(None, "`rubrics` must be a list with an entry for each rubric")
        defaults = {name: values.get(f"default_{name}") for name in _WITH_DEFAULT}
        rubrics: dict[str, Rubric] = {}
        for number, entry in enumerate(entries):
            rubric = self._rubric(entry, number, defaults)
            if rubric.id in rubrics:
                raise self._error(number, f"line {rubrics[rubric.id].line} already uses the id {rubric.id!r}")
            rubrics[rubric.id] = rubric
        return list(rubrics.values())

    def _rubric(self, entry: Any, number: int, defaults: dict[str, Any]) -> Rubric:
        if not isinstance(entry, dict):
            raise self._error(number, f"is {_kind(entry)}, where an entry with id, rubric and model_info is expected")
        if "extra_info" in entry:
            message = "`extra_info` belongs to a record of the data, not to a rubric; remove it here"
            raise self._error(number, message, entry)
        self._check_names(entry, _ENTRY_KEYS, number)
        texts = {name: self._text(entry, name, number) for name in _TEXTS}
        for name in ("system_prompt", "original_input"):
            if texts[name] is None:
                texts[name] = self._text(defaults, name, number)
        model_info = self._model_info(entry, number, defaults)
        bounds = []
        for name, fallback in (("score_min", 0.0), ("score_max", 1.0)):
            choices = (entry.get(name), model_info.get(name), defaults[name], fallback)
            value = next(value for value in choices if value is not None)
            bound = finite_number(value)
            if bound is None:
                raise self._error(number, f"`{name}` is {_kind(value)}, where a number is expected", entry)
            bounds.append(bound)
        low, high = bounds
        if low >= high:
            raise self._error(number, f"score_min ({low:g}) must be less than score_max ({high:g})", entry)
        rubric_id, rubric, title, prompt, asked, truth = texts.values()
        given = ((rubric_id or "").strip(), rubric or "", model_info, low, high)
        return Rubric(*given, title, prompt, asked, truth, self._line(number))

    def _model_info(self, entry: dict[str, Any], number: int, defaults: dict[str, Any]) -> dict[str, Any]:
        from osmosis_ai.reward_rubric.judge import check_model_info

        merged: dict[str, Any] = {}
        for part in (defaults["model_info"], entry.get("model_info")):
            if part is None:
                continue
            if not isinstance(part, dict):
                message = f"`model_info` is {_kind(part)}, where provider and model are expected"
                raise self._error(number, message, entry)
            self._check_names(part, _MODEL_KEYS, number, entry)
            merged |= part
        if not merged:
            raise self._error(number, "`model_info` is missing; it names the judge: provider and model", entry)
        try:
            check_model_info(merged)
        except (TypeError, ValueError) as error:
            raise self._error(number, str(error), entry) from None
        timeout = merged.get("timeout")
        if timeout is not None and timeout <= 0:
            raise self._error(number, f"model_info: timeout is {timeout:g}; it takes seconds, more than 0", entry)
        return merged

    def _text(self, values: Mapping[str, Any], name: str, number: int) -> str | None:
        value = values.get(name)
        if value is None and name not in ("id", "rubric"):
            return None
        if value is None:
            raise self._error(number, f"`{name}` is missing", values)
        if not isinstance(value, str):
            hint = f'; quote it: {name}: "{reprlib.repr(value)}"' if isinstance(value, (int, float)) else ""
            raise self._error(number, f"`{name}` is {_kind(value)}, where text is expected{hint}", values)
        if not value.strip():
            raise self._error(number, f"`{name}` is empty", values)
        return value

    def _check_names(
        self, values: dict[Any, Any], known: Sequence[str], number: int | None, entry: dict[str, Any] | None = None
    ) -> None:
        where = "" if entry is None else "model_info: "
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise self._error(number, f"{where}the key {name!r} is unknown; {hint}", entry or values)

    def _line(self, number: int) -> int:
        # `rubrics` is known to be a list with this entry; if a merge key brought it, no node is found here.
        found = (value for key, value in self._node.value if key.value == "rubrics")
        return next((int(value.value[number].start_mark.line) + 1 for value in found), 1)

    def _error(self, number: int | None, message: str, entry: Mapping[str, Any] | None = None) -> UsageError:
        if number is None:
            return UsageError(f"{self._path}: {message}")
        rubric_id = entry.get("id") if entry is not None else None
        name = f"rubric {rubric_id!r}" if isinstance(rubric_id, str) and rubric_id.strip() else f"rubric {number + 1}"
        return UsageError(f"{self._path}:{self._line(number)}: {name}: {message}")


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return f"a boolean ({'true' if value else 'false'})"
    if isinstance(value, (int, float)):
        return f"a number ({reprlib.repr(value)})"
    names: dict[type, str] = {str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), f"a {type(value).__name__}")
