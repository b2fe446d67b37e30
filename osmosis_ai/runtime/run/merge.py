"""Merge the shards of a run (`--shard`) into one run: find them, check that they belong together, and join them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.config import RunConfig
from osmosis_ai.errors import StartError
from osmosis_ai.folders import OWN_FOLDER
from osmosis_ai.options import declared_options
from osmosis_ai.records import JsonObject, Outcome
from osmosis_ai.runtime.run.report import summary_of
from osmosis_ai.runtime.run.resume import described_changes
from osmosis_ai.shards import Shard
from osmosis_ai.store.queries import Queries, RunInfo
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.store.schema import database_path, open_writer
from osmosis_ai.store.transfer import pushed_runs, unpacked

__all__ = ["Merged", "ShardRun", "found_shards", "merge_shards"]

ALL = 2**31


class ShardRun(NamedTuple):
    """A stored run of a shard. `place` is the place that the user named, `store` the database that holds it."""

    place: str
    store: Path
    info: RunInfo
    shard: Shard

    def __str__(self) -> str:
        return f"run {self.info.id} (shard {self.shard}, in {self.place})"


class Merged(NamedTuple):
    """The merged run; `new` is False if the shards were merged before."""

    run: RunInfo
    shards: list[ShardRun]
    new: bool


@contextmanager
def found_shards(places: Sequence[tuple[str, Path]], folder: Path, name: str | None = None) -> Iterator[list[ShardRun]]:
    """Find the shards' runs in stores, repositories, pushed files and folders of these, each given with its path.

    `name` restricts them to runs of this name. Copies of pushed files are in `folder` during the block. Raises
    StartError if a place has none, StoreError if it can't be read.
    """
    found: dict[str, ShardRun] = {}
    with ExitStack() as stack:
        for place, path in places:
            here = []
            for store in _stores(place, path):
                if store.is_file() and store.name == database_path(store.parent).name:
                    # A store of an older version gets the current tables.
                    open_writer(store).close()
                    runs = Queries(store).list_runs(ALL)
                else:
                    store, run = stack.enter_context(unpacked(store, folder))
                    runs = [run]
                here += [
                    ShardRun(place, store, run, Shard.of(run.identity["shard"]))
                    for run in runs
                    if run.identity.get("shard") and name in (None, run.config.get("name"))
                ]
            if not here:
                named = "" if name is None else f" with the name {name}"
                raise StartError(f"{place} has no run of a shard{named}; `osmosis eval --shard I/N` makes one")
            # The same run may be in a store and in a pushed file.
            for one in here:
                if one.info.id not in found or found[one.info.id].info.rollouts < one.info.rollouts:
                    found[one.info.id] = one
        yield sorted(found.values(), key=lambda one: (one.shard, one.info.id))


def _stores(place: str, path: Path) -> list[Path]:
    for folder in (path, path / OWN_FOLDER):
        if database_path(folder).is_file():
            return [database_path(folder)]
    found = pushed_runs(path)
    if not found:
        raise StartError(f"{place} is neither a store, nor a repository with one, nor a pushed run or a folder of them")
    return found


async def merge_shards(store: RunStore, shards: Sequence[ShardRun]) -> Merged:
    """Merge all shards of a run into one run, or return the run that they were merged into before.

    Raises StartError, which says what to do, if the shards don't belong together, or if one is missing, occurs twice or
    is still being written.
    """
    before = {run.id: run for run in store.list_runs(ALL) if run.config.get("merged")}
    merged = {shard: run for run in before.values() for shard in run.config["merged"]}
    new = [one for one in shards if one.info.id not in merged]
    if shards and not new:
        run = merged[shards[-1].info.id]
        its = [one for one in shards if one.info.id in run.config["merged"]]
        # A shard that was continued after the merge has rollouts that the merged run lacks.
        grown = [one for one in its if one.info.rollouts != run.config["merged"][one.info.id]]
        if grown:
            raise StartError(
                f"run {run.id} was merged before {grown[0]} was continued; remove it with `osmosis runs rm {run.id}`, "
                "and merge again"
            )
        return Merged(run, its, new=False)
    merged_in = sorted({merged[one.info.id].id for one in shards if one.info.id in merged})
    _check(new, merged_in)
    config = _merged_config(new)
    summary = _summary(new, config)
    run_id = await store.join_runs([(one.store, one.info) for one in new], config=config, summary=summary)
    return Merged(store.find_run(run_id), new, new=True)


def _check(shards: Sequence[ShardRun], merged_in: Sequence[str]) -> None:
    """Raise StartError unless these are all shards of one run, each once. Other shards were merged into `merged_in`."""
    first = shards[0]
    code: dict[str, tuple[ShardRun, list[str]]] = {}
    for one in shards:
        if one.info.alive:
            raise StartError(f"{one} is still being written; merge when it has ended")
        if one.info.command != first.info.command:
            raise _misfit(one, first, [f"it is a run of `osmosis {one.info.command}`"])
        before, now = _identity(first), _identity(one)
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if keys:
            raise _misfit(one, first, described_changes({key: (before.get(key), now.get(key)) for key in keys}))
        for total in Queries(one.store).function_totals(one.info.id):
            # A shard without rows has no scores to compare.
            other, hashes = code.setdefault(total.function, (one, total.code))
            if hashes != total.code:
                raise _misfit(one, other, [f"the code of {total.function} changed"])
    by_number: dict[int, ShardRun] = {}
    for one in shards:
        if one.shard.number in by_number:
            other = by_number[one.shard.number]
            raise StartError(
                f"shard {one.shard} is there twice: {other} and {one}; name only one of the stores, or remove a run "
                "with `osmosis runs rm RUN`"
            )
        by_number[one.shard.number] = one
    missing = [f"{number}/{first.shard.total}" for number in range(1, first.shard.total + 1) if number not in by_number]
    if missing:
        before_them = f" (others were merged in run {', '.join(merged_in)})" if merged_in else ""
        raise StartError(
            f"missing: shard {', '.join(missing)}{before_them}; run --shard {missing[0]}, and name its store too"
        )


def _misfit(one: ShardRun, other: ShardRun, changes: Iterable[str]) -> StartError:
    return StartError(
        f"can't merge {one} with {other}: {', '.join(changes)}; run all shards alike and name only their stores, or "
        "choose runs that were given a name with --name NAME"
    )


def _identity(one: ShardRun) -> JsonObject:
    """Return the values that must be equal to merge: those for resuming, those of scoring, and the number of shards."""
    config = one.info.config
    options = config.get("options", {})
    scoring = {
        option.name: options.get(option.name, option.default)
        for option in declared_options(RunConfig)
        if option.group == "scoring" and option.option.identity is None and option.name != "fail_under"
    }
    known = {"functions": config.get("functions"), "osmosis-ai": config.get("version")}
    return {**one.info.identity, **scoring, **known, "shard": f"…/{one.shard.total}"}


def _merged_config(shards: Sequence[ShardRun]) -> JsonObject:
    """Return the config of the unsharded run, with the ids of the shards that it was merged from."""
    first = shards[0].info.config
    names = {one.info.config.get("name") for one in shards}
    return {
        **first,
        "options": {name: value for name, value in first["options"].items() if name != "store"},
        "planned": sum(one.info.config["planned"] for one in shards),
        "name": names.pop() if len(names) == 1 else None,
        "merged": {one.info.id: one.info.rollouts for one in shards},
    }


def _summary(shards: Sequence[ShardRun], config: JsonObject) -> JsonObject:
    """Return the summary of the unsharded run, computed in the same way as at the end of a run."""
    scored = {name for one in shards for name in Queries(one.store).functions(one.info.id)}
    functions = [*sorted(scored - set(config["functions"])), *config["functions"]]
    rows = config["planned"] // (config["n"] * (1 if config["baseline_model"] is None else 2))
    return summary_of(config, rows, functions, _outcomes(shards))


def _outcomes(shards: Sequence[ShardRun]) -> Iterator[Outcome]:
    """Stream the rollouts of all shards in the order of the dataset."""
    streams = [Queries(one.store).outcomes(one.info.id) for one in shards]
    return heapq.merge(*streams, key=lambda outcome: (outcome.row_index, outcome.run_index, outcome.policy))
