"""Derive the API's OpenAPI description from its routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from osmosis_ai import __version__
from osmosis_ai.records import JsonObject

if TYPE_CHECKING:
    from osmosis_ai.platform.api import Operation

__all__ = ["describe"]

_ERRORS = {400: "can't be used", 401: "no valid token", 404: "not found", 409: "conflict", 413: "too large"}
_SCOPE = {
    "name": "X-Osmosis-Git",
    "in": "header",
    "required": True,
    "description": "The workspace: owner/repo of its repository.",
    "schema": {"type": "string", "pattern": "^[a-z0-9._-]{1,100}/[a-z0-9._-]{1,100}$"},
}


def describe(operations: Iterable[Operation]) -> JsonObject:
    """Return the OpenAPI description of these operations."""
    operations = list(operations)
    bodies = [each.body for each in operations if each.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    errors = {str(status): _answer(meaning, "Error") for status, meaning in _ERRORS.items()}
    paths: dict[str, JsonObject] = {}
    for each in operations:
        names = re.findall(r"{(\w+)", each.path)
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        described: JsonObject = {
            "summary": each.summary,
            "security": [{"token": []}],
            "parameters": [*parameters, *([_SCOPE] if each.scoped else [])],
            "responses": {str(each.status): _answer("done", "Object"), **errors},
        }
        if each.body is not None:
            schema = {"$ref": f"#/components/schemas/{each.body.__name__}"}
            described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(re.sub(r":\w+}", "}", each.path), {})[each.method.lower()] = described
    error = {
        "type": "object",
        "required": ["error", "code"],
        "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Osmosis platform", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": error, "Object": {"type": "object"}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _answer(meaning: str, schema: str) -> JsonObject:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": meaning, "content": content}
