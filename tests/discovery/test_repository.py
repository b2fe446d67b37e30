"""`--mcp` values and the repository they belong to."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from osmosis_ai.discovery.repository import McpSource, Repository, find_repository, parse_mcp_source
from osmosis_ai.errors import UsageError


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    for folder in ("mcp", "reward_fn", "reward_rubric"):
        (root / folder).mkdir(parents=True)
    for file in ("mcp/main.py", "mcp/other.py", "test_data.jsonl", "mcp.json", "README.md"):
        (root / file).touch()
    return root


def whole(root: Path) -> Repository:
    return Repository(root, root / "mcp", root / "reward_fn", root / "reward_rubric", root / "test_data.jsonl")


# The repository


@pytest.mark.parametrize("mcp", [None, "mcp", "./mcp", "mcp/", "mcp/main.py", "mcp/main.py:app", "mcp/other.py"])
def test_from_the_root(repo: Path, mcp: str | None) -> None:
    assert find_repository(mcp, repo) == whole(repo)


@pytest.mark.parametrize(
    ("mcp", "cwd"),
    [(".", "mcp"), ("main.py", "mcp"), ("../mcp", "reward_fn"), ("repo/mcp", ".."), ("repo/mcp:app", "..")],
)
def test_from_elsewhere(repo: Path, mcp: str, cwd: str) -> None:
    assert find_repository(mcp, repo / cwd) == whole(repo)


def test_an_absolute_path(repo: Path, tmp_path: Path) -> None:
    assert find_repository(str(repo / "mcp"), tmp_path) == whole(repo)


@pytest.mark.parametrize("mcp", ["http://localhost:8000/mcp", "mcp.json"])
def test_other_sources_leave_the_working_directory_as_root(repo: Path, mcp: str) -> None:
    assert find_repository(mcp, repo) == Repository(
        repo, None, repo / "reward_fn", repo / "reward_rubric", repo / "test_data.jsonl"
    )
    # The file may lie anywhere: the functions are those of the folder where the command was typed.
    (repo / "elsewhere").mkdir()
    (repo / "elsewhere" / "mcp.json").touch()
    assert find_repository("elsewhere/mcp.json", repo).root == repo


@pytest.mark.parametrize("folder", ["mcp", "reward_fn", "reward_rubric", "data/raw"])
def test_a_subfolder_belongs_to_the_repository_above_it(repo: Path, folder: str) -> None:
    (repo / folder).mkdir(parents=True, exist_ok=True)
    # A dataset alone makes no repository of a subfolder.
    (repo / folder / "test_data.jsonl").touch()
    assert find_repository(None, repo / folder) == whole(repo)


def test_the_search_for_a_repository_ends_at_the_top_of_a_working_copy(repo: Path) -> None:
    nested = repo / "vendored" / "inner"
    nested.mkdir(parents=True)
    (repo / "vendored" / ".git").mkdir()
    assert find_repository(None, nested) == Repository(nested)


def test_all_folders_are_optional(tmp_path: Path) -> None:
    (tmp_path / "reward_fn").touch()
    (tmp_path / "test_data.jsonl").mkdir()
    assert find_repository(None, tmp_path) == Repository(tmp_path)


def test_a_linked_mcp_folder_belongs_to_the_repository_with_the_link(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "main.py").touch()
    (repo / "mcp2").symlink_to(tmp_path / "shared")
    assert find_repository("mcp2", repo).root == repo


# Sources


@pytest.mark.parametrize(
    ("text", "file", "name"),
    [
        ("mcp", "mcp/main.py", None),
        ("mcp/main.py", "mcp/main.py", None),
        ("mcp/main.py:app", "mcp/main.py", "app"),
        ("mcp:app", "mcp/main.py", "app"),
        ("mcp/other.py:_server2", "mcp/other.py", "_server2"),
    ],
)
def test_python_sources(repo: Path, text: str, file: str, name: str | None) -> None:
    assert parse_mcp_source(text, repo) == McpSource("directory", path=str(repo / file), server_name=name)


def test_a_path_with_a_colon_in_it(repo: Path) -> None:
    (repo / "a:b").mkdir()
    (repo / "a:b" / "main.py").touch()
    expected = str(repo / "a:b" / "main.py")
    assert parse_mcp_source("a:b", repo) == McpSource("directory", path=expected)
    assert parse_mcp_source("a:b/main.py:app", repo) == McpSource("directory", path=expected, server_name="app")


def test_json_and_url_sources(repo: Path) -> None:
    assert parse_mcp_source("mcp.json", repo) == McpSource("config", path=str(repo / "mcp.json"))
    for url in ("http://localhost:8000/mcp", "HTTPS://user:key@example.com/mcp?token=key", "http://[::1]:80/mcp"):
        assert parse_mcp_source(url, repo) == McpSource("url", url=url)


def test_a_source_crosses_processes_and_shows_no_key(repo: Path) -> None:
    source = parse_mcp_source("https://user:hunter2@example.com/mcp?key=hunter2#hunter2", repo)
    assert msgspec.json.decode(msgspec.json.encode(source), type=McpSource) == source
    assert "hunter2" not in repr(source)
    assert "https://example.com/mcp" in repr(source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--mcp is empty"),
        ("  ", "--mcp is empty"),
        ("nowhere", "there is no .*/repo/nowhere; name a folder with main.py"),
        ("mcp/main.py:", "there is no "),
        ("mcp/main.py:my-app", "there is no "),
        ("mcp/nowhere.py:app", "there is no .*/repo/mcp/nowhere.py;"),
        ("C:main", "there is no "),
        ("README.md", "neither a Python file .* nor a .json file"),
        ("mcp.json:app", "a name after the colon goes with a Python file"),
        (".", r"has no main.py, .*; its subfolder has one: --mcp mcp$"),
        ("reward_fn", "has no main.py, which creates the MCP server; it is empty"),
        ("tools", r"; found a.py, b.py\. Name the file that does, as in --mcp tools/a.py"),
        ("tools:app", r"--mcp tools: .*as in --mcp tools/a.py"),
        ("files", "; found 1.txt, 2.txt, 3.txt, 4.txt, main.py/, …"),
        ("pipe.py", "neither a folder nor a file"),
        ("x" * 300, "File name too long|there is no "),
        ("nul\0byte", "can't be read|there is no "),
        ("ftp://example.com", r"'ftp://example.com': only http:// and https://"),
        ("http://", "'http://' is not a valid URL"),
        ("http:///mcp", "is not a valid URL"),
        ("http://host:port/", "is not a valid URL"),
        ("http://host:99999/", "is not a valid URL"),
        ("http://[::1/", "is not a valid URL"),
        ("http://a b/", "is not a valid URL"),
    ],
)
def test_unusable_sources(repo: Path, text: str, message: str) -> None:
    (repo / "tools").mkdir()
    for name in ("b.py", "a.py", "notes.txt"):
        (repo / "tools" / name).touch()
    (repo / "files" / "main.py").mkdir(parents=True)
    for number in range(1, 5):
        (repo / "files" / f"{number}.txt").touch()
    (repo / "files" / "x").touch()
    os.mkfifo(repo / "pipe.py")
    with pytest.raises(UsageError, match=message):
        parse_mcp_source(text, repo)
    with pytest.raises(UsageError, match=message):
        find_repository(text, repo)


@pytest.mark.parametrize(
    "text",
    [
        "htp://user:hunter2@example.com/mcp?key=hunter2",
        "http://user:hunter2@example.com:port/mcp#hunter2",
        "http://user:hun/ter2@example.com/mcp",
        "http://user:hun?ter2@example.com/mcp",
        "http://exa mple.com/?key=hunter2",
        "user:hunter2@example.com/mcp?key=hunter2",
        "user:hun/ter2@example.com/mcp",
        "http:/user:hunter2@example.com/mcp#hunter2",
    ],
)
def test_keys_in_a_url_stay_out_of_messages(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_mcp_source(text, tmp_path)
    assert "ter2" not in str(caught.value)
    assert "hun" not in str(caught.value)


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@given(text=words | st.builds("{}://{}".format, st.sampled_from(["http", "https", "x"]), words))
@example(text="http://[")
@example(text="http://\u2100")
def test_any_text_gives_a_source_or_a_usage_error(text: str) -> None:
    try:
        source = parse_mcp_source(text, Path("/nonexistent"))
    except UsageError:
        return
    assert source.kind == "url" or source.path is not None
