"""Tools: what their source says, and what a loaded server offers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osmosis_ai.discovery.scan import Component, scan_tools
from osmosis_ai.validate.findings import Finding
from osmosis_ai.validate.tools import check_loaded_tools, check_tool_source, merge_tools

GOOD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number"}}}


def tool(
    name: str, description: str = "Do something useful.", parameters: dict[str, Any] | None = None
) -> dict[str, Any]:
    shape = GOOD if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shape}}


def component(name: str, file: str = "mcp/main.py", line: int = 5) -> Component:
    return Component("tool", name, file, line, file.removesuffix(".py").replace("/", "."))


def loaded(
    *tools: dict[str, Any], source: list[Component] | None = None, files: tuple[str, ...] = ("mcp/main.py",)
) -> list[Finding]:
    written = [component(one["function"]["name"]) for one in tools] if source is None else source
    return list(check_loaded_tools(tools, dict.fromkeys(files, "hash"), written))


def codes(findings: list[Finding]) -> list[str]:
    return [one.code for one in findings]


def source(tmp_path: Path, **files: str) -> list[Finding]:
    folder = tmp_path / "mcp"
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return list(check_tool_source(tmp_path, scan_tools(folder, tmp_path).components))


def test_a_good_tool_has_no_findings() -> None:
    assert loaded(tool("add")) == []


def test_no_tools() -> None:
    assert codes(loaded()) == ["OSM104"]


@pytest.mark.parametrize("name", ["a.b", "ü", "a" * 65, "two words", ""])
def test_names_that_providers_refuse(name: str) -> None:
    findings = loaded(tool(name))
    assert codes(findings) == ["OSM105"]
    assert (findings[0].file, findings[0].line) == ("mcp/main.py", 5)


def test_a_tool_without_description() -> None:
    assert codes(loaded(tool("add", "  "))) == ["OSM110"]


def test_a_description_that_is_too_long() -> None:
    assert codes(loaded(tool("add", "x" * 1024))) == []
    assert codes(loaded(tool("add", "x" * 1025))) == ["OSM119"]


def test_parameters_without_description_or_type() -> None:
    shape = {"type": "object", "properties": {"a": {"title": "A"}, "b": {"enum": [1], "description": "one"}}}
    assert codes(loaded(tool("add", parameters=shape))) == ["OSM112", "OSM111"]


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf", "enum", "not"])
def test_unions_at_the_top(keyword: str) -> None:
    shape = {**GOOD, keyword: {"type": "object"} if keyword == "not" else [{"type": "object"}]}
    assert codes(loaded(tool("add", parameters=shape))) == ["OSM114"]


def test_parameters_that_are_no_object() -> None:
    assert codes(loaded(tool("add", parameters={"properties": {}}))) == ["OSM113"]


def test_a_recursive_schema() -> None:
    node = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}}
    other = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node", "description": "next"}}}
    described = {"$ref": "#/$defs/Other", "description": "A tree"}
    shape = {"type": "object", "properties": {"tree": described}, "$defs": {"Node": node, "Other": other}}
    assert codes(loaded(tool("grow", parameters=shape))) == ["OSM115"]
    # The same definition used twice, one inside the other, is no recursion.
    shape["$defs"] = {"Node": {"type": "string"}, "Other": other}
    assert codes(loaded(tool("grow", parameters=shape))) == []


def test_the_root_as_its_own_part() -> None:
    shape = {"type": "object", "properties": {"a": {"$ref": "#", "description": "again"}}}
    assert codes(loaded(tool("grow", parameters=shape))) == ["OSM115"]


def test_a_reference_that_leads_nowhere() -> None:
    shape = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Gone", "description": "a"}}}
    findings = loaded(tool("grow", parameters=shape))
    assert codes(findings) == ["OSM117"]
    assert "#/$defs/Gone" in findings[0].message


def test_keywords_that_providers_ignore() -> None:
    shape = {**GOOD, "patternProperties": {"^x": {"type": "string"}}, "if": {"required": ["a"]}}
    findings = loaded(tool("add", parameters=shape))
    assert codes(findings) == ["OSM116"]
    assert "if, patternProperties" in findings[0].message


def test_a_parameter_called_like_a_keyword_is_none() -> None:
    named = {"if": {"type": "string", "description": "a condition"}, "not": {"type": "string", "description": "x"}}
    data = {"type": "string", "description": "d", "default": {"$ref": "#/nowhere"}, "examples": [{"if": 1}]}
    shape = {"type": "object", "properties": {**named, "data": data}}
    assert loaded(tool("add", parameters=shape)) == []


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("Add two numbers.", "Adds two numbers", True),
        ("Get the weather.", "This tool gets the weather!", True),
        ("Add two numbers.", "Subtract two numbers.", False),
        ("Get the current temperature of a city in degrees.", "Get the current humidity of a city in percent.", False),
    ],
)
def test_descriptions_that_cannot_be_told_apart(one: str, other: str, alike: bool) -> None:
    assert codes(loaded(tool("first", one), tool("second", other))) == (["OSM118"] if alike else [])


def test_a_name_used_twice() -> None:
    assert "OSM106" in codes(loaded(tool("add"), tool("add", "Add up a list of prices.")))


def test_more_tools_than_providers_take() -> None:
    tools = [tool(f"tool_{i}", f"Number {'i' * i}.") for i in range(129)]
    assert codes(loaded(*tools)) == ["OSM120"]


# Source and server


def test_a_tool_whose_file_is_never_imported() -> None:
    findings = loaded(tool("add"), source=[component("add"), component("sub", "mcp/tools/more.py", 9)])
    assert codes(findings) == ["OSM107"]
    assert (findings[0].file, findings[0].line, findings[0].subject) == ("mcp/tools/more.py", 9, "sub")
    assert findings[0].hint == "Import it in main.py: import tools.more"


def test_a_tool_in_an_imported_file_that_is_not_offered() -> None:
    files = ("mcp/main.py", "mcp/tools/more.py")
    written = [component("add"), component("sub", "mcp/tools/more.py", 9)]
    assert codes(loaded(tool("add"), source=written, files=files)) == ["OSM108"]


def test_a_tool_that_only_the_server_knows() -> None:
    findings = loaded(tool("add"), tool("sub", "Take away."), source=[component("add")])
    assert codes(findings) == ["OSM109"]
    assert findings[0].subject == "sub"
    merged = merge_tools([component("add")], [tool("add"), tool("sub")])
    assert [one.name for one in merged] == ["add", "sub"]


def test_a_mounted_server_gives_its_tools_a_prefix() -> None:
    assert loaded(tool("math_add"), source=[component("add")]) == []
    # But another tool that happens to end the same way is not this one.
    findings = loaded(tool("math_add"), source=[component("math_add"), component("add", "mcp/other.py")])
    assert [(one.code, one.subject) for one in findings] == [("OSM107", "add")]


# Source alone


def test_what_source_alone_shows(tmp_path: Path) -> None:
    findings = source(
        tmp_path,
        main=(
            "from fastmcp import FastMCP\nmcp = FastMCP('x')\n\n"
            "@mcp.tool\ndef first(a, b: int):\n    return a\n\n"
            "@mcp.tool(description='Says it.')\ndef second(ctx, a: int):\n    return a\n\n"
            "@mcp.tool(name='no good')\ndef third(a: int):\n    '''Do it.'''\n"
        ),
    )
    assert [(one.code, one.line, one.subject) for one in findings] == [
        ("OSM105", 13, "no good"),
        ("OSM110", 5, "first"),
        ("OSM112", 5, "first"),
    ]


def test_the_same_name_on_the_same_server_in_two_files(tmp_path: Path) -> None:
    part = "from server import mcp\n\n@mcp.tool\ndef add(a: int):\n    '''Add.'''\n"
    findings = source(tmp_path, one=part, two=part)
    assert [(one.code, one.file) for one in findings] == [("OSM106", "mcp/two.py")]


def test_the_same_name_on_two_servers(tmp_path: Path) -> None:
    part = "from fastmcp import FastMCP\nmcp = FastMCP('x')\n\n@mcp.tool\ndef add(a: int):\n    '''Add.'''\n"
    assert source(tmp_path, one=part, two=part) == []
