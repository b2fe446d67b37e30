"""Check `mcp/`: the source, and the tools that the loaded server offers."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import msgspec

from osmosis_ai.discovery.scan import Component, tool_name
from osmosis_ai.discovery.source import UnreadableError, aliases_of, parse_file
from osmosis_ai.records import JsonObject, JsonValue, Tool
from osmosis_ai.validate.check import Check, Subject
from osmosis_ai.validate.findings import Finding, Place, codes, finding

__all__ = ["CHECKS", "check_loaded_tools", "check_tool_source", "merge_tools"]

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_DESCRIPTION = 1024  # OpenAI refuses longer ones
MAX_TOOLS = 128  # OpenAI's bound
ALIKE = 0.95
"""Similarity from which two descriptions with the same words count as the same."""
MAX_COMPARED = 200
"""Every pair is compared, so time grows with the square of this number of tools."""
MAX_NODES = 20_000
"""Subschemas looked at; a schema comes from the repository's code and may have any size."""

_TOP_LEVEL = ("anyOf", "oneOf", "allOf", "enum", "not")
"""Keywords that providers refuse at the top of a tool's parameters."""
_UNSUPPORTED = (
    *("if", "then", "else", "not", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas"),
    *("unevaluatedProperties", "unevaluatedItems", "contains", "$dynamicRef"),
)
_FILLERS = {"a", "an", "the", "this", "that", "tool", "function", "please", "simply", "just", "its", "and", "of"}
_FILLERS |= {"for", "by", "with", "given", "using", "you", "can"}
"""Words that don't tell two descriptions apart."""
_TYPED = ("type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const")


def check_tool_source(root: Path, tools: Sequence[Component]) -> Iterator[Finding]:
    """Check the tools in the source, without running anything."""
    for tool in tools:
        yield from _check_name(Place(tool.file, tool.line, tool.name))
    taken: dict[str, set[str]] = {}
    for file in dict.fromkeys(tool.file for tool in tools):
        try:
            tree = parse_file(root / file)
        except UnreadableError:
            continue  # the scan reports it
        aliases = aliases_of(tree)
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for decorator in node.decorator_list:
                name = tool_name(decorator, node, aliases)
                if name is None:
                    continue
                at = Place(file, node.lineno, name)
                names = taken.setdefault(_server_of(decorator, aliases, file), set())
                if name in names:
                    yield _duplicate(at)
                names.add(name)
                yield from _check_declaration(at, node, decorator)
                break


def _server_of(decorator: ast.expr, aliases: dict[str, str], file: str) -> str:
    """Identify a decorator's server in source: two files that import one under the same name mean the same server."""
    target = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    imported = aliases.get(target.partition(".")[0])
    return f"{imported} {target}" if imported is not None else f"{file} {target}"


def _check_declaration(
    at: Place, node: ast.FunctionDef | ast.AsyncFunctionDef, decorator: ast.expr
) -> Iterator[Finding]:
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    # `**options` may hold a description too.
    described = any(keyword.arg in ("description", None) for keyword in keywords)
    if not described and not ast.get_docstring(node):
        yield _undescribed(at)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    for number, argument in enumerate(arguments):
        # The server passes these itself.
        if argument.annotation is None and not (number == 0 and argument.arg in ("self", "cls", "ctx", "context")):
            yield _untyped(argument.arg, at._replace(line=argument.lineno))


def merge_tools(components: Sequence[Component], tools: Sequence[Tool]) -> list[Component]:
    """Return a loaded server's tools as components: those found in the source, then those that only it knows."""
    late = [name for name in map(_name, tools) if _written_as(name, components) is None]
    # The model doesn't see what the server passes itself, such as a Context.
    seen = {_written_as(_name(tool), components): _parameters(tool) for tool in tools}
    known = [msgspec.structs.replace(one, parameters=seen.get(one, one.parameters)) for one in components]
    return [*known, *(Component("tool", name, "mcp/main.py", 1, "mcp.main") for name in late)]


def _parameters(tool: Tool) -> tuple[str, ...]:
    properties = (tool["function"].get("parameters") or {}).get("properties")
    return tuple(properties) if isinstance(properties, dict) else ()


def check_loaded_tools(
    tools: Sequence[Tool], sources: Mapping[str, str], components: Sequence[Component]
) -> Iterator[Finding]:
    """Check the tools that a loaded server offers; `sources` are the repository's files it has imported."""
    if not tools:
        hint = "Import the modules that declare them in main.py, before the server is used."
        yield finding("OSM104", "the server has no tools", Place("mcp/main.py"), hint)
    names = [_name(tool) for tool in tools]
    yield from _check_registered(names, sources, components)
    places = {name: _place(name, components) for name in names}
    for name, count in Counter(names).items():
        if count > 1:
            yield _duplicate(places[name])
    for tool in tools:
        yield from _check_tool(tool, places[_name(tool)])
    yield from _check_alike(tools, places)
    if len(tools) > MAX_TOOLS:
        message = f"the server has {len(tools)} tools; OpenAI accepts at most {MAX_TOOLS} per request"
        yield finding("OSM120", message, Place("mcp/main.py"))


def _check_registered(
    names: list[str], sources: Mapping[str, str], components: Sequence[Component]
) -> Iterator[Finding]:
    offered = {found.name for name in names if (found := _written_as(name, components)) is not None}
    for component in components:
        at = Place(component.file, component.line, component.name)
        if component.name in offered:
            continue
        if component.file in sources:
            message = f"the tool {component.name} is in the source, but the server doesn't offer it"
            hint = "Make sure that importing main.py runs this code, and that it decorates the same server."
            yield finding("OSM108", message, at, hint)
        else:
            message = f"main.py doesn't import {component.file}, so the tool {component.name} is never registered"
            yield finding(
                "OSM107", message, at, f"Import it in main.py: import {component.module.removeprefix('mcp.')}"
            )
    for name in names:
        if _written_as(name, components) is None:
            message = f"the server offers {name}, but mcp/ has no @mcp.tool function with this name"
            hint = "Declare it with the decorator under mcp/, where a source scan finds it."
            yield finding("OSM109", message, Place("mcp/main.py", subject=name), hint)


def _check_tool(tool: Tool, at: Place) -> Iterator[Finding]:
    function, name = tool["function"], at.subject
    yield from _check_name(at)
    description = str(function.get("description") or "").strip()
    if not description:
        yield _undescribed(at)
    elif len(description) > MAX_DESCRIPTION:
        length = f"{len(description)} characters; OpenAI accepts {MAX_DESCRIPTION}"
        yield finding("OSM119", f"the description of {name} has {length}", at)
    schema = function.get("parameters")
    if not isinstance(schema, dict):
        schema = {}
    yield from _check_schema(schema, at)
    properties = schema.get("properties")
    for parameter, shape in (properties if isinstance(properties, dict) else {}).items():
        shape = shape if isinstance(shape, dict) else {}
        if not any(keyword in shape for keyword in _TYPED):
            yield _untyped(parameter, at)
        if not shape.get("description"):
            message = f"the parameter {parameter} of {name} has no description, so a model can go only by its name"
            yield finding("OSM111", message, at, f'Write {parameter}: Annotated[…, Field(description="…")].')


def _check_schema(schema: JsonObject, at: Place) -> Iterator[Finding]:
    def found(code: str, message: str, hint: str) -> Finding:
        return finding(code, f"{at.subject}: {message}", at, hint)

    if schema.get("type") != "object":
        message = 'providers refuse the schema of its parameters, which lacks "type": "object"'
        yield found("OSM113", message, 'Give the schema "type": "object" with "properties".')
    top = [keyword for keyword in _TOP_LEVEL if keyword in schema]
    if top:
        message = f"the schema of its parameters has {', '.join(top)} at the top, which providers refuse"
        yield found("OSM114", message, "Move the alternatives into one parameter, or make a tool of each.")
    nodes = list(_nodes(schema))
    for ref in sorted({ref for node in nodes for ref in _refs(node) if _resolve(schema, ref) is None}):
        yield found("OSM117", f"its schema refers to {ref}, which it doesn't define", "Define it under $defs.")
    if _recursive(schema):
        hint = "Give the nesting a fixed depth, or take the value as JSON text."
        yield found("OSM115", "its schema refers to itself, which several providers refuse", hint)
    keywords = sorted({keyword for node in nodes for keyword in _UNSUPPORTED if keyword in node} - set(top))
    if keywords:
        message = f"its schema uses {', '.join(keywords)}, which providers ignore or refuse"
        hint = "Check this in the tool, and raise an error that tells the model what to do instead."
        yield found("OSM116", message, hint)


def _check_alike(tools: Sequence[Tool], places: Mapping[str, Place]) -> Iterator[Finding]:
    texts = [(_name(tool), _normalised(tool)) for tool in tools[:MAX_COMPARED]]
    texts = [(name, text) for name, text in texts if text]
    for number, (name, text) in enumerate(texts):
        for other, earlier in texts[:number]:
            if other != name and _alike(text, earlier):
                message = f"the descriptions of {other} and {name} can't be told apart"
                hint = "Say in each what it does that the other doesn't, and when to use it."
                yield finding("OSM118", message, places[name], hint)
                break


def _alike(one: str, other: str) -> bool:
    if one == other:
        return True
    # Descriptions that differ by a word can be told apart, however similar the rest is.
    if set(one.split()) != set(other.split()):
        return False
    return SequenceMatcher(None, one, other).ratio() >= ALIKE


def _normalised(tool: Tool) -> str:
    text = str(tool["function"].get("description") or "").casefold()
    words = re.findall(r"\w+", text)
    return " ".join(_stem(word) for word in words if word not in _FILLERS)


def _stem(word: str) -> str:
    return word[:-1] if word.endswith("s") and len(word) > 3 else word


def _check_name(at: Place) -> Iterator[Finding]:
    name = at.subject or ""
    if not NAME.fullmatch(name):
        too_long = f" (it has {len(name)})" if len(name) > 64 else ""
        allowed = f"allowed are 1 to 64 letters, digits, _ and -{too_long}"
        message = f"providers refuse the tool name {name[:100]!r}: {allowed}"
        yield finding("OSM105", message, at._replace(subject=name[:100]))


def _undescribed(at: Place) -> Finding:
    message = f"the tool {at.subject} has no description, so a model can go only by its name"
    return finding("OSM110", message, at, "Write a docstring that says what it does and when to use it.")


def _untyped(parameter: str, at: Place) -> Finding:
    message = f"the parameter {parameter} of {at.subject} has no type, so a model may pass anything"
    return finding("OSM112", message, at, f"Annotate it, as in {parameter}: str.")


def _duplicate(at: Place) -> Finding:
    message = f"two tools are named {at.subject}; only one of them can be called"
    return finding("OSM106", message, at, 'Rename one, or give it its own name: @mcp.tool(name="…").')


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _place(name: str, components: Sequence[Component]) -> Place:
    component = _written_as(name, components)
    return Place("mcp/main.py", None, name) if component is None else Place(component.file, component.line, name)


def _written_as(registered: str, components: Sequence[Component]) -> Component | None:
    """Return the source of a registered tool. A mounted server's tools have a prefix that the source lacks."""
    for component in components:
        if component.name == registered:
            return component
    prefixed = (c for c in components if re.fullmatch(rf".+[_/.-]{re.escape(c.name)}", registered))
    return max(prefixed, key=lambda component: len(component.name), default=None)


# Schemas


def _nodes(schema: JsonValue) -> Iterator[JsonObject]:
    """Yield every subschema. Values under `default`, `enum`, `const` and `examples` are data, not schemas."""
    waiting, seen = [schema], 0
    while waiting and seen < MAX_NODES:
        node = waiting.pop()
        seen += 1
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key in ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"):
                    waiting += value.values() if isinstance(value, dict) else []
                elif key not in ("default", "enum", "const", "examples", "example", "required"):
                    waiting.append(value)


def _refs(node: JsonObject) -> Iterator[str]:
    if isinstance(node.get("$ref"), str):
        yield node["$ref"]


def _resolve(schema: JsonObject, ref: str) -> JsonValue:
    if not ref.startswith("#"):
        return None
    found: JsonValue = schema
    for part in ref.removeprefix("#").split("/")[1:]:
        # JSON Pointer's escapes; the order matters, because ~01 stands for ~1.
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found


def _recursive(schema: JsonObject) -> bool:
    leads_to: dict[str, set[str]] = {}
    waiting = {ref for node in _nodes(schema) for ref in _refs(node)}
    if "#" in waiting:
        return True
    while waiting:
        ref = waiting.pop()
        target = _resolve(schema, ref)
        leads_to[ref] = {inner for node in _nodes(target) for inner in _refs(node)} if target is not None else set()
        waiting |= leads_to[ref] - leads_to.keys()
    return any(_reaches(ref, leads_to.__getitem__) for ref in leads_to)


def _reaches(start: str, following: Callable[[str], set[str]]) -> bool:
    seen: set[str] = set()
    waiting = set(following(start))
    while waiting:
        ref = waiting.pop()
        if ref == start:
            return True
        seen.add(ref)
        waiting |= following(ref) - seen
    return False


def _check(subject: Subject) -> Iterator[Finding]:
    """Check the loaded server's tools, or the source if it isn't loaded; duplicates show only in the source."""
    sources, loaded = subject.components["tool"], subject.loaded
    for found in check_tool_source(subject.root, sources):
        # A server keeps only the last of two tools with the same name.
        if loaded is None or found.code == "OSM106":
            yield found
    if loaded is not None:
        yield from check_loaded_tools(loaded.tools, loaded.tool_sources, sources)
        subject.components["tool"] = merge_tools(sources, loaded.tools)


CHECKS = (Check("tools", codes(104, 120), _check),)
