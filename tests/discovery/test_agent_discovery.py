"""`-m` values, resolved from source without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from osmosis_ai.discovery.agents import AgentSource, resolve_agent
from osmosis_ai.errors import UsageError

SERVER = "from loops import Loop\n\nraise SystemExit  # nothing here is run\n\nagent_loop = Loop()\n"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (\n", encoding="utf-8")
    (tmp_path / "dynamic.py").write_text("globals()['loop'] = 1\n", encoding="utf-8")
    (tmp_path / "pack" / "deep").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("class Loop: ...\n", encoding="utf-8")
    (tmp_path / "pack" / "deep" / "loops.py").write_text("class Loop: ...\n", encoding="utf-8")
    (tmp_path / "plain").mkdir()
    return tmp_path


def test_modules_are_found_from_the_working_directory(repo: Path) -> None:
    root = str(repo)
    assert resolve_agent("server:agent_loop", repo) == AgentSource("server", "agent_loop", root, "server.py", 5)
    assert resolve_agent("server:Loop", repo).line == 1
    assert resolve_agent("pack:Loop", repo) == AgentSource("pack", "Loop", root, "pack/__init__.py", 1, "pack")
    deep = resolve_agent(" pack.deep.loops : Loop ", repo)
    assert (deep.name, deep.file, deep.folder) == ("pack.deep.loops:Loop", "pack/deep/loops.py", "pack")


def test_what_source_cant_tell_is_left_to_the_worker(repo: Path) -> None:
    assert resolve_agent("broken:loop", repo).line is None
    assert resolve_agent("dynamic:loop", repo).line is None
    assert resolve_agent("json:loads", repo) == AgentSource("json", "loads", str(repo))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no agent loop; write MODULE:ATTRIBUTE"),
        (":loop", "names no agent loop"),
        ("server:", "the name of the loop is missing; write MODULE:ATTRIBUTE, for example server:agent_loop"),
        ("server:a-loop", "names no agent loop"),
        ("./server.py:agent_loop", "the module is written with dots, as in an import: server:agent_loop"),
        ("pack/deep/loops.py:Loop", "pack.deep.loops:Loop"),
        ("plain:loop", "plain is a folder; name a module in it"),
        ("srver:agent_loop", "there is no module srver in"),
        ("srver:agent_loop", "did you mean server? The modules there: broken, dynamic, server."),
        ("server:agent_lop", "there is no agent_lop in server.py; did you mean agent_loop?"),
    ],
)
def test_what_isnt_there_is_said(repo: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_agent(text, repo)
    assert said in str(refused.value)
