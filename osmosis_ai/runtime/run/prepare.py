"""Turn a config into a plan that can run, and check every input before any model call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from osmosis_ai.config import AgentConfig, LimitsConfig, RunConfig, StoreConfig, WorkersConfig
from osmosis_ai.data.dataset import Dataset, open_dataset
from osmosis_ai.data.formats import suffixes
from osmosis_ai.discovery.agents import AgentSource, resolve_agent
from osmosis_ai.discovery.repository import (
    McpSource,
    Repository,
    find_repository,
    parse_mcp_source,
    repository_at,
    root_above,
)
from osmosis_ai.discovery.scan import discovered_refs, find_module, resolve_function, scan_functions
from osmosis_ai.discovery.workflows import WorkflowSource, resolve_workflow, workflow_root
from osmosis_ai.errors import DatasetError, FunctionError, MissingAPIKeyError, ModelStartError, UsageError
from osmosis_ai.folders import given_path, store_folder
from osmosis_ai.mcp_tools.host import read_config
from osmosis_ai.models.choice import choose_model
from osmosis_ai.models.replay import recorded_model, replay_of
from osmosis_ai.records import CassetteSpec, Failure, FunctionRef, ModelSpec, Record
from osmosis_ai.reward_fn.expected import EXPECTED, expected_ref, expects_tools
from osmosis_ai.reward_rubric.configs import load_rubric
from osmosis_ai.reward_rubric.resolve import resolve_rubrics
from osmosis_ai.reward_rubric.target import DEFAULT_MODEL, DEFAULT_PROVIDER, current_redirect, find_target
from osmosis_ai.runtime.bubblewrap import SandboxSpec, find_bwrap, hidden_paths
from osmosis_ai.runtime.protocol import WorkerSpec
from osmosis_ai.runtime.run.plan import BASELINE, POLICY, RunPlan

__all__ = [
    "Prepared",
    "check_cluster",
    "check_judges",
    "check_output",
    "choose_sandbox",
    "find_agent",
    "find_dataset",
    "find_functions",
    "find_root",
    "find_runner",
    "find_store",
    "prepare",
    "scorer_spec",
]


ROWS_LOOKED_AT = 100
"""Rows in which to look for expected tools, so that a large dataset needn't be read twice."""


class Prepared(Record, frozen=True):
    """A run that can start: its plan, its workers' spec, and the files left out of scoring (`--keep-going`)."""

    plan: RunPlan
    worker: WorkerSpec
    left_out: list[Failure]


def prepare(config: RunConfig, cwd: Path, environ: Mapping[str, str], cassette: CassetteSpec | None = None) -> Prepared:
    """Resolve a config: the repository, its functions, the dataset's file and the models.

    Imports no user code, reads no row and opens no connection. `environ` includes the variables of `.env`; `cassette`
    records or replays the models' replies, instead of the reply cache. Raises StartError if something named by the
    config doesn't exist or can't be used.
    """
    agent, repository = find_runner(config, cwd)
    own = None if isinstance(agent, McpSource) else agent
    entrypoint = None
    if isinstance(agent, WorkflowSource):
        entrypoint = Path(agent.entrypoint).relative_to(repository.root.resolve()).as_posix()
    _check_conflicts(config)
    check_cluster(config.workers)
    _check_replies(config)
    dataset = find_dataset(config.data.dataset, repository, cwd)
    rewards, unreadable = find_functions(config.scoring.eval_fn, repository, cwd)
    if not config.scoring.eval_fn and _expects_tools(dataset):
        rewards.append(expected_ref(str(repository.root)))
    rubrics, unusable = resolve_rubrics(config.scoring.rubric, repository, cwd)
    functions, left_out = [*rewards, *rubrics], [*unreadable, *unusable]
    # An agent loop or a grader may set its rollouts' rewards itself.
    unscored = config.command == "eval" and not functions and own is None
    if left_out and (unscored or not config.scoring.keep_going):
        raise FunctionError.of_all((failure.message for failure in left_out), others=bool(functions))
    if unscored:
        raise UsageError(
            f"nothing to score with: no @osmosis_reward function in {repository.root / 'reward_fn'}; "
            "write one, or name a function with --eval-fn MODULE:FUNCTION"
        )
    store = find_store(config.store, repository.root, cwd)
    sandbox = None
    if config.workers.sandbox_network and config.workers.isolation != "sandbox":
        raise UsageError("--sandbox-network needs --isolation sandbox; elsewhere code may use the network anyway")
    if config.workers.isolation == "sandbox":
        _check_sandboxed(agent)
        hidden = [Path(dataset.path), store]
        sandbox = choose_sandbox(config.workers, functions, repository.root, hidden)
    plan = RunPlan(
        config=config,
        root=str(repository.root),
        store=str(store),
        dataset=str(dataset.path),
        policies=_choose_models(config, cwd, environ, cassette),
        functions=functions,
        agent=None if own is None else own.name,
        agent_dir=None if repository.mcp_dir is None else str(repository.mcp_dir),
        entrypoint=entrypoint,
    )
    worker = WorkerSpec(
        str(repository.root),
        config.limits,
        mcp=agent if isinstance(agent, McpSource) else _tools_beside(agent, repository.root),
        agent=agent if isinstance(agent, AgentSource) else None,
        workflow=agent if isinstance(agent, WorkflowSource) else None,
        batch_size=config.workers.batch_size,
        allow_rewrites=config.agent.allow_rewrites,
        debug_dir=environ.get("ROLLOUT_DEBUG_DIR") or None,
        policies=plan.policies,
        functions=functions,
        keep_going=config.scoring.keep_going,
        cache=_find_cache(store) if config.model.cache and cassette is None else None,
        cassette=cassette,
        sandbox=sandbox,
    )
    return Prepared(plan, worker, left_out)


