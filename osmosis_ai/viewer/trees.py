"""Lay out JSON from models and tools as an indented tree, of any size and depth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from osmosis_ai.wire_json import decode_json

__all__ = ["TEXT_CHARACTERS", "Node", "tree"]

MAX_DEPTH = 16
MAX_NODES = 500
TEXT_CHARACTERS = 20_000
"""Longer texts are truncated; the page links to the full text."""


class Node(NamedTuple):
    """A line of a tree: a value, or a bracket. `more` counts what was truncated from a text or a tree."""

    kind: str
    label: str = ""
    text: str = ""
    more: int = 0


def tree(value: Any) -> list[Node] | None:
    """Return the lines of a JSON object or list, given as text or as a value; None for any other text."""
    if isinstance(value, str):
        if value.lstrip()[:1] not in ("{", "["):
            return None
        try:
            value = decode_json(value)
        except ValueError:
            # Truncated JSON, a number of a million digits, ten thousand levels: show it as plain text.
            return None
    if not isinstance(value, (dict, list)):
        return None
    nodes: list[Node] = []
    for node in _nodes(value):
        if len(nodes) >= MAX_NODES:
            depth = sum((each.kind == "open") - (each.kind == "close") for each in nodes)
            nodes += [Node("cut"), *[Node("close")] * depth]
            break
        nodes.append(node)
    return nodes


def _nodes(value: Any) -> Iterator[Node]:
    """Yield the lines without recursion, because the depth is unbounded."""
    stack: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]
    while stack:
        label, item = next(stack[-1], (None, None))
        if label is None:
            stack.pop()
            if stack:
                yield Node("close")
        elif isinstance(item, (dict, list)) and item and len(stack) <= MAX_DEPTH:
            text = f"{{{len(item)}}}" if isinstance(item, dict) else f"[{len(item)}]"
            yield Node("open", label, text)
            stack.append(((str(key), each) for key, each in item.items()) if isinstance(item, dict)
                         else ((str(index), each) for index, each in enumerate(item)))  # fmt: skip
        else:
            yield _leaf(label, item)


def _leaf(label: str, item: Any) -> Node:
    if isinstance(item, str):
        return Node("text", label, item[:TEXT_CHARACTERS], max(len(item) - TEXT_CHARACTERS, 0))
    if isinstance(item, (dict, list)):
        empty = "{}" if isinstance(item, dict) else "[]"
        return Node("value", label, empty if not item else "… (deeper than is shown)")
    return Node("value", label, json.dumps(item))
