"""Read promptfoo's configs (prompts and tests, YAML or JSON) and tests as CSV: one row per test and prompt.

Only variables are filled into prompts; other template code isn't run. Assertions become the column `assert`, and the
one that names an answer becomes the ground truth.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import yaml

from osmosis_ai.bounds import too_deep
from osmosis_ai.data.formats.source import not_utf8
from osmosis_ai.data.formats.source import too_deep as nested_too_deep
from osmosis_ai.folders import UnreadableError, read_bounded
from osmosis_ai.importers.base import BadSampleError, ImportedRow, ImportFormat, Problem, opening, plain
from osmosis_ai.records import JsonObject
from osmosis_ai.wire_json import decode_json

__all__ = ["FORMAT"]

MAX_BYTES = 64 * 1024 * 1024
MAX_ROWS = 100_000
"""Lists of values multiply, so a short test may stand for millions of rows."""
MAX_VALUES = 5_000_000
"""Values that a file may expand to through its aliases."""
FILE = "file://"
ANSWERS = {"equals", "contains", "icontains", "starts-with"}
"""Assertions whose value is the answer, or the part of it that matters."""
VARIABLE = re.compile(r"\{\{-?\s*([A-Za-z_][\w.-]*)\s*-?\}\}")
TEMPLATE = re.compile(r"\{[{%#]")
# For example `icontains: yes`, `not-equals: no` or `similar(0.8): maybe`.
ASSERTION = re.compile(r"(?:not-)?[a-z][a-z-]*(?:\([\d.]+\))?:")


def _recognises(path: Path, head: bytes) -> bool:
    if path.suffix in (".yaml", ".yml", ".json"):
        return "promptfoo" in path.name or re.search(rb'^\s*"?(prompts|tests)"?\s*:', head, re.MULTILINE) is not None
    return path.suffix == ".csv" and b"user_prompt" not in head


def _read(path: Path) -> Iterator[ImportedRow | Problem]:
    try:
        # A CSV file is read like one that a config names.
        config = {"tests": path.name} if path.suffix == ".csv" else _loaded(path)
        if isinstance(config, list):
            config = {"tests": config}
        if not isinstance(config, dict):
            raise BadSampleError("neither a config nor a list of tests")
        prompts = _prompts(path.parent, config.get("prompts"))
        common = _object(config.get("defaultTest"))
        rows = 0
        for where, test in _tests(path.parent, config.get("tests") or []):
            if isinstance(test, str):
                yield Problem(where, test)
                continue
            options = {**_object(common.get("options")), **_object(test.get("options"))}
            given = {**_object(common.get("vars")), **_object(test.get("vars"))}
            asserts = [*_list(common.get("assert")), *_list(test.get("assert"))]
            for variables in _combinations(given, options):
                for prompt in prompts:
                    rows += 1
                    if rows > MAX_ROWS:
                        yield Problem(where, f"more than {MAX_ROWS:,} rows", final=True)
                        return
                    try:
                        yield _row(prompt, variables, options, asserts, test)
                    except BadSampleError as error:
                        yield Problem(where, str(error))
    except (BadSampleError, UnreadableError) as error:
        yield Problem("", str(error), final=True)


def _loaded(path: Path) -> object:
    """Parse a YAML or JSON file; raise BadSampleError or UnreadableError."""
    text = _text(path)
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise BadSampleError(f"{path.name}: {error}") from None
    except RecursionError:
        raise BadSampleError(f"{path.name}: {nested_too_deep()}") from None
    # YAML aliases can make a small file expand enormously, or endlessly.
    waiting, values = [value], 0
    while waiting:
        inner = waiting.pop()
        values += 1
        if values > MAX_VALUES:
            raise BadSampleError(f"{path.name}: more than {MAX_VALUES:,} values")
        if isinstance(inner, (dict, list)):
            waiting += inner.values() if isinstance(inner, dict) else inner
    if too_deep(value):
        raise BadSampleError(f"{path.name}: {nested_too_deep()}")
    try:
        return plain(value)
    except TypeError as error:
        raise BadSampleError(f"{path.name}: {error}") from None


def _text(path: Path) -> str:
    try:
        data = read_bounded(path, MAX_BYTES, f"larger than {MAX_BYTES >> 20} MiB")
        return data.decode("utf-8-sig")
    except UnreadableError as error:
        raise UnreadableError(f"{path.name}: {error}") from None
    except UnicodeDecodeError as error:
        raise BadSampleError(f"{path.name}: {not_utf8(error)}") from None


def _beside(folder: Path, reference: str) -> Path:
    """Return the file that a config refers to; raise BadSampleError if it isn't below the config's folder."""
    path = folder / reference.removeprefix(FILE)
    # `resolve` raises ValueError for a null byte, which no file name can have.
    if "\0" in reference or not path.resolve().is_relative_to(folder.resolve()):
        raise BadSampleError(f"{reference[:200]!r} isn't below the config's folder")
    return path


def _prompts(folder: Path, given: object) -> list[str | None]:
    """Return the prompts' templates, or [None] if there are none: then the tests' only variable is the prompt."""
    if given is None:
        return [None]
    found: list[str | None] = []
    for each in given if isinstance(given, list) else [given]:
        text = each.get("raw") or each.get("id") if isinstance(each, dict) else each
        if not isinstance(text, str):
            raise BadSampleError(f"a prompt that isn't text: {json.dumps(each, default=str)[:80]}")
        if text.startswith(FILE):
            path = _beside(folder, text)
            if path.suffix not in (".txt", ".json", ".md"):
                raise BadSampleError(f"the prompt {text}: only .txt, .md and .json files are read; code isn't run")
            # promptfoo separates several prompts in one file by lines of three dashes.
            found += [part.strip() for part in re.split(r"^---$", _text(path), flags=re.MULTILINE)]
        else:
            found.append(text)
    return found


def _tests(folder: Path, given: object, depth: int = 0) -> Iterator[tuple[str, JsonObject | str]]:
    """Yield the place of each test, with the test or the problem with it."""
    for number, each in enumerate(given if isinstance(given, list) else [given]):
        where = f"test {number}"
        if isinstance(each, dict) and isinstance(each.get("vars"), str):
            yield where, "variables in another file aren't read; write them into the test"
        elif isinstance(each, dict):
            yield where, each
        # Bounded, because files of tests may name each other in a circle.
        elif not isinstance(each, str) or depth > 3:
            yield where, "not a test"
        else:
            path = _beside(folder, each)
            if path.suffix == ".csv":
                yield from _csv(path)
            elif path.suffix in (".yaml", ".yml", ".json"):
                for inner, test in _tests(path.parent, _loaded(path), depth + 1):
                    yield f"{path.name}, {inner}", test
            else:
                yield where, f"{each}: only CSV, YAML and JSON files of tests are read"


def _csv(path: Path) -> Iterator[tuple[str, JsonObject | str]]:
    lines = csv.DictReader(io.StringIO(_text(path)), strict=True)
    while True:
        where = f"{path.name}, line {lines.line_num + 1}"
        try:
            cells = next(lines, None)
        except csv.Error as error:
            yield where, f"not valid CSV: {error}"
            return
        if cells is None:
            return
        # DictReader puts surplus cells under the key None, and fills missing ones with the value None.
        if None in cells or None in cells.values():
            yield where, "more or fewer cells than the header"
        else:
            yield where, _from_cells({str(name).strip(): value for name, value in cells.items()})


def _from_cells(cells: Mapping[str, str]) -> JsonObject:
    test: JsonObject = {"vars": {}, "assert": [], "metadata": {}, "options": {}}
    for name, value in cells.items():
        # promptfoo numbers several of them: `__expected1`, `__expected2`.
        if name.startswith("__expected"):
            if value.strip():
                test["assert"].append(_assertion(value.strip()))
        elif name.startswith("__metadata:"):
            test["metadata"][name.partition(":")[2]] = value
        elif name in ("__prefix", "__suffix"):
            test["options"][name[2:]] = value
        elif name == "__description":
            test["description"] = value
        elif not name.startswith("__"):
            test["vars"][name] = value
    return test


def _assertion(text: str) -> JsonObject:
    """Parse a cell's assertion, `TYPE: VALUE`; any other text means that the reply must equal it."""
    if ASSERTION.match(text):
        kind, _, value = text.partition(":")
        return {"type": kind, "value": value.strip()}
    return {"type": "equals", "value": text}


