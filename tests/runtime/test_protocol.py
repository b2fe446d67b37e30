"""Messages to a worker name files relative to the repository's root, wherever that is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.discovery.repository import McpSource
from osmosis_ai.records import FunctionRef, ModelSpec
from osmosis_ai.runtime.protocol import (
    LimitsConfig,
    Places,
    WorkerSpec,
    agent_part,
    attach,
    detach,
    encode,
    scorer_part,
)


def make_spec(root: Path) -> WorkerSpec:
    return WorkerSpec(
        str(root),
        LimitsConfig(),
        mcp=McpSource("directory", str(root / "mcp" / "main.py")),
        functions=[FunctionRef("reward_fn.a:b", "reward_fn.a", "b", str(root), file="reward_fn/a.py")],
        cache=str(root / ".osmosis" / "cache.db"),
        agent=AgentSource("agents", "loop", str(root), "agents.py"),
        debug_dir=str(root / "debug"),
    )


def places_in(root: Path) -> Places:
    private = root / ".osmosis"
    return Places(str(root), cache=str(private / "cache.db"), debug_dir=str(root / "debug"))


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


def test_a_worker_with_tools_has_no_functions_and_one_with_functions_no_model(tmp_path: Path) -> None:
    key = "sk-a-key-of-the-model"
    models = {"policy": ModelSpec("m", "endpoint", "m", base_url="http://127.0.0.1:9/v1", api_key=key)}
    spec = msgspec.structs.replace(make_spec(tmp_path), policies=models, keep_going=True)
    agents = agent_part(spec, 4)
    assert (agents.functions, agents.keep_going, agents.batch_size) == ([], False, 4)
    assert (agents.mcp, agents.policies, agents.agent) == (spec.mcp, models, spec.agent)
    assert b"reward_fn" not in encode(agents)
    scorers = scorer_part(spec)
    assert (scorers.mcp, scorers.agent, scorers.policies, scorers.cache) == (None, None, {}, None)
    assert (scorers.functions, scorers.keep_going) == (spec.functions, True)
    assert key.encode() not in encode(scorers)
