"""Generate reference documents from declarations: JSON Schemas of the commands' output, and the table of options.

`python -m osmosis_ai.schemas docs` writes `schemas/NAME.schema.json` for each entry of `SCHEMAS`, and `options.md`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_origin

import msgspec

from osmosis_ai.config import RunConfig
from osmosis_ai.exports.rollouts import ExportedRollout
from osmosis_ai.options import declared_options
from osmosis_ai.records import JsonObject
from osmosis_ai.reward_rubric.evaluation import RubricResults
from osmosis_ai.runtime.run.results import EvalResults, TestResults
from osmosis_ai.store import views

__all__ = ["SCHEMAS", "field_docs", "options_page", "schema_of", "write_schemas"]

SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "test": TestResults,
    "eval": EvalResults,
    "eval-rubric": RubricResults,
    "runs": views.ListedRuns,
    "runs-show": views.ShownRun,
    "runs-show-row": views.ShownRow,
    "runs-compare": views.ComparedRuns,
    "runs-diff-row": views.ComparedRow,
    "runs-rescore": views.RescoredRun,
    "runs-export": views.WrittenExport,
    "runs-merge": views.MergedRun,
    "runs-pull": views.MovedRun,
    "runs-push": views.MovedRun,
    "runs-rm": views.RemovedRuns,
    "import": views.ImportedFiles,
    "export": ExportedRollout,
}
"""The top record of each schema, by file name without suffix."""


OPTIONS_INTRODUCTION = """
# Options of a run

Every option of `osmosis test` and `osmosis eval`, by group. In Python it is a keyword of `RunConfig.of`, with `_` for
`-` ([library.md](library.md)). Unless its row says otherwise, you can also set it in the environment (`--max-turns` as
`OSMOSIS_MAX_TURNS`) and under `[tool.osmosis]` in the repository's `pyproject.toml` (`max-turns = 20`). The command
line wins, then the environment, then the file. `osmosis config` shows the effective values and their sources.

This page is generated from the declarations in `osmosis_ai/config.py`: `python -m osmosis_ai.schemas docs`.
"""


def write_schemas(folder: Path) -> None:
    """Write every schema to `NAME.schema.json` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in SCHEMAS.items():
        data = msgspec.json.format(msgspec.json.encode(schema_of(record)), indent=2)
        (folder / f"{name}.schema.json").write_bytes(data + b"\n")


def options_page() -> str:
    """Return the Markdown page that lists every option of a run."""
    lines = [OPTIONS_INTRODUCTION.strip()]
    panel = ""
    for option in declared_options(RunConfig):
        if option.panel != panel:
            panel = option.panel
            lines += ["", f"## {panel}", "", "| option | default | meaning |", "|---|---|---|"]
        names = [f"`{flag}`" for flag in option.flags]
        if option.base is bool and option.option.lasting:
            names.append(f"`--no-{option.flag.removeprefix('--')}`")
        placeholder = "" if option.option.metavar is None else f" {option.option.metavar}".replace("|", "\\|")
        names[-1] = f"{names[-1].removesuffix('`')}{placeholder}`"
        only = "" if len(option.option.commands) > 1 else f" Only `osmosis {option.option.commands[0]}`."
        sources = "" if option.option.lasting else " Command line only."
        same = "" if option.option.identity is None else " Compared by `--resume`."
        lines.append(f"| {', '.join(names)} | {option.default_text} | {option.option.help}{only}{sources}{same} |")
    return "\n".join(lines) + "\n"


def schema_of(record: type[msgspec.Struct]) -> JsonObject:
    """Return a record's JSON Schema, with the docstring below each field as its description."""
    docs = {found.__name__: field_docs(found) for found in _records(msgspec.inspect.type_info(record))}
    made = msgspec.json.schema(record)
    encoded = msgspec.json.encode(made).decode("utf-8")
    for name, definition in made["$defs"].items():
        # msgspec includes a generic record's parameters in its name.
        encoded = encoded.replace(name, definition["title"].partition("[")[0])
    schema: JsonObject = msgspec.json.decode(encoded)
    for name, definition in schema["$defs"].items():
        definition["title"] = name
        if "description" in definition:
            # From 3.13 on the compiler removes the indentation itself.
            definition["description"] = inspect.cleandoc(definition["description"])
        for field, description in docs[name].items():
            definition["properties"][field]["description"] = description
    _put_null_last(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _put_null_last(schema: object) -> None:
    """Order alternatives alike for every version of msgspec."""
    if isinstance(schema, dict):
        for part in schema.values():
            _put_null_last(part)
        if "anyOf" in schema:
            schema["anyOf"].sort(key=lambda part: part == {"type": "null"})
    elif isinstance(schema, list):
        for part in schema:
            _put_null_last(part)


def field_docs(record: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings below a record's fields, inherited ones included."""
    # Python keeps no docstrings of fields, so read them from the source.
    docs: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text))):
                    docs[name] = inspect.cleandoc(text)
    return docs


def _records(info: object) -> Iterator[type[msgspec.Struct]]:
    """Yield every record in the type information of `msgspec.inspect`."""
    if isinstance(info, msgspec.inspect.StructType):
        yield get_origin(info.cls) or info.cls
    if isinstance(info, msgspec.Struct):
        info = msgspec.structs.astuple(info)
    if isinstance(info, tuple):
        for part in info:
            yield from _records(part)


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    write_schemas(docs / "schemas")
    (docs / "options.md").write_text(options_page(), encoding="utf-8")
