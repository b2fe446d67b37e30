"""Identify runs, and find the stored run to resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from osmosis_ai import __version__
from osmosis_ai.code_hashes import combined_hash, python_files
from osmosis_ai.config import ResumeConfig, RunConfig
from osmosis_ai.errors import StartError, StoreError
from osmosis_ai.options import declared_options, option_values, stored_options
from osmosis_ai.records import JsonObject, JsonValue
from osmosis_ai.runtime.protocol import Ready
from osmosis_ai.runtime.run.plan import BASELINE, POLICY, RunPlan
from osmosis_ai.store.queries import RunInfo
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.text import cut, json_text

__all__ = ["described_changes", "find_named", "find_resumable", "run_config", "run_identity"]

RECENT_RUNS = 200
VALUE_CHARACTERS = 80
CODE = "tool code"

_IN_WORDS = {
    "dataset": "the dataset's content changed",
    CODE: "the tools' code changed",
    "interactive": "it was stepped through with --interactive",
}
"""Differences in parts of an identity that aren't options."""


def run_identity(plan: RunPlan, dataset_sha256: str, tool_sources: dict[str, str]) -> dict[str, Any]:
    """Return everything that must be equal to resume a run; messages name the keys that differ.

    Options with an `identity` are compared. `tool_sources` maps the tools' files in the repository to the hash of their
    content.
    """
    policy, baseline = plan.policies[POLICY], plan.policies.get(BASELINE)
    # Resolved values, for options that depend on more than their own value.
    resolved: dict[str, Any] = {
        "dataset": dataset_sha256,
        "module": plan.agent,
        "rollout": plan.entrypoint,
        "model": policy.name,
        "base_url": policy.base_url,
        "param": policy.params,
        # The policy's params include these two.
        "temperature": None,
        "max_tokens": None,
        "baseline_model": baseline and baseline.name,
        "baseline_base_url": baseline and baseline.base_url,
    }
    identity: dict[str, Any] = {}
    for option, value in option_values(plan.config):
        # Several options may share an identity, such as `parameters`.
        if option.option.identity is not None:
            identity.setdefault(option.option.identity, {})[option.name] = resolved.get(option.name, value)
    identity = {name: next(iter(parts.values())) if len(parts) == 1 else parts for name, parts in identity.items()}
    # Merged runs have none.
    if identity["shard"] is None:
        del identity["shard"]
    # In a sandbox, a tool can do less; the other isolations don't change what it does.
    if plan.config.workers.isolation == "sandbox":
        identity["sandbox"] = "with network" if plan.config.workers.sandbox_network else "without network"
    return {**identity, CODE: combined_hash(_all_tool_sources(plan, tool_sources))}


def _completed(stored: JsonObject, identity: Mapping[str, Any]) -> JsonObject:
    """Add the options of an identity that the version which stored another one didn't have, with their defaults."""
    completed = dict(stored)
    options = [option for option in declared_options(RunConfig) if option.option.identity in identity]
    shared = Counter(option.option.identity for option in options)
    for option in options:
        name = str(option.option.identity)
        if shared[name] == 1:
            completed.setdefault(name, option.default)
        elif isinstance(parts := completed.get(name, {}), dict):
            completed[name] = {option.name: option.default, **parts}
    return completed


def _all_tool_sources(plan: RunPlan, imported: dict[str, str]) -> dict[str, str]:
    """Return the imported files, and every module in the agent's folder, because a function may import one later."""
    if plan.agent_dir is None:
        return imported
    return imported | python_files(Path(plan.agent_dir), Path(plan.root))