def _combinations(variables: JsonObject, options: Mapping[str, object]) -> Iterator[JsonObject]:
    """Yield the variables of each row; a list of texts produces one row per text."""
    if options.get("disableVarExpansion"):
        yield variables
        return
    values = [
        value if isinstance(value, list) and value and isinstance(value[0], str) else [value]
        for value in variables.values()
    ]
    for chosen in product(*values):
        yield dict(zip(variables, chosen, strict=True))


def _row(
    template: str | None,
    variables: JsonObject,
    options: Mapping[str, object],
    asserts: Sequence[object],
    test: JsonObject,
) -> ImportedRow:
    if template is None:
        if len(variables) != 1:
            raise BadSampleError(
                "there are no prompts, and the test doesn't have exactly one variable to use as the prompt; import the "
                "config that has the prompts"
            )
        template = "{{" + next(iter(variables)) + "}}"
    template = f"{options.get('prefix') or ''}{template}{options.get('suffix') or ''}"
    system, user = _messages(template, variables)
    answers = [
        one["value"] for one in asserts if isinstance(one, dict) and str(one.get("type")) in ANSWERS and "value" in one
    ]
    extra: JsonObject = {"vars": variables}
    for name in ("assert", "description", "metadata", "threshold"):
        value = asserts if name == "assert" else test.get(name)
        if value:
            extra[name] = value
    # Several answers may be alternatives or parts, so none of them is the ground truth.
    return ImportedRow(system, user, answers[0] if len(answers) == 1 else None, extra)


