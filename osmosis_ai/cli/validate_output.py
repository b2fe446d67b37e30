"""Print the output of `osmosis validate`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from osmosis_ai.cli.console import BAD, CAUTION, FAINT, GOOD, HEADING, Output
from osmosis_ai.cli.tables import Cell, Column, Table
from osmosis_ai.text import counted, duration, score_number
from osmosis_ai.validate import Finding, examples
from osmosis_ai.validate.controls import ControlReport
from osmosis_ai.validate.probes import WRONG
from osmosis_ai.validate.validation import Validation

__all__ = ["print_agent", "print_annotations", "print_rollout", "print_validation"]

_STYLES = {"error": f"bold {BAD}", "warning": CAUTION, "note": FAINT}
_ANNOTATIONS = {"error": "error", "warning": "warning", "note": "notice"}
_TOGETHER = "OSM111"
"""The code whose findings are shown as one for each file, because a repository may have one for every parameter."""
_SHOWN_PLACES = 5
_MARGIN = 26
"""Columns taken by a finding's line, severity and code."""
_LEAST_ROOM = 24
_KINDS = {"tool": "tools", "reward": "reward functions", "rubric": "rubrics"}


def print_validation(validation: Validation, output: Output, *, static: bool) -> None:
    """Print the whole report to stdout: components, controls, findings and totals."""
    _print_components(validation, output)
    for report in validation.controls:
        _print_control(report, output)
    # Errors come last, so that they aren't scrolled away.
    for errors in (False, True):
        found = [one for one in _collapsed(validation.findings) if (one.severity == "error") == errors]
        for file, findings in groupby(found, key=lambda one: one.file or "repository"):
            output.line("")
            output.line(file, HEADING)
            _print_findings(list(findings), output)
    output.line("")
    output.result(_sum(validation, static))


def print_agent(validation: Validation, output: Output, *, verbose: bool) -> None:
    """Print the report on an agent loop: its tools, findings and totals."""
    loop, *tools = validation.components
    output.result("agent ", (loop.name, "bold"), f", {loop.file}:{loop.line}")
    if not tools:
        output.line("tools: none")
    else:
        table = Table(Column("name", "name"), Column("parameters", "list"), title=f"tools ({len(tools)})")
        for tool in tools:
            table.add(tool.name, ", ".join(tool.parameters))
        output.table(table)
    for schema in validation.tools if verbose else []:
        function = schema.get("function") or {}
        output.line("")
        output.result(f"{function.get('name')}: {function.get('description') or 'no description'}")
        parameters = msgspec.json.format(msgspec.json.encode(function.get("parameters")), indent=2)
        output.result(parameters.decode("utf-8"))
    if validation.findings:
        output.line("")
        _print_findings(validation.findings, output)
    output.line("")
    output.result(_sum(validation, static=False))


def print_rollout(validation: Validation, output: Output) -> None:
    """Print the report on a rollout server: its findings and totals."""
    (rollout,) = validation.components
    output.result("rollout ", (rollout.name, "bold"), f", {rollout.file}")
    _print_findings(validation.findings, output)
    output.result(_sum(validation, static=False))


def print_annotations(validation: Validation, prefix: Path, output: Output) -> None:
    """Print findings as GitHub workflow commands, which annotate the lines of a pull request."""
    for one in validation.findings:
        place = [f"file={ci_escaped((prefix / one.file).as_posix(), in_property=True)}"] if one.file else []
        place += [f"line={one.line}"] if one.line else []
        place.append(f"title={ci_escaped(one.code, in_property=True)}")
        message = f"{one.message}. {one.hint}" if one.hint else one.message
        output.ci_command(f"::{_ANNOTATIONS[one.severity]} {','.join(place)}::{ci_escaped(message)}")
    output.say(_sum(validation, static=False)[0])


def _collapsed(findings: Sequence[Finding]) -> list[Finding]:
    """Replace a file's findings of one repeated advice with a single one that lists their places."""
    alike: dict[str | None, list[Finding]] = {}
    for one in findings:
        if one.code == _TOGETHER:
            alike.setdefault(one.file, []).append(one)
    shown = []
    for one in findings:
        same = alike.get(one.file, [])
        if one.code != _TOGETHER or len(same) == 1:
            shown.append(one)
        elif one is same[0]:
            # The third word of this code's message is the parameter.
            places = [f"{each.message.split()[2]} of {each.subject}, line {each.line}" for each in same]
            message = f"{len(same)} parameters have no description: {examples(places, _SHOWN_PLACES)}"
            shown.append(
                msgspec.structs.replace(one, message=message, hint='Write Annotated[…, Field(description="…")].')
            )
    return shown


def _print_components(validation: Validation, output: Output) -> None:
    for kind, title in _KINDS.items():
        found = [component for component in validation.components if component.kind == kind]
        if not found:
            output.line(f"{title}: none")
            continue
        columns = (Column("name", "function"), Column("where", "label"), Column("parameters", "list"))
        table = Table(*columns, title=f"{title} ({len(found)})")
        for component in found:
            table.add(component.name, f"{component.file}:{component.line}", ", ".join(component.parameters))
        output.table(table)


def _print_control(report: ControlReport, output: Output) -> None:
    output.line("")
    output.result("controls of ", (report.function, "bold"), f": {report.verdict}")
    table = Table(Column("  answer form", "name"), "right", *WRONG)
    for form in report.forms:
        mark = "✓" if form.accepted else " "
        right = Cell(score_number(form.right), GOOD if form.accepted else FAINT)
        table.add(f"{mark} {form.form}", right, *(score_number(form.wrong[kind]) for kind in WRONG))
    output.table(table)
    others = {"empty": report.empty, "prompt echoed": report.prompt, "odd answers": report.odd}
    scores = ", ".join(f"{name} {score_number(value)}" for name, value in others.items())
    calls = f"{counted(report.calls, 'call')}, {duration(report.median_ms)} each"
    output.line(f"  {scores}; {counted(report.rows, 'row')}, {calls}")


def _print_findings(findings: Iterable[Finding], output: Output) -> None:
    for one in findings:
        head = (f"  {one.line or '–':>4}  ", (f"{one.severity:<7}", _STYLES[one.severity]), (f"  {one.code}  ", FAINT))
        first, *rest = _wrapped(one.message, output.width)
        output.result(*head, first)
        for line in rest:
            output.line(f"{'':{_MARGIN}}{line}")
        for line in _wrapped(one.hint, output.width) if one.hint else []:
            output.line(f"{'':{_MARGIN}}{line}", FAINT)


def _wrapped(text: str, width: int | None) -> list[str]:
    """Return a finding's text as lines for the room beside its line, severity and code. Names and paths stay whole."""
    if width is None:
        return text.split("\n")
    room = max(width - _MARGIN, _LEAST_ROOM)
    lines = (textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
    return [line for wrapped in lines for line in wrapped or [""]]


def _sum(validation: Validation, static: bool) -> tuple[str, str]:
    errors = sum(one.severity == "error" for one in validation.findings)
    warnings = sum(one.severity == "warning" for one in validation.findings)
    notes = len(validation.findings) - errors - warnings
    counts = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}" if errors + warnings else "no problems found"
    counts += f", {counted(notes, 'note')}" if notes else ""
    counts += f", {len(validation.ignored)} ignored" if validation.ignored else ""
    style = BAD if errors else CAUTION if warnings else GOOD
    return counts + (" (source only; nothing was run)" if static else ""), style


def ci_escaped(text: str, *, in_property: bool = False) -> str:
    """Escape a text as GitHub's toolkit escapes data and properties of workflow commands."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text
