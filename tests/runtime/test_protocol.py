"""What is sent to a worker names files by the repository's root, wherever that is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.discovery.repository import McpSource
from osmosis_ai.records import FunctionRef
from osmosis_ai.runtime.protocol import LimitsConfig, Places, WorkerSpec, attach, detach, encode


def make_spec(root: Path) -> WorkerSpec:
    return WorkerSpec(
        str(root),
        LimitsConfig(),
        mcp=McpSource("directory", str(root / "mcp" / "main.py")),
        functions=[FunctionRef("reward_fn.a:b", "reward_fn.a", "b", str(root), file="reward_fn/a.py")],
        store=str(root / ".osmosis" / "runs.db"),
        cache=str(root / ".osmosis" / "cache.db"),
        agent=AgentSource("agents", "loop", str(root), "agents.py"),
        debug_dir=str(root / "debug"),
    )


def places_in(root: Path) -> Places:
    private = root / ".osmosis"
    return Places(
        str(root), store=str(private / "runs.db"), cache=str(private / "cache.db"), debug_dir=str(root / "debug")
    )


def test_a_spec_has_no_path_of_the_machine_that_made_it(tmp_path: Path) -> None:
    named, places = detach(make_spec(tmp_path / "here"))
    assert str(tmp_path).encode() not in encode(named)
    assert places == places_in(tmp_path / "here")
    there = tmp_path / "there"
    assert attach(named, places_in(there)) == make_spec(there)


def test_what_is_given_back_on_the_same_machine_is_the_same(tmp_path: Path) -> None:
    spec = make_spec(tmp_path / "repo")
    outside = msgspec.structs.replace(
        spec,
        mcp=McpSource("config", str(tmp_path / "elsewhere" / "mcp.json")),
        functions=[FunctionRef("module:f", "module", "f", str(tmp_path))],
    )
    remote = msgspec.structs.replace(spec, mcp=McpSource("url", url="http://localhost:8000/mcp"), agent=None)
    for one in (spec, outside, remote):
        assert attach(*detach(one)) == one
