"""Gate a merge on a comparison of two runs: a verdict, Markdown for a comment, annotations, and JUnit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from osmosis_ai.cli.validate_output import ci_escaped
from osmosis_ai.discovery.source import relative_to_root
from osmosis_ai.records import Failure, Outcome
from osmosis_ai.store.alignment import AlignedStep, ComparedStep
from osmosis_ai.store.compare import compare_row
from osmosis_ai.store.queries import Queries, RunInfo
from osmosis_ai.store.views import ComparedFunction, ComparedRuns, FlippedRow
from osmosis_ai.text import counted, cut, failure_line, score_number

__all__ = ["FAIL_ON", "FORMATS", "Gate", "gate", "junit", "score_cases"]

FAIL_ON = ("worse", "undecided", "any-flip")
MARKER = "<!-- osmosis runs compare -->"
"""The first line of the comment, by which a workflow finds and replaces its last one."""
STEP_CHARACTERS = 120
"""Characters shown of a step, which stands in a table cell or an annotation."""
_NO_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
"""Characters that XML 1.0 can't hold even if escaped; models and tools may write them."""

Verdict: TypeAlias = Literal["better", "equal", "undecided", "worse"]


class Flip(NamedTuple):
    """A row that crossed the threshold, where its two conversations part, and the failure of the second one."""

    function: str
    row: FlippedRow
    divergence: str
    failure: Failure | None


class Gate(NamedTuple):
    """A comparison with a gate's verdicts. `dataset` is the second run's dataset, relative to the root."""

    comparison: ComparedRuns
    verdicts: dict[str, Verdict]
    flips: list[Flip]
    dataset: str

    def failed(self, fail_on: str | None) -> bool:
        """Return True if the gate fails: a function is significantly worse, or undecided, or any row flipped."""
        verdicts = set(self.verdicts.values())
        if fail_on == "any-flip":
            return any(function.now_fail for function in self.comparison.functions.values()) or "worse" in verdicts
        return (fail_on is not None and "worse" in verdicts) or (fail_on == "undecided" and "undecided" in verdicts)


def gate(comparison: ComparedRuns, store: Queries, a: RunInfo, b: RunInfo, root: Path, limit: int) -> Gate:
    """Judge a comparison, and look up where the first flipped rows of each function part."""
    verdicts = {name: _verdict(function) for name, function in comparison.functions.items()}
    flips = []
    for name, function in comparison.functions.items():
        # Rows that now fail come first, because reviewers look for them.
        for row in sorted(function.flips, key=lambda row: row.passes)[:limit]:
            compared, _, second = compare_row(store, a, b, row.row_index)
            place = compared.first_difference
            divergence = "the conversations are equal" if place is None else _divergence(compared.steps[place])
            score = second.scores.get(name)
            rollout = second.stored.rollout
            failures = [rollout.failure, None if score is None else score.failure]
            # A tool's exception may be what made the model continue differently.
            failures += [call.failure for call in rollout.tool_calls if call.failure is not None and call.failure.file]
            flips.append(Flip(name, row, divergence, next(filter(None, failures), None)))
    dataset = str(comparison.b.dataset or "")
    return Gate(comparison, verdicts, flips, relative_to_root(Path(dataset), root) if dataset else "")


def _verdict(function: ComparedFunction) -> Verdict:
    """Judge by the 95 % confidence interval of the paired difference."""
    if not function.wins and not function.losses:
        return "equal"
    if function.confidence_interval is None:
        return "undecided"
    low, high = function.confidence_interval
    return "worse" if high < 0 else "better" if low > 0 else "undecided"


def _divergence(step: AlignedStep) -> str:
    if step.a is None:
        return f"only now: {_shown(step.b)}"
    if step.b is None:
        return f"only before: {_shown(step.a)}"
    if step.a.text == step.b.text and step.a.result != step.b.result:
        before, after = (cut(str(each.result), STEP_CHARACTERS) for each in (step.a, step.b))
        return f"{step.a.tool} returned {after}, before {before}"
    return f"{_shown(step.a)} → {_shown(step.b)}"


def _shown(step: ComparedStep | None) -> str:
    if step is None:
        return ""
    text = cut(" ".join(step.text.split()), STEP_CHARACTERS)
    return f"{step.tool}({text})" if step.tool is not None else f"{step.role}: {text}"


def markdown(found: Gate) -> Iterator[str]:
    """Yield the lines of a comment on a merge request."""
    comparison = found.comparison
    yield MARKER
    worse = [name for name, verdict in found.verdicts.items() if verdict == "worse"]
    undecided = [name for name, verdict in found.verdicts.items() if verdict == "undecided"]
    title = "no function is worse"
    if worse or undecided:
        title = ", ".join([*(f"{name} is worse" for name in worse), *(f"{name} is undecided" for name in undecided)])
    yield f"### Rollouts: {_code(title)}"
    yield ""
    yield "| function | before | after | difference | 95 % CI | verdict | rows up / down |"
    yield "|---|---|---|---|---|---|---|"
    for name, function in comparison.functions.items():
        interval = function.confidence_interval
        shown = "–" if interval is None else f"{_signed(interval[0])} to {_signed(interval[1])}"
        yield (
            f"| {_code(name)} | {score_number(function.a.mean)} | {score_number(function.b.mean)} | "
            f"{_signed(function.difference)} | {shown} | {found.verdicts[name]} | {function.wins} / {function.losses} |"
        )
    for passes, heading in ((False, "fail now"), (True, "pass now")):
        flips = [flip for flip in found.flips if flip.row.passes is passes]
        if flips:
            yield ""
            yield f"<details{'' if passes else ' open'}><summary>{counted(len(flips), 'row')} {heading}</summary>"
            yield ""
            yield "| row | function | before | after | first difference |"
            yield "|---|---|---|---|---|"
            for flip in flips:
                scores = f"{score_number(flip.row.a)} | {score_number(flip.row.b)}"
                yield f"| {flip.row.row_index} | {_code(flip.function)} | {scores} | {_code(flip.divergence)} |"
            yield ""
            yield "</details>"
    yield ""
    yield f"{counted(comparison.rows.shared, 'row')} in both runs: {comparison.a.id} → {comparison.b.id}."
    for note in comparison.notes:
        yield f"- {_code(note)}"


