"""Build the site with mkdocs from documents that are also read in the repository.

Documents outside `docs/` become pages; links to files for which the site has no page become plain text. The hooks
generate the pages of the Python API, of every command's help, of the registries and of the schemas.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import osmosis_ai
from osmosis_ai.cli.man import helps
from osmosis_ai.data.formats import FORMATS
from osmosis_ai.exports import EXPORT_FORMATS
from osmosis_ai.failures import FAILURE_KINDS
from osmosis_ai.importers import IMPORT_FORMATS
from osmosis_ai.models.engines import ENGINES, EngineInfo
from osmosis_ai.models.offline import OFFLINE_MODELS
from osmosis_ai.runtime.pool.backends import BACKENDS
from osmosis_ai.training.config import TRAINERS
from osmosis_ai.validate.findings import CODES

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Documents outside `docs/`, and the pages that they become."""
PAGES = {page: source for source, page in ELSEWHERE.items()}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"(?<=\]\()(?:docs/)?(images/[^)]+)(?=\))")
FENCE = re.compile(r"^```(\w+)[ \t]+([^\n]*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
IN_HTML = re.compile(r'\b(src|href)="docs/')
SPAN = re.compile(r"`[^`\n]+`")
SCRIPTS = re.compile(rb"https://(?:unpkg\.com|cdn\.jsdelivr\.net)/[\w@./-]+")
"""Scripts that the theme would fetch for diagrams, which we have none of, and for search in a site without a server."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that `docs/` doesn't hold."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, content in (
        ("api.md", api_page()),
        ("help.md", help_page()),
        ("registries.md", registries_page()),
        ("schemas.md", schemas_page()),
    ):
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links, and turn a code block's `file=` into its title."""
    source = PurePosixPath(PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = normpath(f"{source.parent}/{target}")
        to = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if path == "docs":
            to = "README.md"
        elif path == "docs/schemas":
            to = "schemas.md"
        if to is None or files.get_file_from_path(to) is None:
            return f"{text} (`{path}`)" if (ROOT / path).exists() and text.strip("`") != path else text
        return f"[{text}]({relpath(to, PurePosixPath(page.file.src_uri).parent)}{anchor})"

    def outside_of_code(text: str) -> str:
        # Inside a table's code, GitHub needs `\|` where mkdocs needs `|`.
        text = SPAN.sub(lambda span: span[0].replace("\\|", "|"), text)
        if source.parent == PurePosixPath():
            # The README's pictures are in HTML, which gives them a width.
            text = IN_HTML.sub(r'\1="', text)
        return IMAGE.sub(r"\1", LINK.sub(link, text))

    parts, end = [], 0
    for block in CODE.finditer(markdown):
        parts += [outside_of_code(markdown[end : block.start()]), FENCE.sub(_first_line, block[0])]
        end = block.end()
    return "".join([*parts, outside_of_code(markdown[end:])])


def _first_line(match: re.Match[str]) -> str:
    attributes = dict(item.partition("=")[::2] for item in match[2].split())
    title = attributes.get("file")
    return f'```{match[1]} title="{title}"' if title else f"```{match[1]}"


def on_post_build(config: MkDocsConfig) -> None:
    """Remove the addresses in the theme's scripts from which a reader's browser could fetch more scripts."""
    for script in Path(config.site_dir).rglob("*.js"):
        content = script.read_bytes()
        if SCRIPTS.search(content):
            script.write_bytes(SCRIPTS.sub(b"", content))


def api_page() -> str:
    """Return the page of the public names, in the order of the modules that they come from."""
    lines = [
        "# Python API",
        "",
        "The names of `osmosis_ai`. [library.md](library.md) shows them at work; agent loops and workflows import from",
        "`osmosis_ai.rollout`, which [rollout.md](rollout.md) describes.",
        "",
    ]
    homes: dict[str, Any] = osmosis_ai._HOMES
    listed = {name for names in homes.values() for name in names}
    assert listed == {*osmosis_ai.__all__} - {"__version__"}
    for title, modules in {
        "Runs": ("runtime.run.session", "config", "runtime.run.report", "records"),
        "Functions and tools of a repository": ("reward_fn.decorator", "reward_rubric.decorator", "current"),
        "The judge": ("reward_rubric.judge",),
        "Errors": ("errors",),
    }.items():
        lines += [f"## {title}", ""]
        for module in modules:
            lines += [f"::: osmosis_ai.{module}.{name}\n" for name in homes[f"osmosis_ai.{module}"]]
    return "\n".join(lines)


def help_page() -> str:
    """Return the page of every command's help."""
    lines = ["# Every command's help", "", "As `--help` prints it; [cli.md](cli.md) explains the commands.", ""]
    for command, help in helps():
        lines += [f"## {command}", "", "```text", help.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def registries_page() -> str:
    """Return the page of what the registries hold."""
    lines = [
        "# Registries",
        "",
        "Everything that a name in an option or a file can choose; [adding.md](adding.md) shows how to add to it.",
        "",
    ]
    tables: dict[str, tuple[str, Iterable[tuple[str, ...]]]] = {
        "Dataset formats": ("suffix | its content", ((f"`{one.suffix}`", one.description) for one in FORMATS)),
        "Engines": (
            "engine | models that it calls | what it is",
            ((f"`{one.name}`", _models_of(one), _summary(one.module)) for one in ENGINES.values()),
        ),
        "Stand-ins": ("model | what it is", ((f"`{name}`", banner) for name, banner in OFFLINE_MODELS.items())),
        "Kinds of failure": (
            "kind | whose it can be | cause",
            ((f"`{name}`", ", ".join(kind.origins), kind.cause) for name, kind in FAILURE_KINDS.items()),
        ),
        "Findings of osmosis validate": (
            "code | severity | finding",
            ((code, one.severity, one.title) for code, one in CODES.items()),
        ),
        "Export formats": (
            "format | file | what it has",
            ((f"`{one.name}`", f"`{one.suffix}`", one.description) for one in EXPORT_FORMATS.values()),
        ),
        "Import formats": (
            "format | files | become",
            ((f"`{one.name}`", one.description, "runs" if one.read_run else "rows") for one in IMPORT_FORMATS.values()),
        ),
        "Backends of the pool": (
            "backend | what it does",
            ((f"`{name}`", (opener.__doc__ or "").split("\n")[0]) for name, opener in BACKENDS.items()),
        ),
        "Trainers": ("trainer | module", ((f"`{name}`", f"`{module}`") for name, module in TRAINERS.items())),
    }
    for title, (head, rows) in tables.items():
        lines += [f"## {title}", "", f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _models_of(engine: EngineInfo) -> str:
    if engine.at_base_url:
        return "those at `--base-url`"
    if engine.prefix:
        return f"`{engine.prefix}/…`"
    return "those of an option" if engine.prefix is None else "any other `provider/model`"


def _summary(module: str) -> str:
    """Return the first line of a module's docstring, without importing what the module needs."""
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


def schemas_page() -> str:
    """Return the page that lists the JSON Schemas."""
    lines = ["# JSON Schemas", "", "Schemas of the JSON that commands print and write.", ""]
    lines += ["| schema | describes |", "|---|---|"]
    for file in sorted((ROOT / "docs" / "schemas").glob("*.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))
        top = schema["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        described = " ".join(top.get("description", "").split("\n\n")[0].split())
        lines.append(f"| [{file.name}](schemas/{file.name}) | {described} |")
    return "\n".join(lines) + "\n"
