"""Everything the documents show is run, and what they say comes out is compared with what does.

A document's `##` section is run as a whole, from top to bottom, in a folder of its own: a copy of examples/calculator,
or an empty one when the section writes its own `mcp/main.py`, or a clone's root when it calls `make` or `.venv/bin/…`.
The first line of a block says what it is:

    ```bash              commands that must succeed
    ```console           commands after `$ `, and what they print to stdout and stderr
    ```python            a program that must succeed
    ```json              JSON
    ```json like=FILE    JSON of the same shape as in FILE, which the section has written
    ```json type=NAME    all of a record of the trainer's contract
    ```… file=FILE       any of these, written to FILE instead of being run
    ```text              nothing to run; lines that begin with `osmosis` must be commands

In shown output `…` stands for any text, and on a line of its own for any lines. Times, counts of passed tests and run
ids may differ. `http://localhost:8000/v1` and OpenAI are a scripted endpoint here, `http://localhost:8765/mcp` is a
served FastMCP server. `make` runs its real recipes in the environment of this test; `make test` runs one module unless
it says which, and those that would take minutes are only looked up in the Makefile.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sections import BLOCK, DOCUMENTS, ROOT, Section, all_sections, run_section, sections

from commands import command_of, parse_command, the_command_line
from osmosis_ai.cli.eval_rubric import EvalRubricConfig
from osmosis_ai.config import RunConfig
from osmosis_ai.options import declared_options
from osmosis_ai.runtime.run.results import Cause
from osmosis_ai.serve.config import ServeConfig
from osmosis_ai.validate.run_configs import TABLES


@pytest.mark.parametrize("section", sections(starting_programs=False))
def test_a_section(section: Section, tmp_path: Path, clone: Path, servers: dict[str, str]) -> None:
    run_section(section, tmp_path, clone, servers)


OPTION_TABLES = {
    "validate": ["## osmosis validate"],
    "init": ["## osmosis init"],
    "eval-rubric": ["## osmosis eval-rubric"],
    "preview": ["## osmosis preview"],
    "runs": ["## osmosis runs", "### osmosis runs list"],
    **{
        f"runs {name}": ["## osmosis runs", f"### osmosis runs {name}"]
        for name in ("list", "show", "compare", "diff", "rescore", "export", "merge", "rm")
    },
    "import": ["## osmosis import"],
    "view": ["## osmosis view"],
    "runs view": ["## osmosis view"],
    "cache": ["## osmosis cache"],
    "cache clear": ["## osmosis cache"],
    "serve": ["## osmosis serve"],
    **{f"rollout {name}": [f"### osmosis rollout {name}"] for name in ("init", "list", "validate", "serve")},
}
"""The tables in docs/cli.md that a command's options are in, by the headings above them."""
DECLARED = {"serve": ServeConfig, "eval-rubric": EvalRubricConfig}


@pytest.mark.parametrize("name", OPTION_TABLES)
def test_every_option_is_documented_with_its_default(name: str) -> None:
    documented: dict[str, str] = {}
    for heading in OPTION_TABLES[name]:
        documented |= option_table(heading)
    command = the_command_line()
    for part in name.split():
        command = command.commands[part]
    real = {
        option: parameter
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("-") and option != "--help" and not getattr(parameter, "hidden", False)
    }
    real.pop("-h", None)
    assert sorted(documented) == sorted(real)
    declared = {
        flag: option.default
        for option in (declared_options(DECLARED[name]) if name in DECLARED else ())
        for flag in option.flags
    }
    declared |= {f"--no-{flag[2:]}": default for flag, default in declared.items() if default is False}
    for option, parameter in real.items():
        shown = documented[option]
        default = declared.get(option, parameter.default)
        if default is False:
            assert shown == "off", option
        elif isinstance(default, int | float):
            assert shown == f"`{default:.10g}`", option
        else:
            assert shown != "off", option


@pytest.mark.parametrize("name", ["test", "eval"])
def test_every_option_of_how_a_run_is_shown_is_documented(name: str) -> None:
    command = the_command_line().commands[name]
    real = {flag for parameter in command.params if not parameter.hidden for flag in parameter.opts}
    # Those of a run are in docs/options.md, which is made from their declarations.
    real -= {flag for option in declared_options(RunConfig) for flag in option.flags} | {"--help", "-h"}
    headings = ("## osmosis test", "### Only osmosis test", "## osmosis eval")
    documented = set().union(*map(option_table, headings))
    assert real <= documented, real - documented


def option_table(heading: str) -> dict[str, str]:
    """Each option in the table under a heading of docs/cli.md, with its default as it is written there."""
    content = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    part = re.split(r"^##", content.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = {}
    for row in re.findall(r"^\| (`-.*?) \| (.*?) \|", part, re.MULTILINE):
        for option in re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*", row[0]):
            found[option] = row[1]
    return found


def test_every_field_of_the_results_is_described() -> None:
    content = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(\w+)`", BLOCK.sub("", content)))
    shown = [json.loads(match[3]) for match in BLOCK.finditer(content) if match[1] == "json"]
    assert len(shown) == 2
    fields = set(Cause.__struct_fields__)
    for value in shown:
        fields |= field_names(value)
    assert fields - {"tools"} <= described | {"config", "summary", "results"}, fields - described


def field_names(value: Any) -> set[str]:
    """All keys but those that are names of tools and functions."""
    if isinstance(value, list):
        return set().union(*map(field_names, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    found: set[str] = set()
    for key, item in value.items():
        if ":" not in key and key != "add":
            found.add(key)
        found |= field_names(item)
    return found


def test_commands_in_blocks_that_cannot_run_here_exist() -> None:
    lines = [
        line.removeprefix("$ ")
        for section in all_sections()
        for block in section.blocks
        if block.language == "text" or block.attributes.get("file", "").endswith(".sh")
        for line in block.content.replace("\\\n", " ").splitlines()
    ]
    commands = [line for line in lines if line.startswith("osmosis ")]
    assert len(commands) > 10
    for line in commands:
        parse_command(line)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_options_in_the_text_exist(document: str) -> None:
    content = BLOCK.sub("", (ROOT / document).read_text(encoding="utf-8"))
    for span in re.findall(r"(?<!`)`osmosis ([^`]+)`", content.replace("\n", " ")):
        command, _, rest = command_of(span.split())
        known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        named = {word.partition("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)}
        assert named <= known | {"--help", "-h"}, f"`osmosis {span}`"


def test_every_page_is_in_the_navigation_and_in_the_list_of_pages() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f": {page}\n" not in navigation} == set(), "not in mkdocs.yml"
    assert {page for page in pages if f"]({page})" not in listed} == set(), "not in docs/README.md"


def test_every_key_of_a_training_config_is_documented_and_in_the_template() -> None:
    document = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    template = (ROOT / "osmosis_ai" / "templates" / "rollout" / "training.toml.txt").read_text(encoding="utf-8")
    keys = {key for name, table in TABLES["training"].items() if name != "experiment" for key in table}
    assert {key for key in keys if f"`{key}`" not in document} == set(), "not in docs/training.md"
    assert {key for key in keys if f"{key} = " not in template} == set(), "not in the template"


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md", "examples/calculator/README.md"])
def test_links_lead_somewhere(document: str) -> None:
    content = BLOCK.sub("", (ROOT / document).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", content):
        assert (ROOT / document).parent.joinpath(target).exists(), target
