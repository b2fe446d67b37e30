"""JSON Schemas of what the commands write as JSON, made from the records that are written.

`python -m osmosis_ai.schemas docs/schemas` writes a file for each entry of `SCHEMAS`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_origin

import msgspec

from osmosis_ai.exports.rollouts import ExportedRollout
from osmosis_ai.records import JsonObject
from osmosis_ai.reward_rubric.evaluation import RubricResults
from osmosis_ai.runtime.run.results import EvalResults, TestResults
from osmosis_ai.store import views

__all__ = ["SCHEMAS", "field_docs", "schema_of", "write_schemas"]

SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "test": TestResults,
    "eval": EvalResults,
    "eval-rubric": RubricResults,
    "runs": views.ListedRuns,
    "runs-show": views.ShownRun,
    "runs-show-row": views.ShownRow,
    "runs-compare": views.ComparedRuns,
    "runs-rescore": views.RescoredRun,
    "runs-export": views.WrittenExport,
    "runs-rm": views.RemovedRuns,
    "export": ExportedRollout,
}
"""The record that is the top of each schema, by the name of the file without its suffix."""


def write_schemas(folder: Path) -> None:
    """Write every schema as `NAME.schema.json` into a folder.

    Args:
        folder: The folder, created if need be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in SCHEMAS.items():
        data = msgspec.json.format(msgspec.json.encode(schema_of(record)), indent=2)
        (folder / f"{name}.schema.json").write_bytes(data + b"\n")


def schema_of(record: type[msgspec.Struct]) -> JsonObject:
    """The JSON Schema of a record, in which each field's description is the docstring below the field.

    Args:
        record: The record; further keys are allowed in all its objects.
    """
    docs = {found.__name__: field_docs(found) for found in _records(msgspec.inspect.type_info(record))}
    encoded = msgspec.json.encode(msgspec.json.schema(record)).decode("utf-8")
    for name, definition in msgspec.json.schema(record)["$defs"].items():
        # A generic record is named after its parameters too.
        encoded = encoded.replace(name, definition["title"].partition("[")[0])
    schema: JsonObject = msgspec.json.decode(encoded)
    for name, definition in schema["$defs"].items():
        definition["title"] = name
        for field, description in docs[name].items():
            definition["properties"][field]["description"] = description
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def field_docs(record: type[msgspec.Struct]) -> dict[str, str]:
    """The docstrings below a record's fields, inherited ones included.

    Args:
        record: The record, whose source must be readable.
    """
    docs: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ):
                    docs[name] = inspect.cleandoc(text)
    return docs


def _records(info: object) -> Iterator[type[msgspec.Struct]]:
    """Every record in what `msgspec.inspect` tells about a type."""
    if isinstance(info, msgspec.inspect.StructType):
        yield get_origin(info.cls) or info.cls
    if isinstance(info, msgspec.Struct):
        info = msgspec.structs.astuple(info)
    if isinstance(info, tuple):
        for part in info:
            yield from _records(part)


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
