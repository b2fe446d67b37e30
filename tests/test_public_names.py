"""The package's public names: complete, loaded lazily, and light."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import osmosis_ai

HEAVY = {"litellm", "fastmcp", "mcp", "pydantic", "aiohttp", "anyio", "msgspec", "rich", "typer"}


def run_fresh(code: str) -> str:
    """Run code in a fresh interpreter with this package, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(osmosis_ai.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    return set(json.loads(run_fresh(f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))")))


@pytest.mark.parametrize(
    "statement",
    [
        "import osmosis_ai",
        "from osmosis_ai import osmosis_reward",
        "from osmosis_ai import osmosis_rubric",
        "from osmosis_ai import current_rollout, osmosis_setup",
        "from osmosis_ai import OsmosisError, __version__",
    ],
)
def test_importing_a_light_name_loads_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement) & HEAVY == set()


def test_the_judge_loads_no_client_until_it_is_asked() -> None:
    loaded = loaded_by("from osmosis_ai import aevaluate_rubric, evaluate_rubric")
    assert loaded & {"litellm", "aiohttp", "pydantic", "yaml", "anyio"} == set()


def test_the_decorators_load_only_the_standard_library_and_themselves() -> None:
    new = loaded_by("from osmosis_ai import osmosis_reward, osmosis_rubric") - loaded_by("pass")
    foreign = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names) - {"osmosis_ai"}
    assert foreign == set()


def test_a_name_is_loaded_when_it_is_used_and_not_before() -> None:
    loaded = loaded_by("import osmosis_ai")
    assert "osmosis_ai" in loaded
    assert not any(name.startswith("osmosis_ai.") for name in loaded)


def test_importing_a_decorator_is_fast() -> None:
    seconds = run_fresh(
        "import time\nstarted = time.perf_counter()\n"
        "from osmosis_ai import osmosis_reward\nprint(time.perf_counter() - started)"
    )
    # Ten times what is promised: what this catches is a heavy import, not a busy machine.
    assert float(seconds) < 0.5


def test_all_lists_the_public_names() -> None:
    assert osmosis_ai.__all__ == [
        "CurrentRollout",
        "MissingAPIKeyError",
        "ModelNotFoundError",
        "OsmosisError",
        "ProviderRequestError",
        "Report",
        "RewardRubricRunResult",
        "Rollout",
        "RunConfig",
        "RunSession",
        "Score",
        "StartError",
        "__version__",
        "aevaluate_rubric",
        "current_rollout",
        "evaluate_rubric",
        "open_run",
        "osmosis_reward",
        "osmosis_rubric",
        "osmosis_setup",
        "run",
    ]
    assert set(osmosis_ai.__all__) <= set(dir(osmosis_ai))


def test_every_public_name_resolves_to_the_thing_itself() -> None:
    from osmosis_ai import errors
    from osmosis_ai.reward_fn.decorator import osmosis_reward
    from osmosis_ai.reward_rubric import judge
    from osmosis_ai.reward_rubric.decorator import osmosis_rubric

    for name in ("MissingAPIKeyError", "ModelNotFoundError", "OsmosisError", "ProviderRequestError"):
        assert getattr(osmosis_ai, name) is getattr(errors, name)
    for name in ("RewardRubricRunResult", "aevaluate_rubric", "evaluate_rubric"):
        assert getattr(osmosis_ai, name) is getattr(judge, name)
    assert osmosis_ai.osmosis_reward is osmosis_reward
    assert osmosis_ai.osmosis_rubric is osmosis_rubric


def test_star_import_gives_every_public_name() -> None:
    names: dict[str, object] = {}
    exec("from osmosis_ai import *", names)
    assert set(osmosis_ai.__all__) <= set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'osmosis_ai' has no attribute 'osmosis_rewards'"):
        osmosis_ai.osmosis_rewards  # noqa: B018


def test_the_version_is_the_distributions() -> None:
    assert osmosis_ai.__version__ == importlib.metadata.version("osmosis-ai")
