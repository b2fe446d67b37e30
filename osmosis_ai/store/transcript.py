"""Render a stored rollout as text: its row, conversation, failure and scores."""

from __future__ import annotations

from collections.abc import Iterator

from osmosis_ai.conversation import Section, conversation, labelled, rollout_facts, turn_facts
from osmosis_ai.store.queries import ScoredRollout
from osmosis_ai.text import failure_text, json_text, score_text, visible

__all__ = ["transcript"]


def transcript(scored: ScoredRollout) -> Iterator[str]:
    """Yield the transcript's lines, for a rollout that was read with its trajectory."""
    parts = _head(scored)
    for section in _sections(scored):
        parts.append(f"\n{section}")
    for part in parts:
        yield from visible(part).split("\n")


def _head(scored: ScoredRollout) -> list[str]:
    stored, rollout = scored.stored, scored.stored.rollout
    policy = "" if rollout.policy == "policy" else f" ({rollout.policy})"
    facts = rollout_facts(rollout)
    if stored.requests > stored.turns + len(rollout.samples):
        facts.append(f"{stored.requests} model requests, retries included")
    if stored.attempt > 1:
        facts.append(f"attempt {stored.attempt}")
    head = [f"row {rollout.row_index}, run {rollout.run_index}{policy}: {', '.join(facts)}"]
    if scored.row.ground_truth is not None:
        head.append(labelled("ground truth", scored.row.ground_truth))
    if scored.row.extra:
        head.append(labelled("row", json_text(scored.row.extra)))
    return head


def _sections(scored: ScoredRollout) -> Iterator[Section]:
    rollout = scored.stored.rollout
    yield from conversation(rollout.messages, rollout.turns, rollout.tool_calls)
    for turn in rollout.samples:
        yield Section(f"sample requested by a tool, {turn_facts(turn)}", [])
    if rollout.failure is not None:
        yield Section("failure", [failure_text(rollout.failure)])
    if scored.scores:
        yield Section("scores", [score_text(score) for score in scored.scores.values()])
    if scored.verdict is not None:
        yield Section("verdict", [" ".join([str(scored.verdict.value), *filter(None, [scored.verdict.note])])])
