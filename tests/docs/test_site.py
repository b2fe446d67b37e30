"""The site that `make docs` has built: complete, with no broken link, and nothing from elsewhere in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

pytestmark = pytest.mark.site
pytest.importorskip("mkdocs", reason="mkdocs isn't installed; make docs installs it")

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
IN_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//")
IN_SCRIPTS = re.compile(r"https?://[\w.-]*(?:unpkg|jsdelivr|cdnjs|googleapis|gstatic|fonts|googletagmanager)[\w./@-]*")


class Elements(HTMLParser):
    """What a page fetches, where it leads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in FETCHED:
            self.fetched.append(values.get(FETCHED[tag], ""))
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(values.get("href", ""))
        elif tag == "a":
            self.links.append(values.get("href", ""))


@pytest.fixture(scope="module")
def pages() -> dict[Path, Elements]:
    found = {page: Elements(page.read_text(encoding="utf-8")) for page in SITE.glob("*.html")}
    assert len(found) > 30, "make docs builds the site first"
    return found


def test_every_document_is_a_page(pages: dict[Path, Elements]) -> None:
    names = {page.stem for page in pages}
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    generated = {"api", "help", "registries", "schemas"}
    assert documents | generated | {"index", "overview", "changelog", "contributing", "benchmarks"} <= names


def test_pages_fetch_nothing_from_elsewhere(pages: dict[Path, Elements]) -> None:
    fetched = {address for page in pages.values() for address in page.fetched}
    assert {address for address in fetched if re.match(r"(https?:)?//", address)} == set()
    for style in SITE.rglob("*.css"):
        assert not IN_STYLES.search(style.read_text(encoding="utf-8")), style
    for script in SITE.rglob("*.js"):
        assert IN_SCRIPTS.findall(script.read_text(encoding="utf-8")) == [], script


def test_links_lead_to_pages_and_their_anchors(pages: dict[Path, Elements]) -> None:
    broken = []
    for page, elements in pages.items():
        # The page for what isn't there has addresses from the site's root.
        for link in elements.links if page.stem != "404" else ():
            target, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", target):
                continue
            there = (page.parent / target).resolve() if target else page
            if not there.exists() or (anchor and there in pages and anchor not in pages[there].anchors):
                broken.append((page.name, link))
    assert broken == []


def test_code_has_titles_instead_of_attributes_and_tables_no_backslashes() -> None:
    tutorial = (SITE / "tutorial.html").read_text(encoding="utf-8")
    assert '<span class="filename">mcp/main.py</span>' in tutorial
    assert "```" not in tutorial
    assert "\\|" not in (SITE / "options.html").read_text(encoding="utf-8")


def test_the_api_page_has_every_public_name_and_its_docstring() -> None:
    import osmosis_ai

    page = SITE / "api.html"
    anchors = Elements(page.read_text(encoding="utf-8")).anchors
    shown = {anchor.rpartition(".")[2] for anchor in anchors}
    assert {*osmosis_ai.__all__} - {"__version__"} <= shown
    assert "Raises" in page.read_text(encoding="utf-8")


def test_every_command_and_every_entry_of_a_registry_is_listed() -> None:
    from osmosis_ai.cli.man import helps
    from osmosis_ai.exports import EXPORT_FORMATS
    from osmosis_ai.failures import FAILURE_KINDS
    from osmosis_ai.validate.findings import CODES

    anchors = Elements((SITE / "help.html").read_text(encoding="utf-8")).anchors
    assert {command.replace(" ", "-") for command, _ in helps()} <= anchors
    registries = (SITE / "registries.html").read_text(encoding="utf-8")
    listed = set(re.findall(r"<td>(?:<code>)?([^<]+)", registries))
    assert {*EXPORT_FORMATS, *FAILURE_KINDS, *CODES} <= listed


def test_a_broken_anchor_fails_the_build(tmp_path: Path) -> None:
    for name in ("docs", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "vllm.md").write_text("# vLLM\n\n[keys](models.md#no-such-part)\n", encoding="utf-8")
    (tmp_path / "osmosis_ai").symlink_to(ROOT / "osmosis_ai")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )
    assert built.returncode != 0
    assert "no-such-part" in built.stderr