def scorer_spec(
    root: Path, functions: list[FunctionRef], limits: LimitsConfig, *, keep_going: bool = False
) -> WorkerSpec:
    """Make the spec of a worker that only scores; `limits.reward_timeout` bounds each score.

    Loading fails if any function can't be loaded; with `keep_going`, such functions are left out.
    """
    return WorkerSpec(root=str(root), limits=limits, functions=functions, keep_going=keep_going)


def find_root(mcp: str | None, module: str | None, rollout: str | None, cwd: Path) -> Path:
    """Return the root of the agent's repository; raise UsageError if the agent doesn't exist.

    An agent loop's module may be in the working directory itself, or in the root of the repository above it.
    """
    if rollout is not None:
        return workflow_root(rollout, cwd)
    if module is None:
        return find_repository(mcp, cwd).root
    return cwd if find_module(module.partition(":")[0].strip(), cwd) is not None else root_above(cwd)


def find_runner(config: RunConfig, cwd: Path) -> tuple[McpSource | AgentSource | WorkflowSource, Repository]:
    """Return what runs a config's rollouts, and its repository: the rollout server if it names one, else its agent.

    A rollout server leaves artifacts beside the run store. Its folder is the repository's `mcp_dir`.
    """
    rollout, sdk = config.workflow.rollout, config.workflow.sdk
    if rollout is None:
        for flag, given in (("--sdk", sdk != "declared"), ("--rollout-env", config.workflow.rollout_env)):
            if given:
                raise UsageError(f"{flag} is for rollout servers; name one with --rollout")
        return find_agent(config.agent, cwd)
    if config.agent.mcp is not None or config.agent.module is not None:
        raise UsageError("--rollout names what runs the rollouts, and so does -m or --mcp; use one of them")
    root = workflow_root(rollout, cwd)
    artifacts = find_store(config.store, root, cwd) / "artifacts"
    env = config.workflow.rollout_env
    workflow = resolve_workflow(rollout, cwd, artifacts.absolute(), own_sdk=sdk == "own", env=env)
    return workflow, dataclasses.replace(repository_at(root), mcp_dir=Path(workflow.folder))


def find_agent(config: AgentConfig, cwd: Path) -> tuple[McpSource | AgentSource, Repository]:
    """Return the config's agent loop or MCP source, by default the repository's `mcp` folder, and its repository.

    Without that folder, the agent has no tools. A loop's `mcp_dir` is the folder of the loop's package, if any.
    """
    mcp, module = config.mcp, config.module
    if module is not None:
        if mcp is not None:
            raise UsageError("-m and --mcp each name an agent, and an agent loop brings its own tools; use one of them")
        repository = repository_at(find_root(mcp, module, None, cwd))
        source = resolve_agent(module, repository.root)
        # Tools in mcp/, if any, don't belong to this agent.
        folder = None if source.folder is None else repository.root / source.folder
        return source, dataclasses.replace(repository, mcp_dir=folder)
    repository = find_repository(mcp, cwd)
    if mcp is not None:
        return parse_mcp_source(mcp, cwd), repository
    if repository.mcp_dir is not None:
        return parse_mcp_source("mcp", repository.root), repository
    if repository == Repository(repository.root):
        raise UsageError(
            f"no agent: there is no mcp folder in {cwd} or above it, and no other part of a repository (reward_fn, "
            "reward_rubric, test_data.jsonl); name its tools with --mcp DIR (a folder with main.py, a URL or an "
            "mcp.json file), or an agent loop with -m MODULE:ATTRIBUTE; `osmosis init DIR` writes a repository to "
            "start from"
        )
    return McpSource("none"), repository


