"""A config's names are resolved and checked before anything is loaded, read or asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from osmosis_ai.config import AgentConfig, LimitsConfig, RunConfig
from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.discovery.repository import McpSource, Repository, find_repository
from osmosis_ai.errors import FunctionError, ModelStartError, UsageError
from osmosis_ai.records import FunctionRef
from osmosis_ai.reward_rubric.resolve import resolve_rubrics
from osmosis_ai.runtime.run.plan import BASELINE, POLICY
from osmosis_ai.runtime.run.prepare import (
    Prepared,
    check_judges,
    check_output,
    find_agent,
    find_dataset,
    find_functions,
    prepare,
    scorer_spec,
)
from repos import EXACT

EXACT_NAME = "reward_fn.rewards:exact"
LOOP = "from osmosis_ai.rollout import RolloutAgentLoop\n\nloop = RolloutAgentLoop()\n"
RUBRICS = """
version: 1
rubrics:
  - id: short
    rubric: Is it short?
    model_info: {provider: anthropic, model: a-judge, api_key_env: KEY_OF_THE_JUDGE}
"""
POLITE = """
from osmosis_ai import osmosis_rubric


@osmosis_rubric
def polite(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
    return 1.0
"""


def prepared(repo: Path, environ: dict[str, str] | None = None, **options: Any) -> Prepared:
    return prepare(RunConfig.of(**{"model": "offline/oracle", **options}), repo, environ or {})


def write(repo: Path, name: str, text: str = "") -> Path:
    (repo / name).parent.mkdir(parents=True, exist_ok=True)
    (repo / name).write_text(text, encoding="utf-8")
    return repo / name


def test_a_repository_is_found_by_convention(repo: Path) -> None:
    found = prepared(repo)
    assert (found.plan.root, found.plan.agent_dir) == (str(repo), str(repo / "mcp"))
    assert found.plan.dataset == str(repo / "test_data.jsonl")
    assert [ref.name for ref in found.plan.functions] == [EXACT_NAME]
    assert list(found.plan.policies) == [POLICY]
    assert found.worker.mcp == McpSource("directory", str(repo / "mcp" / "main.py"))
    assert (found.worker.agent, found.worker.cache, found.worker.debug_dir) == (None, None, None)
    assert found.plan.store == str(repo / ".osmosis")


def test_preparing_imports_no_user_code_and_reads_no_row(repo: Path) -> None:
    write(repo, "mcp/main.py", "raise SystemExit")
    write(repo, "reward_fn/rewards.py", EXACT + "\nraise SystemExit\n")
    write(repo, "test_data.jsonl", "nonsense")
    assert [ref.name for ref in prepared(repo).plan.functions] == [EXACT_NAME]


def test_each_model_gets_its_own_options(repo: Path) -> None:
    options = {"model": "a", "base_url": "http://a/v1", "baseline_model": "b", "baseline_base_url": "http://b/v1"}
    policies = prepared(repo, **options, temperature=0.5).plan.policies
    assert [(spec.model, spec.base_url) for spec in policies.values()] == [("a", "http://a/v1"), ("b", "http://b/v1")]
    assert [spec.params for spec in policies.values()] == [{"temperature": 0.5}] * 2
    assert list(policies) == [POLICY, BASELINE]


@pytest.mark.parametrize("options", [{"baseline_base_url": "http://b/v1"}, {"baseline_api_key": "sk-baseline"}])
def test_options_of_a_baseline_without_its_model_are_refused(repo: Path, options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="need --baseline-model"):
        prepared(repo, **options)


def test_replies_are_cached_and_traces_written_where_asked(repo: Path) -> None:
    found = prepared(repo, {"ROLLOUT_DEBUG_DIR": "/traces"}, cache=True)
    assert found.worker.debug_dir == "/traces"
    assert found.worker.cache is not None
    assert Path(found.worker.cache).is_relative_to(repo / ".osmosis")


def test_a_scorer_loads_no_tools(repo: Path) -> None:
    spec = scorer_spec(repo, prepared(repo).plan.functions, LimitsConfig())
    assert (spec.mcp, spec.agent, spec.policies, spec.keep_going) == (None, None, {}, False)
    assert [ref.name for ref in spec.functions] == [EXACT_NAME]


def test_eval_needs_something_to_score_with(repo: Path) -> None:
    (repo / "reward_fn" / "rewards.py").unlink()
    with pytest.raises(UsageError, match="nothing to score with"):
        prepared(repo)
    assert prepared(repo, command="test").plan.functions == []
    # A file that can't be read may have had them, and no run goes on without any.
    write(repo, "reward_fn/rewards.py", "def broken(:\n")
    for keep_going in (False, True):
        with pytest.raises(FunctionError, match=r"reward_fn/rewards\.py:1"):
            prepared(repo, keep_going=keep_going)


def test_files_that_cannot_be_read_are_left_out_only_when_asked(repo: Path) -> None:
    write(repo, "reward_fn/broken.py", "def broken(:\n")
    write(repo, "rubric_configs.yaml", "nonsense")
    with pytest.raises(FunctionError, match=r"(?s)reward_fn/broken\.py:1.*rubric_configs\.yaml.*adding --keep-going"):
        prepared(repo, rubric=["all"])
    found = prepared(repo, rubric=["all"], keep_going=True)
    assert [ref.name for ref in found.plan.functions] == [EXACT_NAME]
    assert [failure.origin for failure in found.left_out] == ["reward", "rubric"]
    assert found.worker.keep_going
    # Files of functions that nobody asked for don't matter.
    assert prepared(repo, eval_fn=["exact"]).left_out == []


def test_an_agent_loop_may_set_rewards_itself_and_has_no_use_for_mcp(repo: Path) -> None:
    (repo / "reward_fn" / "rewards.py").unlink()
    write(repo, "agents.py", LOOP)
    found = prepared(repo, module="agents:loop")
    assert (found.plan.agent, found.plan.agent_dir, found.plan.functions) == ("agents:loop", None, [])
    assert found.worker.mcp is None
    assert found.worker.agent is not None


def test_the_code_of_an_agent_loop_is_its_package(repo: Path) -> None:
    write(repo, "solver/__init__.py")
    write(repo, "solver/agents.py", LOOP)
    source, repository = find_agent(AgentConfig(module="solver.agents:loop"), repo)
    assert isinstance(source, AgentSource)
    assert (repository.root, repository.mcp_dir) == (repo, repo / "solver")


def test_an_agent_is_named_once(repo: Path) -> None:
    with pytest.raises(UsageError, match="-m and --mcp each name an agent"):
        find_agent(AgentConfig(mcp="mcp", module="agents:loop"), repo)


def test_without_tools_it_says_how_to_name_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no agent: there is no mcp folder in .*--mcp DIR.*-m MODULE:ATTRIBUTE"):
        find_agent(AgentConfig(), tmp_path)


def test_the_dataset_of_the_working_directory_comes_first(repo: Path) -> None:
    repository, cwd = find_repository("mcp", repo), repo / "reward_fn"
    assert find_dataset(None, repository, cwd).path == repo / "test_data.jsonl"
    nearer = write(cwd, "test_data.jsonl", "a row")
    assert find_dataset(None, repository, cwd).path == nearer
    assert find_dataset("../test_data.jsonl", repository, cwd).path.samefile(repo / "test_data.jsonl")


def test_without_a_dataset_it_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no dataset: there is no test_data\.jsonl in .*\.jsonl.*-d FILE"):
        find_dataset(None, Repository(tmp_path), tmp_path)


def test_a_function_named_twice_scores_once(repo: Path) -> None:
    repository = find_repository("mcp", repo)
    refs, problems = find_functions(["exact", EXACT_NAME], repository, repo)
    assert ([ref.name for ref in refs], problems) == ([EXACT_NAME], [])


def test_a_function_that_is_not_found_may_be_in_the_file_that_cannot_be_read(repo: Path) -> None:
    write(repo, "reward_fn/broken.py", "def gone(:\n")
    with pytest.raises(FunctionError, match=r"(?s)reward_fn/broken\.py:1.*no discovered function"):
        find_functions(["gone"], find_repository("mcp", repo), repo)


def test_a_results_file_is_checked_without_a_trace(tmp_path: Path) -> None:
    assert check_output(None, tmp_path) is None
    assert check_output("results.json", tmp_path) == tmp_path / "results.json"
    assert list(tmp_path.iterdir()) == []
    before = write(tmp_path, "results.json", "from before")
    assert check_output(str(before), tmp_path / "elsewhere") == before
    assert before.read_text(encoding="utf-8") == "from before"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("folder/", "-o folder/ is a folder; name a file in it, for example folder/results.json"),
        ("gone/results.json", "the folder .*gone doesn't exist; create it first"),
        ("folder/file/results.json", "the folder .*file doesn't exist"),
        (f"{'x' * 300}.json", "can't be written: File name too long"),
    ],
)
def test_a_results_file_that_cannot_be_written_is_refused(tmp_path: Path, path: str, message: str) -> None:
    write(tmp_path, "folder/file")
    with pytest.raises(UsageError, match=message):
        check_output(path, tmp_path)


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="permissions don't bind this user")
def test_a_results_file_without_permission_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "results.json").chmod(0o400)
    with pytest.raises(UsageError, match=r"-o results\.json can't be written: Permission denied"):
        check_output("results.json", tmp_path)


@pytest.fixture
def rubrics(repo: Path) -> list[FunctionRef]:
    """A rubric of a file and a rubric function."""
    write(repo, "rubric_configs.yaml", RUBRICS)
    write(repo, "reward_rubric/manners.py", POLITE)
    refs, problems = resolve_rubrics(["short", "polite"], find_repository("mcp", repo), repo)
    assert problems == []
    return refs


def test_a_judge_needs_its_key(rubrics: list[FunctionRef]) -> None:
    check_judges(rubrics, {"KEY_OF_THE_JUDGE": "key"}, priced=False)
    with pytest.raises(ModelStartError, match=r"(?s)rubric rubric_configs\.yaml#short: .*export KEY_OF_THE_JUDGE="):
        check_judges(rubrics, {}, priced=False)


def test_the_judge_of_a_function_is_known_only_if_all_calls_go_to_one(rubrics: list[FunctionRef]) -> None:
    function = rubrics[1:]
    check_judges(function, {}, priced=False)
    redirected = {"OSMOSIS_JUDGE_MODEL": "openai/a-judge"}
    with pytest.raises(ModelStartError, match=r"(?s)rubric reward_rubric.manners:polite: .*OPENAI_API_KEY"):
        check_judges(function, redirected, priced=False)
    check_judges(rubrics, {**redirected, "OSMOSIS_JUDGE_BASE_URL": "http://judge/v1"}, priced=False)


def test_an_address_that_is_none_is_refused(rubrics: list[FunctionRef]) -> None:
    with pytest.raises(ModelStartError, match="the judges' base URL is not an address"):
        check_judges(rubrics, {"OSMOSIS_JUDGE_BASE_URL": "localhost:1234"}, priced=False)


def test_a_rubric_that_went_away_since_it_was_found_is_refused(repo: Path, rubrics: list[FunctionRef]) -> None:
    (repo / "rubric_configs.yaml").unlink()
    with pytest.raises(ModelStartError, match=r"rubric_configs\.yaml"):
        check_judges(rubrics, {}, priced=False)


def test_reward_functions_have_no_judge(repo: Path) -> None:
    check_judges(prepared(repo).plan.functions, {}, priced=True)