def github(found: Gate) -> Iterator[str]:
    """Yield workflow commands, which GitHub shows at the file and line of the tool, function or row to blame."""
    for name, verdict in found.verdicts.items():
        if verdict in ("worse", "undecided"):
            function = found.comparison.functions[name]
            level = "error" if verdict == "worse" else "warning"
            message = f"{name} is {verdict}: {_signed(function.difference)} on {counted(function.rows, 'row')}"
            yield f"::{level} title=osmosis::{ci_escaped(message)}"
    for flip in found.flips:
        if not flip.row.passes:
            failure = flip.failure
            # Rows of JSON lines are numbered from 0, lines from 1.
            file, line = found.dataset, flip.row.row_index + 1
            if failure is not None and failure.file is not None:
                file, line = failure.file, failure.line or 1
            why = f"{failure.origin}: {failure.message}" if failure is not None else flip.divergence
            message = f"row {flip.row.row_index} fails {flip.function} now: {why}"
            yield f"::error file={ci_escaped(file, in_property=True)},line={line},title=osmosis::{ci_escaped(message)}"


def _comparison_junit(found: Gate) -> Iterator[str]:
    cases = []
    for name, function in found.comparison.functions.items():
        verdict = found.verdicts[name]
        text = f"difference {_signed(function.difference)}"
        cases.append(Case(name, "comparison", f"worse: {text}" if verdict == "worse" else None))
        for flip in found.flips:
            if flip.function == name and not flip.row.passes:
                cases.append(Case(f"row {flip.row.row_index}", name, f"fails now: {flip.divergence}"))
    return junit("osmosis runs compare", cases)


class Case(NamedTuple):
    """One test case of a JUnit file: its problem, None if it passed; `error` tells a crash from a low score."""

    name: str
    group: str
    problem: str | None
    seconds: float = 0.0
    error: bool = False


def junit(name: str, cases: Iterable[Case]) -> Iterator[str]:
    """Yield the lines of a JUnit file, which CI systems show as test results."""
    found = list(cases)
    failures = sum(case.problem is not None and not case.error for case in found)
    errors = sum(case.problem is not None and case.error for case in found)
    counts = f'tests="{len(found)}" failures="{failures}" errors="{errors}"'
    yield '<?xml version="1.0" encoding="utf-8"?>'
    yield f'<testsuites name="{_xml(name)}" {counts}>'
    yield f'  <testsuite name="{_xml(name)}" {counts}>'
    for case in found:
        head = f'    <testcase classname="{_xml(case.group)}" name="{_xml(case.name)}" time="{case.seconds:.3f}"'
        if case.problem is None:
            yield f"{head} />"
        else:
            tag = "error" if case.error else "failure"
            short = _xml(case.problem.partition("\n")[0])
            yield f'{head}><{tag} message="{short}">{_xml(case.problem)}</{tag}></testcase>'
    yield "  </testsuite>"
    yield "</testsuites>"


def score_cases(outcomes: Iterable[Outcome], functions: Iterable[str], threshold: float) -> Iterator[Case]:
    """Yield a case for each function's score of each attempt at a row."""
    names = list(functions)
    for outcome in outcomes:
        name = f"row {outcome.row_index} attempt {outcome.run_index}"
        name += "" if outcome.policy == "policy" else f" {outcome.policy}"
        seconds = outcome.duration_ms / 1000
        for function in names:
            score = outcome.scores.get(function)
            # A rollout that failed has no scores; each of its functions gets the reason.
            failure = outcome.failure if score is None else score.failure
            if failure is not None or score is None or score.value is None:
                yield Case(name, function, "no score" if failure is None else failure_line(failure), seconds, True)
            elif score.value < threshold:
                why = f"{score_number(score.value)}, and {threshold:g} passes"
                yield Case(name, function, f"{why}: {score.explanation}" if score.explanation else why, seconds)
            else:
                yield Case(name, function, None, seconds)


FORMATS: dict[str, Callable[[Gate], Iterator[str]]] = {
    "markdown": markdown,
    "github": github,
    "junit": _comparison_junit,
}
"""The forms of a comparison that other programs read, besides JSON."""


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{score_number(abs(value))}"


def _code(text: str) -> str:
    """Escape what Markdown or HTML would obey; what models and tools wrote stays text in one table cell."""
    plain = escape(" ".join(text.split()), quote=False)
    # A zero-width space keeps names and numbers from becoming mentions and links.
    mentions = {"@": "@\u200b", "#": "#\u200b"}
    return "".join(f"\\{each}" if each in "\\`*_[]|~" else mentions.get(each, each) for each in plain)


def _xml(text: str) -> str:
    """Escape a text for XML, and leave out the characters that XML can't hold."""
    return escape(_NO_XML.sub("", text))