def find_store(config: StoreConfig, root: Path, cwd: Path) -> Path:
    """Return the folder for a repository's runs, logs and stored replies."""
    return store_folder(root, None if config.folder is None else given_path(config.folder, cwd))


def find_dataset(path: str | None, repository: Repository, cwd: Path) -> Dataset:
    """Open the named dataset, else `test_data.jsonl` in the working directory or the repository."""
    if path is not None:
        return open_dataset(given_path(path, cwd))
    for folder in (cwd, repository.root):
        if (folder / "test_data.jsonl").is_file():
            return open_dataset(folder / "test_data.jsonl")
    raise UsageError(
        f"no dataset: there is no test_data.jsonl in {repository.root}; name a {suffixes(' or ')} file with -d FILE"
    )


def _expects_tools(dataset: Dataset) -> bool:
    """Return True if one of the first rows says which tools it expects; a row with a problem is reported later."""
    try:
        return any(expects_tools(row.extra) for row in dataset.rows(limit=ROWS_LOOKED_AT))
    except DatasetError:
        return False


def find_functions(specs: list[str], repository: Repository, cwd: Path) -> tuple[list[FunctionRef], list[Failure]]:
    """Return the named functions; else every discovered reward function, and the files that could not be read."""
    discovered, problems = discovered_refs(repository)
    if not specs:
        return discovered, [problem.as_failure("reward") for problem in problems]
    components = []
    if repository.reward_dir is not None:
        components = list(scan_functions(repository.reward_dir, repository.root, "reward").components)
    try:
        refs = [
            expected_ref(str(repository.root))
            if spec == EXPECTED
            else resolve_function(spec, components, repository.root, cwd)
            for spec in specs
        ]
    except FunctionError as error:
        if not problems:
            raise
        # The function may be in an unreadable file, so report that too.
        raise FunctionError(f"{problems[0]}\n{error}") from error
    # Other functions' files don't matter.
    return list({ref.name: ref for ref in refs}.values()), []


def check_output(path: str | None, cwd: Path) -> Path | None:
    """Check that the results file is writable, before the run rather than after it; raise UsageError."""
    if path is None:
        return None
    file = given_path(path, cwd)
    try:
        if file.is_dir():
            raise UsageError(f"-o {path} is a folder; name a file in it, for example {path.rstrip('/')}/results.json")
        if not file.parent.is_dir():
            raise UsageError(f"-o {path}: the folder {file.parent} doesn't exist; create it first")
        existed = file.exists()
        # Test by opening it, because permissions say nothing about a read-only or special file system.
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"-o {path} can't be written: {error.strerror or error}") from None
    return file


def _tools_beside(agent: AgentSource | WorkflowSource, root: Path) -> McpSource | None:
    """Return the repository's tools, if the agent can call them: a workflow on our own SDK."""
    own_sdk = isinstance(agent, WorkflowSource) and agent.own_sdk
    return parse_mcp_source("mcp", root) if own_sdk and (root / "mcp" / "main.py").is_file() else None


def _check_conflicts(config: RunConfig) -> None:
    """Raise UsageError for options that conflict with each other."""
    resume, data = config.resume, config.data
    if resume.fresh and resume.wanted:
        raise UsageError("--fresh starts anew, and --resume, --resume-run, --retry-failed and --regrade continue a run")
    if resume.regrade and config.workflow.rollout is None:
        raise UsageError("--regrade is for rollout servers; `osmosis runs rescore` scores with reward functions")
    if resume.regrade and resume.retry_failed:
        raise UsageError("--regrade calls no model, and --retry-failed runs rollouts again; use one of them")
    if data.rows is not None and (data.offset or data.limit is not None):
        raise UsageError("--rows names the rows; leave out --limit and --offset")


def check_cluster(workers: WorkersConfig) -> None:
    """Raise UsageError for cluster options without a cluster, and for options that need workers on this machine."""
    if workers.cluster is None:
        for flag, given in (("--nodes", workers.nodes), ("--workers-per-node", workers.workers_per_node)):
            if given is not None:
                raise UsageError(f"{flag} is for the nodes of a cluster; name one with --cluster")
        return
    if workers.workers == 0:
        raise UsageError("--cluster and --workers 0 don't go together: the second runs everything in this process")
    if workers.isolation == "sandbox":
        raise UsageError("--cluster and --isolation sandbox don't go together: sandboxes hide what is on this machine")


def _check_replies(config: RunConfig) -> None:
    """Raise UsageError for stored replies that can't be used, on nodes or for a policy called with tokens."""
    model = config.model
    for flag, used in (("--cache", model.cache), ("--record", model.record), ("--replay", model.replay)):
        if used and model.tokenizer is not None:
            raise UsageError(f"--tokenizer and {flag} don't go together: a stored reply has no tokens to go on with")
        if used and config.workers.cluster is not None:
            raise UsageError(f"--cluster and {flag} don't go together: stored replies are files of this machine")


