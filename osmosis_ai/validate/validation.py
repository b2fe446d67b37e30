"""Run every check of `osmosis validate` into one report; a check that fails doesn't stop the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.discovery.scan import Component
from osmosis_ai.records import Record, Tool
from osmosis_ai.validate.check import Subject, run_check
from osmosis_ai.validate.controls import ControlReport
from osmosis_ai.validate.findings import Finding
from osmosis_ai.validate.ignoring import split_ignored
from osmosis_ai.validate.probes import Form
from osmosis_ai.validate.registry import CHECKS, FIRST

if TYPE_CHECKING:
    from osmosis_ai.validate.running import Running

__all__ = ["Validation", "ValidationOptions", "validate_agent", "validate_repository"]


class ValidationOptions(Record, frozen=True):
    """Options of a validation.

    `ignore` holds the codes to ignore. `load_seconds` bounds the loading of `mcp/`, and separately that of functions.
    """

    static: bool = False
    dataset: str | None = None
    forms: tuple[Form, ...] = ()
    ignore: frozenset[str] = frozenset()
    load_seconds: float = 30.0


class Validation(Record, frozen=True):
    """The report: tools and functions, findings in order of file and line, and the controls' verdicts.

    `tools` are an agent loop's, as the model sees them. `ignored` are findings that an option or a comment ignores.
    """

    components: list[Component]
    findings: list[Finding]
    controls: list[ControlReport]
    tools: list[Tool] = []
    ignored: list[Finding] = []


async def validate_repository(root: Path, options: ValidationOptions, environ: Mapping[str, str]) -> Validation:
    """Check a repository. None of its code is imported into this process."""
    return await _Validation(root, options, environ).run()


async def validate_agent(source: AgentSource, options: ValidationOptions) -> Validation:
    """Check an agent loop, in a worker."""
    from osmosis_ai.validate.running import run_agent

    components, findings, tools = await run_agent(source, options.load_seconds)
    findings, ignored = split_ignored(findings, options.ignore, Path(source.root))
    return Validation(components, findings, [], tools, ignored)


class _Validation:
    """The state of one validation."""

    def __init__(self, root: Path, options: ValidationOptions, environ: Mapping[str, str]) -> None:
        self._root = root
        self._options = options
        self._subject = Subject(root, environ, root / (options.dataset or "test_data.jsonl"))
        self._components = self._subject.components
        self._findings: list[Finding] = []

    async def run(self) -> Validation:
        # A log of its own: a worker that dies while it loads is reported with its last lines.
        with TemporaryDirectory(prefix="osmosis-") as folder:
            return await self._run(None if self._options.static else self._running(Path(folder, "validate.log")))

    async def _run(self, running: Running | None) -> Validation:
        # The order matters: these fill `components`, and loading fills `loaded`, both of which other checks read.
        for check in FIRST:
            self._findings += run_check(check, self._subject)
        if running is not None:
            await running.load()
        for check in CHECKS:
            self._findings += run_check(check, self._subject)
        if running is not None:
            await running.try_out()
        components = [component for found in self._components.values() for component in found]
        # Several checks may find the same problem.
        unique = dict.fromkeys(map(msgspec.json.encode, self._findings))
        findings = [msgspec.json.decode(one, type=Finding) for one in unique]
        findings.sort(key=lambda one: (one.file or "", one.line or 0, one.code))
        findings, ignored = split_ignored(findings, self._options.ignore, self._root)
        controls = [] if running is None else running.controls
        return Validation(components, findings, controls, ignored=ignored)

    def _running(self, log: Path) -> Running:
        # Imported here, because a hook before each commit only reads source.
        from osmosis_ai.validate.running import Running

        return Running(self._subject, self._findings, self._options.forms, self._options.load_seconds, log)
