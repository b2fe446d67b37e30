"""MCP tools and results as the model sees them, converted from what real servers send."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Annotated, Any, Literal

import anyio
import pytest
from fastmcp import Client, FastMCP
from hypothesis import given
from hypothesis import strategies as st
from mcp.types import AudioContent, EmbeddedResource, ImageContent, TextContent
from pydantic import BaseModel, Field

from osmosis_ai.mcp_tools.conversion import TOOL_CONTENT_LIMIT, clean, convert_result, convert_tool, truncate


class Place(BaseModel):
    city: str
    zip: str | None = None


class Order(BaseModel):
    places: list[Place] = Field(min_length=1)
    priority: Literal[1, 2]
    weight: Annotated[float, Field(gt=0, le=40)] = 1.5


def served(function: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tool as a real server lists it, and the result of calling it."""
    server = FastMCP("conversion")
    server.tool(function)

    async def use() -> tuple[dict[str, Any], dict[str, Any]]:
        async with Client(server) as client:
            tool = (await client.list_tools())[0]
            result = await client.call_tool_mcp(function.__name__, {})
            return tool.model_dump(mode="json", by_alias=True), result.model_dump(mode="json", by_alias=True)

    return anyio.run(use)


def test_a_schema_passes_verbatim() -> None:
    def ship(order: Order, note: str = "none", count: int = 3) -> str:
        """Ship an order."""
        return note

    tool, _ = served(ship)
    converted = convert_tool(tool)
    assert converted["type"] == "function"
    assert converted["function"]["name"] == "ship"
    assert converted["function"]["description"] == "Ship an order."
    schema = converted["function"]["parameters"]
    assert schema == tool["inputSchema"]
    text = json.dumps(schema)
    for part in ('"enum": [1, 2]', '"exclusiveMinimum": 0', '"maximum": 40', '"minItems": 1', '"default": "none"'):
        assert part in text


def test_schemas_of_every_form_are_not_touched() -> None:
    schema = {
        "type": "object",
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "properties": {
            "node": {"$ref": "#/$defs/node"},
            "kind": {"enum": [1, "a", None]},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        },
        "required": ["node"],
        "additionalProperties": False,
        "x-ours": {"kept": True},
    }
    before = json.dumps(schema)
    assert convert_tool({"name": "walk", "inputSchema": schema})["function"]["parameters"] is schema
    assert json.dumps(schema) == before


def test_what_a_tool_leaves_out() -> None:
    assert convert_tool({"name": "bare", "description": None, "inputSchema": None}, "files_") == {
        "type": "function",
        "function": {"name": "files_bare", "description": "", "parameters": {"type": "object", "properties": {}}},
    }


def test_texts_are_joined_and_need_nothing_else() -> None:
    def lines() -> list[TextContent]:
        return [TextContent(type="text", text="one"), TextContent(type="text", text="two")]

    text, content = convert_result({**served(lines)[1], "structuredContent": None})
    assert (text, content) == ("one\ntwo", None)


@pytest.mark.parametrize("value", [3, 2.5, True, "word", "", [1, 2], {"a": {"b": None}}])
def test_structured_content_that_says_the_same_is_not_kept_twice(value: Any) -> None:
    def give() -> Any:
        return value

    def typed() -> dict[str, Any]:
        return {"a": 1, "ü": [None]}

    assert convert_result(served(give)[1])[1] is None
    text, content = convert_result(served(typed)[1])
    assert json.loads(text) == typed()
    assert content is None


def test_structured_content_is_the_text_when_there_is_none() -> None:
    assert convert_result({"content": [], "structuredContent": {"rows": [1, "ü"]}}) == ('{"rows": [1, "ü"]}', None)


def test_structured_content_that_says_more_is_kept() -> None:
    result = {"content": [{"type": "text", "text": "2 rows"}], "structuredContent": {"rows": [1, 2]}}
    assert convert_result(result) == ("2 rows", {"structured": {"rows": [1, 2]}})


def test_nothing_at_all() -> None:
    assert convert_result({"content": [], "structuredContent": None}) == ("", None)


def test_images_audio_and_files_become_placeholders() -> None:
    data = base64.b64encode(b"x" * 1234).decode()

    def show() -> list[Any]:
        file = {"uri": "file:///a.txt", "text": "in a file"}
        blob = {"uri": "file:///b.pdf", "blob": data, "mimeType": "application/pdf"}
        return [
            TextContent(type="text", text="look:"),
            ImageContent.model_validate({"type": "image", "data": data, "mimeType": "image/png"}),
            AudioContent.model_validate({"type": "audio", "data": data, "mimeType": "audio/wav"}),
            EmbeddedResource.model_validate({"type": "resource", "resource": file}),
            EmbeddedResource.model_validate({"type": "resource", "resource": blob}),
        ]

    text, content = convert_result(served(show)[1])
    assert text.splitlines() == [
        "look:",
        "[image image/png, 1234 bytes]",
        "[audio audio/wav, 1234 bytes]",
        "in a file",
        "[file application/pdf file:///b.pdf, 1234 bytes]",
    ]
    assert [block["type"] for block in content["blocks"]] == ["image", "audio", "resource"]
    assert content["blocks"][0]["data"] == data


def test_a_link() -> None:
    block = {"type": "resource_link", "uri": "file:///a.txt", "name": "a"}
    text, content = convert_result({"content": [block]})
    assert text == "[link file:///a.txt]"
    assert content == {"blocks": [block]}


def test_a_large_image_is_kept_by_its_hash() -> None:
    data = "A" * (TOOL_CONTENT_LIMIT + 4)
    text, content = convert_result({"content": [{"type": "image", "data": data, "mimeType": "image/png"}]})
    assert text == f"[image image/png, {len(data) * 3 // 4} bytes]"
    assert content["blocks"][0]["data"] == {
        "omitted_bytes": len(data),
        "sha256": hashlib.sha256(data.encode()).hexdigest(),
    }


def test_many_images_are_bounded_together() -> None:
    data = "A" * TOOL_CONTENT_LIMIT
    _, content = convert_result({"content": [{"type": "image", "data": data, "mimeType": "image/png"}] * 20})
    assert content["omitted_bytes"] > 20 * TOOL_CONTENT_LIMIT


def test_truncate() -> None:
    assert truncate("x" * 10, 10) == ("x" * 10, None)
    assert truncate("x" * 1234, 4) == ("xxxx\n[output truncated: 1,230 of 1,234 characters were cut]", 1234)


@given(st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0x1F600, categories=None), max_size=6))
def test_text_can_always_be_encoded(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode()
    assert clean(cleaned) == cleaned
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert cleaned == text


def test_a_lone_surrogate_is_replaced_and_a_pair_is_joined() -> None:
    assert clean("a\ud800b") == "a\ufffdb"
    assert clean("\ud83d\ude00") == "😀"
    result = {"content": [{"type": "text", "text": "a\udc00"}], "structuredContent": {"k\udc00": "v\udc00"}}
    assert convert_result(result) == ("a\ufffd", {"structured": {"k\ufffd": "v\ufffd"}})
