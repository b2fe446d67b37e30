"""The published JSON Schemas: current, valid, and every field described."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

import osmosis_ai
from osmosis_ai.schemas import SCHEMAS, options_page, schema_of, write_schemas

PUBLISHED = Path(__file__).parents[1] / "docs" / "schemas"


def test_the_published_schemas_are_current(tmp_path: Path) -> None:
    """If not: `python -m osmosis_ai.schemas docs`."""
    write_schemas(tmp_path)
    current = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert {file.name: file.read_text(encoding="utf-8") for file in PUBLISHED.iterdir()} == current


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_valid_and_times_have_units(name: str) -> None:
    schema = schema_of(SCHEMAS[name])
    jsonschema.Draft202012Validator.check_schema(schema)
    for definition in schema["$defs"].values():
        assert "[" not in definition["title"]
        for field, described in definition["properties"].items():
            if field.endswith("_ms"):
                assert "milliseconds" in described["description"], field
            if field.endswith("_usd"):
                assert "US dollars" in described["description"], field


def test_the_page_of_options_is_current() -> None:
    """If not: `python -m osmosis_ai.schemas docs`."""
    page = Path(osmosis_ai.__file__).parents[1] / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == options_page()