def _check_sandboxed(agent: McpSource | AgentSource | WorkflowSource) -> None:
    """Raise UsageError for an agent whose code can't be in a sandbox."""
    why = "--isolation sandbox"
    if isinstance(agent, WorkflowSource):
        raise UsageError(f"{why} is for the tools of the built-in loop; a rollout server can't be in a sandbox")
    if isinstance(agent, AgentSource):
        raise UsageError(
            f"{why} is for the tools of the built-in loop; the agent loop of -m calls the model itself, so it runs in "
            "the process that holds the key"
        )
    servers = read_config(Path(agent.path or ""))["mcpServers"].values() if agent.kind == "config" else ()
    if any("command" in server for server in servers):
        raise UsageError(f"{why} can't hold servers that {agent.path} starts with a command; name a folder or a URL")


def choose_sandbox(
    workers: WorkersConfig, functions: Iterable[FunctionRef], root: Path, hidden: Iterable[Path]
) -> SandboxSpec:
    """Return the sandbox for tools and functions; `hidden` are the run's own files.

    Raises UsageError if there can't be one, or for a function that can't be in one.
    """
    why = "--isolation sandbox"
    if workers.workers == 0:
        raise UsageError(f"{why} needs worker processes, and --workers 0 has none; leave one of them out")
    judges = [ref.name for ref in functions if ref.kind == "rubric" and ref.module]
    if judges:
        raise UsageError(
            f"{why}: {', '.join(judges)} would need the judge's key in the sandbox; write the rubric into a file, or "
            "score with it afterwards: osmosis eval-rubric"
        )
    return SandboxSpec(find_bwrap(), workers.sandbox_network, hidden_paths(root, [*hidden, *root.glob("*/.env*")]))


def check_judges(functions: Iterable[FunctionRef], environ: Mapping[str, str], *, priced: bool) -> None:
    """Check that all known judges have keys and, with `priced`, known prices; raise ModelStartError.

    It opens no connection; with `priced`, it imports LiteLLM. The judge of an `@osmosis_rubric` function is known only
    if all judge calls are redirected to one model; otherwise, the call itself refuses an unpriced judge
    (`target.JUDGE_PRICED`).
    """
    from osmosis_ai.reward_rubric.target import has_price

    redirect = current_redirect(environ)
    for ref in functions:
        if ref.kind != "rubric":
            continue
        if ref.module and not (redirect and redirect.model):
            continue
        try:
            judge = find_target(_model_info(ref), environ)
        except (MissingAPIKeyError, ValueError) as error:
            raise ModelStartError(f"rubric {ref.name}: {error}") from None
        if priced and not has_price(judge):
            raise ModelStartError(
                f"no price is known for the judge {judge.name} of {ref.name}, so --max-cost can't be enforced; "
                "leave the option out"
            )


def _model_info(ref: FunctionRef) -> dict[str, Any]:
    if ref.module:
        # Any will do, because the calls are redirected.
        return {"provider": DEFAULT_PROVIDER, "model": DEFAULT_MODEL}
    try:
        return load_rubric(Path(ref.root, ref.file or ""), ref.attribute).model_info
    except UsageError as error:
        raise ModelStartError(str(error)) from None


def _find_cache(store: Path) -> str:
    from osmosis_ai.models.cache import prepare_cache

    return str(prepare_cache(store))


def _choose_models(
    config: RunConfig, cwd: Path, environ: Mapping[str, str], cassette: CassetteSpec | None
) -> dict[str, ModelSpec]:
    replayed = Path(cassette.path) if cassette is not None and cassette.mode == "replay" else None

    def choose(model: str | None, base_url: str | None, api_key: str | None, tokenizer: str | None = None) -> ModelSpec:
        timeout = config.limits.request_timeout
        if replayed is not None and base_url is None:
            model = recorded_model(replayed, model or environ.get("OSMOSIS_MODEL"))
            api_key = None
        spec = choose_model(
            model=model,
            base_url=base_url,
            api_key=api_key,
            params=config.model.sampling,
            request_timeout=timeout,
            tokenizer=tokenizer,
            environ=environ,
        )
        return spec if replayed is None else replay_of(spec, model, replayed)

    policy, baseline = config.model, config.baseline
    tokenizer = None if policy.tokenizer is None else str(given_path(policy.tokenizer, cwd))
    choices = {POLICY: choose(policy.model, policy.base_url, policy.api_key, tokenizer)}
    if baseline.model is not None:
        choices[BASELINE] = choose(baseline.model, baseline.base_url, baseline.api_key)
    elif baseline.base_url or baseline.api_key:
        raise UsageError("--baseline-base-url and --baseline-api-key need --baseline-model; name the model too")
    return choices
