"""A row's page: the conversation of one of its attempts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
from msgspec.structs import replace

from osmosis_ai.conversation import steps
from osmosis_ai.errors import StoreError
from osmosis_ai.records import Outcome, Rollout, Verdict
from osmosis_ai.store.browsing import ListedRow, RowFilter
from osmosis_ai.store.queries import RunInfo, ScoredRollout
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.store.views import run_view
from osmosis_ai.text import duration
from osmosis_ai.viewer.addresses import Address, beside, compare_path, following, number, row_filter, run_path, without
from osmosis_ai.viewer.cells import attempt_cell, policy_of
from osmosis_ai.viewer.site import Site
from osmosis_ai.viewer.stores import Repository

__all__ = ["give_verdict", "stored_rollout", "trajectory_page"]

LOG_BYTES = 8 << 20
"""Bytes at the end of each log in which a rollout's lines are looked for."""
LOG_LINES = 500
NOTE_CHARACTERS = 4000
"""Maximum length of a note, in characters."""


class Span(NamedTuple):
    """A model call or a tool call on the timeline, in percent of its length."""

    left: float
    width: float
    lane: int
    kind: str
    title: str
    target: str


def trajectory_page(site: Site, repository: str, name: str, row: int, query: Mapping[str, str]) -> str:
    """Render a row's conversation in one of its attempts."""
    live = site.stores.version()
    store, run = site.find(repository, name)
    run_url = Address(run_path(repository, name), without(query, "attempt", "policy"))
    listed = _listed_row(store, run, row)
    chosen = _chosen(listed, query)
    scored = site.rollout(store, run, row, chosen)
    rollout = scored.stored.rollout
    against = store.runs.find_run(query["against"]) if query.get("against") else None
    # Compare in this direction, so that the rows are numbered as in this run.
    flips = [] if against is None else site.flips(store, run, against, query)
    selection = site.select(store, run, row_filter(query))
    failing = site.select(store, run, RowFilter(status="not-passed"))
    here = Address(f"{run_url.path}/rows/{row}", query)
    return site.render(
        "row.html",
        repository=store,
        run=run,
        view=run_view(run),
        here=here,
        back=run_url,
        row=listed.row,
        attempts=[
            attempt_cell(
                outcome,
                run,
                query,
                here.but(attempt=outcome.run_index, policy=policy_of(outcome)),
                listed.verdicts.get(outcome.id),
            )
            for outcome in listed.outcomes
        ],
        chosen=listed.outcomes.index(chosen),
        outcomes=listed.outcomes,
        scored=scored,
        threshold=run.pass_threshold,
        position=selection.position(row),
        count=len(selection),
        steps=list(steps(rollout.messages, rollout.turns, rollout.tool_calls)),
        spans=timeline(rollout),
        log=_log_lines(store, run, row, chosen.run_index),
        command=rerun_command(run, row),
        links={
            "previous": beside(selection, row, -1, run_url),
            "next": beside(selection, row, 1, run_url),
            "failure": following(failing.rows, row, run_url),
            "flip": following(flips, row, run_url),
            "comparison": "" if against is None else f"{compare_path(repository, run.id, against.id)}/rows/{row}",
        },
        against=against,
        others=site.others(store, run),
        note_characters=NOTE_CHARACTERS,
        live=live,
    )


def stored_rollout(site: Site, repository: str, name: str, row: int, query: Mapping[str, str]) -> ScoredRollout:
    """Return a row's rollout, to be shown as JSON."""
    store, run = site.find(repository, name)
    return site.rollout(store, run, row, _chosen(_listed_row(store, run, row), query))