def _messages(template: str, variables: Mapping[str, object]) -> tuple[str, str]:
    """Return the system prompt and the user prompt of a template, which may be a JSON list of messages."""
    try:
        messages = decode_json(template)
    except ValueError:
        return "", _filled(template, variables)
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        return "", _filled(template, variables)
    if any(each["role"] not in ("system", "developer", "user") for each in messages):
        raise BadSampleError("the prompt is a conversation with replies; a row has a system prompt and a user prompt")
    filled = [
        {
            "role": "user" if each["role"] == "user" else "system",
            "content": _filled(str(each.get("content")), variables),
        }
        for each in messages
    ]
    return opening(filled)


def _filled(template: str, variables: Mapping[str, object]) -> str:
    """Fill the variables into a template; raise BadSampleError if it uses anything but variables."""

    def value(match: re.Match[str]) -> str:
        found: object = variables
        for part in match[1].split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise BadSampleError(f"the prompt has the variable {match[1]}, but the test doesn't set it")
            found = found[part]
        if isinstance(found, str) and found.startswith(FILE):
            raise BadSampleError(f"the variable {match[1]} is in another file, which isn't read: {found}")
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    # Whatever template syntax is left after the variables is Nunjucks code, which could do anything.
    if TEMPLATE.search(VARIABLE.sub("", template)):
        raise BadSampleError("the prompt's template has code or a filter; only {{variables}} are filled in")
    return VARIABLE.sub(value, template)


def _object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


FORMAT = ImportFormat(
    name="promptfoo",
    description="promptfoo's configs, YAML or JSON, and its tests as CSV",
    recognises=_recognises,
    read_rows=_read,
)
