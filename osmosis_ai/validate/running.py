"""Check a repository by running its code in workers: load it, play solutions, and try its reward functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import msgspec

from osmosis_ai.config import LimitsConfig
from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.discovery.repository import McpSource
from osmosis_ai.discovery.scan import Component
from osmosis_ai.errors import RepositoryError, StartError
from osmosis_ai.masking import Masker
from osmosis_ai.records import FunctionRef, Tool
from osmosis_ai.runtime.pool.backends import open_pool
from osmosis_ai.runtime.pool.base import Pool, PoolOptions
from osmosis_ai.runtime.pool.group import JobFailedError
from osmosis_ai.runtime.protocol import LoopFinding, Ready, WorkerSpec
from osmosis_ai.runtime.run.plan import POLICY
from osmosis_ai.validate.check import Subject, could_not_run
from osmosis_ai.validate.controls import ControlReport
from osmosis_ai.validate.findings import Finding, Place, Severity, finding
from osmosis_ai.validate.functions import check_load_problems
from osmosis_ai.validate.probes import Form
from osmosis_ai.validate.rows import first_rows
from osmosis_ai.validate.solutions import (
    MAX_SOLUTIONS,
    ROLLOUT_SECONDS,
    find_leaks,
    judge_solutions,
    play_solutions,
    player,
)
from osmosis_ai.validate.trials import Trials, run_controls

__all__ = ["Running", "run_agent"]

CALL_SECONDS = 10.0
"""Time limit for a reward function's call."""

MAX_MODULES_ALONE = 8
"""Modules tried one by one if they don't load together; each may take the whole time limit for loading."""
_LOADING_HINT = "Look for work at import time: a server started, a download, a loop."


class Running:
    """Runs a repository's tools, functions and solutions, and adds the results to `findings` and `controls`."""

    def __init__(
        self, subject: Subject, findings: list[Finding], forms: Sequence[Form], load_seconds: float, log: Path
    ) -> None:
        self.controls: list[ControlReport] = []
        self._subject = subject
        self._findings = findings
        self._forms = forms
        self._load_seconds = load_seconds
        self._log = str(log)
        self._root = subject.root
        self._masker = Masker.from_environment(subject.environ)
        self._rewards: list[FunctionRef] = []

    async def load(self) -> None:
        """Load the tools."""
        with self._area("mcp/"):
            self._subject.loaded = await self._load_tools()

    async def try_out(self) -> None:
        """Try the functions on right and wrong answers, and play the rows' solutions."""
        loaded = self._subject.loaded
        with self._area("functions"):
            await self._run_functions([] if loaded is None else loaded.tools)
        if loaded is not None:
            with self._area("solutions"):
                await self._play_solutions()

    async def _load_tools(self) -> Ready | None:
        entry = self._root / "mcp" / "main.py"
        if not entry.is_file():
            return None
        spec = WorkerSpec(str(self._root), LimitsConfig(), mcp=McpSource("directory", path=str(entry)), batch_size=1)
        try:
            async with self._pool(spec) as pool:
                return pool.loaded
        except StartError as error:
            place = re.match(r"([^\s:]+\.py)(?::(\d+))?: ", str(error))
            message, _, rest = (str(error)[place.end() :] if place else str(error)).partition("\n")
            at = Place(place[1] if place else "mcp/main.py", int(place[2]) if place and place[2] else None)
            if isinstance(error, RepositoryError):
                self._findings.append(finding("OSM102", message, at, " ".join(rest.split())))
            else:
                self._findings.append(finding("OSM103", f"{message}\n{rest}".rstrip(), at, _LOADING_HINT))
        return None

    @contextmanager
    def _area(self, area: str) -> Iterator[None]:
        """Turn an area's failure into a finding, so that the others still report."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is a finding
            self._findings.append(could_not_run(area, error))

    async def _run_functions(self, tools: Sequence[Tool]) -> None:
        components = self._subject.components
        found = [*components["reward"], *components["rubric"]]
        refs = [component.ref(self._root) for component in found]
        if not refs:
            return
        try:
            await self._with_functions(refs, tools)
        except StartError as error:
            # A module that crashes or hangs takes the worker along, so its error doesn't say which one it was.
            good = await self._load_alone(refs, error)
            if good:
                await self._with_functions(good, tools)

    async def _with_functions(self, refs: Sequence[FunctionRef], tools: Sequence[Tool]) -> None:
        """Load functions and run their controls; raises StartError if loading doesn't finish."""
        async with self._pool(self._function_spec(refs)) as pool:
            self._findings += check_load_problems(pool.loaded.problems, self._findings)
            loaded = set(pool.loaded.functions)
            self._rewards = [ref for ref in refs if ref.name in loaded and ref.kind == "reward"]
            if self._rewards:
                tool = str(tools[0]["function"]["name"]) if tools else None
                trials = Trials(pool, self._masker, self._rewards, tool)
                self.controls, findings = await run_controls(self._subject, trials, self._forms, tools)
                self._findings += findings

    async def _play_solutions(self) -> None:
        rows = first_rows(self._subject.dataset, lambda row: row.solution is not None, MAX_SOLUTIONS)
        if not rows:
            return
        spec = msgspec.structs.replace(
            self._function_spec(self._rewards),
            limits=LimitsConfig(timeout=ROLLOUT_SECONDS, reward_timeout=CALL_SECONDS),
            mcp=McpSource("directory", path=str(self._root / "mcp" / "main.py")),
            policies={POLICY: player()},
        )
        async with self._pool(spec) as pool:
            played = await play_solutions(rows, pool, self._masker)
        # Only the tools' results are compared, so the functions needn't load.
        alone = msgspec.structs.replace(spec, functions=[])
        self._findings += await find_leaks(played, lambda: self._pool(alone), self._subject)
        best = {report.function: max(form.right or 0.0 for form in report.forms) for report in self.controls}
        # A function that scored no right answer above 0 has no known maximum; its controls report that.
        full = {name: value for name, value in best.items() if value > 0}
        self._findings += judge_solutions(played, full, self._subject)

    async def _load_alone(self, refs: Sequence[FunctionRef], error: StartError) -> list[FunctionRef]:
        """Return the functions whose modules load on their own; report a finding for each other module."""
        modules = list(dict.fromkeys(ref.module for ref in refs))
        good: list[FunctionRef] = []
        for module in modules[:MAX_MODULES_ALONE]:
            of_module = [ref for ref in refs if ref.module == module]
            try:
                # A single module has just failed to load; don't try it again.
                if len(modules) > 1:
                    async with self._pool(self._function_spec(of_module)):
                        good += of_module
                    continue
            except StartError as own:
                error = own
            message = f"{of_module[0].file} can't be loaded: {str(error).rpartition('was lost: ')[2]}"
            self._findings.append(finding("OSM203", message, Place(of_module[0].file), _LOADING_HINT))
        return good

    def _function_spec(self, refs: Sequence[FunctionRef]) -> WorkerSpec:
        return WorkerSpec(
            str(self._root),
            LimitsConfig(reward_timeout=CALL_SECONDS),
            functions=list(refs),
            # The functions that can be loaded are checked all the same.
            keep_going=True,
            batch_size=1,
        )

    def _pool(self, spec: WorkerSpec) -> AbstractAsyncContextManager[Pool]:
        return open_pool(spec, PoolOptions(workers=1, load_seconds=self._load_seconds, log=self._log))