def give_verdict(
    site: Site, repository: str, name: str, row: int, query: Mapping[str, str], given: Mapping[str, str]
) -> str:
    """Record a user's verdict on a rollout, and return the URL of its page; raises StoreError.

    `given` holds the rollout's id, because the rollout may have been run again; the verdict 1 or 0, or none to withdraw
    it; and a note.
    """
    store, run = site.find(repository, name)
    verdict = _VERDICTS.get(given.get("verdict", ""))
    if verdict is not None:
        verdict = replace(verdict, note=given.get("note", "").strip()[:NOTE_CHARACTERS] or None)
    with RunStore.open(store.root, folder=store.folder, masker=site.masker, create=False) as opened:
        # This runs in a thread without an event loop.
        anyio.run(opened.save_verdict, run.id, given.get("rollout", ""), verdict)
    return str(Address(f"{run_path(repository, name)}/rows/{row}", query))


_VERDICTS = {"1": Verdict(1), "0": Verdict(0)}


def _listed_row(store: Repository, run: RunInfo, row: int) -> ListedRow:
    found = store.runs.page(run.id, [row])
    if not found:
        raise StoreError(f"run {run.id} has no row {row}")
    return found[0]


def _chosen(listed: ListedRow, query: Mapping[str, str]) -> Outcome:
    policy, attempt = query.get("policy") or "policy", number(query.get("attempt"), -1)
    for outcome in listed.outcomes:
        if outcome.run_index == attempt and outcome.policy == policy:
            return outcome
    # A link may name an attempt that isn't there.
    return listed.outcomes[0]


def timeline(rollout: Rollout) -> list[Span]:
    """Lay out a rollout's model calls in sequence, each followed by its tool calls, which run concurrently."""
    spans: list[tuple[float, float, int, str, str, str]] = []
    now = 0.0
    for turn in rollout.turns:
        tokens = f"{turn.usage.prompt_tokens:,} + {turn.usage.completion_tokens:,} tokens"
        title = f"turn {turn.index + 1}: {duration(turn.duration_ms)}, {tokens}"
        spans.append((now, turn.duration_ms, 0, "model", title, f"turn-{turn.index}"))
        now += turn.duration_ms
        longest = 0.0
        for lane, call in enumerate(call for call in rollout.tool_calls if call.turn == turn.index):
            kind = "tool" if call.error is None else "tool failed"
            title = f"{call.name}: {duration(call.duration_ms)}"
            spans.append((now, call.duration_ms, min(lane + 1, 4), kind, title, f"turn-{turn.index}"))
            longest = max(longest, call.duration_ms)
        now += longest
    whole = now if math.isfinite(now) and now > 0 else 1.0
    return [Span(start / whole * 100, max(length / whole * 100, 0.2), *rest) for start, length, *rest in spans]  # type: ignore[arg-type]


def rerun_command(run: RunInfo, row: int) -> str | None:
    """Return the command that steps through a row with this run's options; None for a run of another tool."""
    config = run.config
    if "imported" in config:
        return None
    words = ["osmosis", "test", "-i", "--row", str(row)]
    for flag, name in (("-d", "dataset"), ("--model", "model"), ("--base-url", "base_url"), ("-m", "agent")):
        if config.get(name):
            words += [flag, str(config[name])]
    for name, value in (config.get("params") or {}).items():
        words += ["--param", f"{name}={msgspec.json.encode(value).decode()}"]
    options = config.get("options") or {}
    # Quoted, because a model's or file's name may hold what a shell would run.
    return shlex.join([*words, *(["--mcp", str(options["mcp"])] if options.get("mcp") else [])])


def _log_lines(store: Repository, run: RunInfo, row: int, run_index: int) -> list[str]:
    """Return the lines that this rollout's code printed, from the end of the run's logs."""
    prefixes = (f"[row {row} run {run_index} ", f"[row {row} scores ")
    return list(_lines(sorted((store.folder / "logs").glob(f"{run.id}*.log")), prefixes))[-LOG_LINES:]


def _lines(logs: Sequence[Path], prefixes: tuple[str, ...]) -> Iterator[str]:
    for log in logs:
        try:
            with log.open("rb") as file:
                file.seek(max(log.stat().st_size - LOG_BYTES, 0))
                text = file.read(LOG_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        yield from (line for line in text.splitlines() if line.startswith(prefixes))
