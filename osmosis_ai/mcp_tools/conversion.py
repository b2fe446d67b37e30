"""Convert MCP tools to OpenAI functions, and tool results to text for the model."""

from __future__ import annotations

import hashlib
import json

from osmosis_ai.failures import FailureKind
from osmosis_ai.records import Failure, JsonObject, JsonValue, Tool
from osmosis_ai.text import cut

__all__ = ["TOOL_CONTENT_LIMIT", "clean", "convert_result", "convert_tool", "error_result", "truncate"]

TOOL_CONTENT_LIMIT = 256 * 1024
"""Maximum characters of one text, image or file that a record keeps; of a longer one it keeps size and SHA-256."""

MESSAGE_LIMIT = 500
"""Maximum characters of an error that a failed call's record repeats; the conversation has the whole text."""


def convert_tool(tool: JsonObject, prefix: str = "") -> Tool:
    """Convert an MCP tool to an OpenAI function. Its JSON Schema passes unchanged.

    Args:
        tool: The tool in protocol form: `name`, `description`, `inputSchema`.
        prefix: Put before the name.
    """
    return {
        "type": "function",
        "function": {
            "name": prefix + tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
        },
    }


def convert_result(result: JsonObject) -> tuple[str, JsonValue]:
    """Convert a tool's result to the text for the model and the content that the text omits.

    Texts and embedded text files are joined by newlines; images, audio and other files become a placeholder such as
    `[image image/png, 1234 bytes]`. If there is no text, the structured content is written as JSON.

    Args:
        result: The result in protocol form: `content`, `structuredContent`.

    Returns:
        The text, always encodable as UTF-8, and None or `{"blocks": […], "structured": …}`: the blocks shown as
        placeholders and the structured content, unless the text says the same.
    """
    lines, kept, has_text = [], [], False
    for block in result.get("content") or []:
        text = _text(block)
        if text is None:
            lines.append(_placeholder(block))
            kept.append({key: value for key, value in block.items() if value is not None})
        else:
            lines.append(text)
            has_text = True
    structured = result.get("structuredContent")
    if structured is not None and not has_text:
        lines.append(_json(structured))
    text = clean("\n".join(lines))
    content: JsonObject = {}
    if kept:
        content["blocks"] = kept
    if structured is not None and has_text and not _says_the_same(text, structured):
        content["structured"] = structured
    return text, _bounded(content) if content else None


def error_result(text: str, kind: FailureKind) -> Failure:
    """Convert the text of an error result, as the model sees it, to the failure of the call."""
    return Failure("tool", cut(text.removeprefix("Error: "), MESSAGE_LIMIT), kind=kind)


def truncate(text: str, limit: int) -> tuple[str, int | None]:
    """Cut a text to `limit` characters and append a note for the model with the amount cut.

    Returns:
        The text and None, or the cut text and the original length in characters.
    """
    if len(text) <= limit:
        return text, None
    return f"{text[:limit]}\n[output truncated: {len(text) - limit:,} of {len(text):,} characters were cut]", len(text)


def clean(text: str) -> str:
    """Replace lone surrogates, so that the text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _text(block: JsonObject) -> str | None:
    if block.get("type") == "text":
        return str(block.get("text") or "")
    if block.get("type") == "resource" and isinstance(block["resource"].get("text"), str):
        return str(block["resource"]["text"])
    return None


def _placeholder(block: JsonObject) -> str:
    kind = str(block.get("type"))
    if kind == "resource_link":
        return f"[link {block.get('uri')}]"
    source = block.get("resource") or block
    data = source.get("blob") or source.get("data") or ""
    described = [kind if kind != "resource" else "file", source.get("mimeType"), source.get("uri")]
    # Four characters of base64 are three bytes, less the padding.
    size = len(data) * 3 // 4 - data[-2:].count("=")
    return f"[{' '.join(str(part) for part in described if part)}, {size} bytes]"


def _bounded(value: JsonObject) -> JsonValue:
    """Replace texts over the limit by their size and hash; do so for the whole value if it is still too large."""
    short = _short(value)
    encoded = _json(short)
    return short if len(encoded) <= 4 * TOOL_CONTENT_LIMIT else _digest(encoded)


def _short(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {clean(str(key)): _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, str):
        return clean(value) if len(value) <= TOOL_CONTENT_LIMIT else _digest(value)
    return value


def _digest(text: str) -> JsonObject:
    encoded = text.encode("utf-8", "replace")
    return {"omitted_bytes": len(encoded), "sha256": hashlib.sha256(encoded).hexdigest()}


def _says_the_same(text: str, structured: JsonValue) -> bool:
    readings: list[JsonValue] = [structured]
    # Servers wrap results that aren't objects: {"result": 3}.
    if isinstance(structured, dict) and set(structured) == {"result"}:
        readings.append(structured["result"])
    if text in readings:
        return True
    try:
        return json.loads(text) in readings
    except (ValueError, RecursionError):
        return False


def _json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)
