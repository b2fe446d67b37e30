"""From what the user asked for to a plan that can run: every input is checked here, before any model is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osmosis_ai.data.dataset import Dataset, open_dataset
from osmosis_ai.data.formats import suffixes
from osmosis_ai.discovery.agents import AgentSource, resolve_agent
from osmosis_ai.discovery.repository import McpSource, Repository, find_repository, parse_mcp_source
from osmosis_ai.discovery.rubrics import resolve_rubrics
from osmosis_ai.discovery.scan import Problem, discovered_refs, resolve_function, scan_functions
from osmosis_ai.errors import FunctionError, UsageError
from osmosis_ai.models.choice import ModelChoice, choose_model
from osmosis_ai.records import FunctionRef, Record
from osmosis_ai.runtime.protocol import Limits, WorkerSpec
from osmosis_ai.runtime.run.run import BASELINE, POLICY, RunPlan
from osmosis_ai.store.schema import database_path

__all__ = ["Prepared", "RunRequest", "find_agent", "prepare"]


class RunRequest(Record, frozen=True):
    """What the user asked for, option by option, unchecked. Times in seconds."""

    command: str
    mcp: str | None = None
    agent: str | None = None
    allow_rewrites: bool = False
    dataset: str | None = None
    model: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    baseline_model: str | None = None
    baseline_base_url: str | None = None
    baseline_api_key: str | None = None
    params: dict[str, Any] = {}
    eval_fns: list[str] = []
    rubrics: list[str] = []
    limits: Limits = Limits()
    limit: int | None = None
    offset: int = 0
    n: int = 1
    batch_size: int = 8
    pass_threshold: float = 1.0
    max_cost: float | None = None
    score_partial: bool = False
    cache: bool = False


class Prepared(Record, frozen=True):
    """A request that can run. `plan.total_rows` is 0 until `with_rows` has counted the dataset."""

    plan: RunPlan
    worker: WorkerSpec
    banners: list[str]
    problems: list[Problem]


def prepare(request: RunRequest, cwd: Path, environ: Mapping[str, str]) -> Prepared:
    """Resolve a request: the repository, its functions, the dataset's file and the models.

    Nothing is imported, no row is read and no connection is opened.

    Args:
        request: What the user asked for.
        cwd: The working directory that paths are relative to.
        environ: Environment variables, `.env` included.

    Raises:
        StartError: Something asked for doesn't exist or can't be used.
    """
    agent, repository = find_agent(request.mcp, request.agent, cwd)
    dataset = find_dataset(request.dataset, repository, cwd)
    functions, problems = find_functions(request.eval_fns, repository, cwd)
    functions = [*functions, *resolve_rubrics(request.rubrics, repository, cwd)]
    own = agent if isinstance(agent, AgentSource) else None
    # An agent loop may give its rollouts rewards of its own.
    if request.command == "eval" and not functions and own is None:
        for problem in problems:
            raise FunctionError(str(problem))
        raise UsageError(
            f"nothing to score with: no @osmosis_reward function in {repository.root / 'reward_fn'}; "
            "write one, or name a function with --eval-fn MODULE:FUNCTION"
        )
    choices = _choose_models(request, environ)
    plan = RunPlan(
        command=request.command,
        root=str(repository.root),
        dataset=str(dataset.path),
        total_rows=0,
        policies={policy: choice.spec for policy, choice in choices.items()},
        functions=functions,
        limits=request.limits,
        agent=None if own is None else own.name,
        agent_dir=None if repository.mcp_dir is None else str(repository.mcp_dir),
        offset=request.offset,
        limit=request.limit,
        n=request.n,
        batch_size=request.batch_size,
        pass_threshold=request.pass_threshold,
        max_cost=request.max_cost,
        score_partial=request.score_partial,
    )
    worker = WorkerSpec(
        root=plan.root,
        limits=plan.limits,
        mcp=None if isinstance(agent, AgentSource) else agent,
        agent=own,
        allow_rewrites=request.allow_rewrites,
        debug_dir=environ.get("ROLLOUT_DEBUG_DIR") or None,
        policies=plan.policies,
        functions=functions,
        # Rubrics score only when they are asked for.
        required=frozenset(ref.name for ref in functions if request.eval_fns or ref.kind == "rubric"),
        batch_size=plan.batch_size,
        store=str(database_path(repository.root)),
        cache=_find_cache(repository) if request.cache else None,
    )
    banners = list(dict.fromkeys(choice.banner for choice in choices.values() if choice.banner))
    return Prepared(plan, worker, banners, problems)


def find_agent(mcp: str | None, agent: str | None, cwd: Path) -> tuple[McpSource | AgentSource, Repository]:
    """The agent loop or the MCP source asked for, `./mcp` by default, and the repository it belongs to.

    A loop's repository is the working directory, and its `mcp_dir` the folder of the loop's package, if it has one.
    """
    if agent is not None:
        if mcp is not None:
            raise UsageError("-m and --mcp name an agent each: an agent loop brings its own tools; give one of them")
        repository = find_repository(None, cwd)
        source = resolve_agent(agent, repository.root)
        # The tools in mcp/, if there are any, are no part of this agent.
        folder = None if source.folder is None else repository.root / source.folder
        return source, dataclasses.replace(repository, mcp_dir=folder)
    if mcp is None and not (cwd / "mcp").is_dir():
        raise UsageError(
            f"no agent: there is no mcp folder in {cwd}; run from the repository's root, "
            "or name its tools with --mcp DIR (a folder with main.py, a URL or an mcp.json file), "
            "or an agent loop with -m MODULE:ATTRIBUTE"
        )
    return parse_mcp_source(mcp or "mcp", cwd), find_repository(mcp or "mcp", cwd)


def find_dataset(path: str | None, repository: Repository, cwd: Path) -> Dataset:
    """The dataset asked for, else `test_data.jsonl` in the working directory or the repository."""
    if path is not None:
        return open_dataset(cwd / Path(path).expanduser())
    for folder in (cwd, repository.root):
        if (folder / "test_data.jsonl").is_file():
            return open_dataset(folder / "test_data.jsonl")
    raise UsageError(f"no dataset: there is no test_data.jsonl in {cwd}; name a {suffixes(' or ')} file with -d FILE")


def find_functions(specs: list[str], repository: Repository, cwd: Path) -> tuple[list[FunctionRef], list[Problem]]:
    """The functions named, else every discovered reward function; and what could not be read while looking."""
    discovered, problems = discovered_refs(repository)
    if not specs:
        return discovered, problems
    components = []
    if repository.reward_dir is not None:
        components = list(scan_functions(repository.reward_dir, repository.root, "reward").components)
    try:
        refs = [resolve_function(spec, components, repository.root, cwd) for spec in specs]
    except FunctionError as error:
        if not problems:
            raise
        # What could not be read may be just what was asked for.
        raise FunctionError(f"{problems[0]}\n{error}") from error
    return list({ref.name: ref for ref in refs}.values()), problems


def check_output(path: str | None, cwd: Path) -> Path | None:
    """The results file, known to be writable, so that no run ends without a place for its results.

    Raises:
        UsageError: It can't be written.
    """
    if path is None:
        return None
    file = cwd / Path(path).expanduser()
    if file.is_dir():
        raise UsageError(f"-o {path} is a folder; name a file in it, for example {path.rstrip('/')}/results.json")
    if not file.parent.is_dir():
        raise UsageError(f"-o {path}: the folder {file.parent} doesn't exist; create it first")
    existed = file.exists()
    try:
        # Opening it is the only sure test: permissions say nothing about a read-only or special file system.
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"-o {path} can't be written: {error.strerror or error}") from None
    return file


def _find_cache(repository: Repository) -> str:
    from osmosis_ai.models.cache import prepare_cache

    return str(prepare_cache(repository.root))


def _choose_models(request: RunRequest, environ: Mapping[str, str]) -> dict[str, ModelChoice]:
    def choose(model: str | None, base_url: str | None, api_key: str | None) -> ModelChoice:
        return choose_model(
            model=model,
            base_url=base_url,
            api_key=api_key,
            params=request.params,
            request_timeout=request.limits.request_timeout,
            environ=environ,
        )

    choices = {POLICY: choose(request.model, request.base_url, request.api_key)}
    if request.baseline_model is not None:
        choices[BASELINE] = choose(request.baseline_model, request.baseline_base_url, request.baseline_api_key)
    elif request.baseline_base_url or request.baseline_api_key:
        raise UsageError("--baseline-base-url and --baseline-api-key go with --baseline-model; name the model too")
    return choices