def run_config(plan: RunPlan, loaded: Ready) -> dict[str, Any]:
    """Return the data of a run that lists, exports and comparisons show."""
    policy = plan.policies[POLICY]
    return {
        "version": __version__,
        "dataset": plan.dataset,
        "model": policy.name,
        "base_url": policy.base_url,
        "stand_in": policy.stand_in,
        "params": policy.params,
        "baseline_model": plan.policies[BASELINE].name if BASELINE in plan.policies else None,
        "n": plan.config.scoring.n,
        "batch_size": plan.config.workers.batch_size,
        "pass_threshold": plan.config.scoring.pass_threshold,
        "planned": plan.total_rollouts,
        "functions": loaded.functions,
        "tools": loaded.tools,
        "agent": plan.agent,
        "name": plan.config.resume.name,
        "options": stored_options(plan.config),
    }


def find_named(store: RunStore, command: str, resume: ResumeConfig, shard: str | None = None) -> str | None:
    """Return the run to continue by its name or id; None if there is none, or any will do. Raises StartError.

    The shards of a run may all have its name.
    """
    if resume.name is None or resume.resume_run is not None:
        return resume.resume_run
    found = store.named_run(resume.name, command, shard)
    if found is None and (resume.resume or resume.regrade):
        raise StartError(f"there is no run of `osmosis {command}` with the name {resume.name}")
    return None if resume.fresh else found


def find_resumable(
    store: RunStore,
    command: str,
    identity: Mapping[str, Any],
    name: str | None,
    *,
    finished: bool,
    other_code: bool = False,
) -> str:
    """Find the run to resume: the named one, or the latest; with `finished`, it may be a finished run.

    Raises StartError if there is none, or its identity differs, except for the code with `other_code`; the message
    names the differences.
    """

    def differences(run: RunInfo) -> dict[str, tuple[Any, Any]]:
        found = store.differences(replace(run, identity=_completed(run.identity, identity)), identity)
        return {key: values for key, values in found.items() if not (other_code and key == CODE)}

    try:
        if name is not None:
            run = store.find_run(name)
            if run.command != command:
                raise StartError(f"run {run.id} is a run of `osmosis {run.command}`: resume it with that command")
            candidates = [run]
        elif finished:
            candidates = [run for run in store.list_runs(RECENT_RUNS) if run.command == command and not run.alive]
        else:
            candidates = store.unfinished_runs(command)
    except StoreError as error:
        raise StartError(str(error)) from error
    # The latest run that matches, even if a newer one doesn't.
    for run in candidates:
        if not differences(run):
            return run.id
    if not candidates:
        kind = "" if finished else "unfinished "
        raise StartError(f"there is no {kind}run of `osmosis {command}` to continue; start a new one")
    changes = ", ".join(described_changes(differences(candidates[0])))
    advice = f"use the same as that run, or start a new one{_fresh(candidates[0])}"
    raise StartError(f"can't resume run {candidates[0].id}: {changes}; {advice}")


def _fresh(run: RunInfo) -> str:
    return " with --fresh" if run.config.get("name") else ""


def described_changes(differences: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """Describe each difference of identities: the option, and its values before and now."""
    options = declared_options(RunConfig)
    flags = {option.name: option.flag for option in options}
    alone = {option.option.identity or option.name: option.flag for option in options}
    for name, (before, now) in differences.items():
        if name in _IN_WORDS:
            yield _IN_WORDS[name]
        elif isinstance(before, dict) and isinstance(now, dict):
            for part in sorted(before.keys() | now.keys()):
                if part == "param":
                    yield from _parameter_changes(before.get(part) or {}, now.get(part) or {}, flags)
                elif before.get(part) != now.get(part):
                    yield _change(flags.get(part, part), before.get(part), now.get(part))
        else:
            yield _change(alone.get(name, name), before, now)


def _parameter_changes(before: JsonObject, now: JsonObject, flags: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield _change(flags.get(name, f"--param {name}"), before.get(name), now.get(name))


def _change(name: str, before: JsonValue, now: JsonValue) -> str:
    return f"{name} changed ({_shown(before)} → {_shown(now)})"


def _shown(value: JsonValue) -> str:
    if value is None:
        return "not set"
    return cut(value if isinstance(value, str) else json_text(value), VALUE_CHARACTERS)