async def run_agent(source: AgentSource, load_seconds: float) -> tuple[list[Component], list[Finding], list[Tool]]:
    """Load an agent loop, and return it with its tools as components, what is wrong with it, and its tools."""
    spec = WorkerSpec(source.root, LimitsConfig(), agent=source, batch_size=1)
    file, line = source.file or source.module, source.line
    tools: list[Tool] = []
    name = source.attribute
    try:
        async with open_pool(spec, PoolOptions(workers=1, load_seconds=load_seconds)) as pool:
            inspected = await pool.inspect()
        tools, name = inspected.tools, inspected.name or name
        found = inspected.findings
    except StartError as error:
        found = [LoopFinding(_why_not_loaded(str(error)), str(error), source.attribute)]
    except JobFailedError as failed:
        found = [LoopFinding("GET_TOOLS_EXCEPTION", f"get_tools: {failed.failure.message}", "get_tools")]
    components = [Component("agent", name, file, line or 1, source.module)]
    for tool in tools:
        function = tool.get("function") or {}
        parameters = tuple((function.get("parameters") or {}).get("properties") or ())
        tool_name = str(function.get("name"))
        components.append(Component("tool", tool_name, file, line or 1, source.module, False, parameters))
    severity: dict[bool, Severity] = {True: "warning", False: "error"}
    findings = [Finding(one.code, severity[one.warning], file, line, one.subject, one.message, "") for one in found]
    return components, findings, tools


def _why_not_loaded(message: str) -> str:
    # The worker's exception arrives as text only.
    if "is an agent loop without a name" in message:
        return "MISSING_NAME"
    return "CANNOT_BE_CREATED" if "can't be made without arguments" in message else "CANNOT_BE_LOADED"
