"""`osmosis validate`: every check of a repository, each in a failure domain of its own, into one report."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from time import monotonic

import msgspec

from osmosis_ai import tracebacks
from osmosis_ai.config import LimitsConfig
from osmosis_ai.data.dataset import RowProblem, open_dataset
from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.discovery.repository import McpSource
from osmosis_ai.discovery.scan import Component
from osmosis_ai.errors import DatasetError, OsmosisError, RepositoryError, StartError
from osmosis_ai.masking import Masker
from osmosis_ai.records import FunctionRef, Record, Row, Score, Tool
from osmosis_ai.runtime.pool.group import JobFailedError
from osmosis_ai.runtime.pool.pool import Pool, PoolOptions, ProcessPool, open_pool
from osmosis_ai.runtime.protocol import LoopFinding, Ready, WorkerSpec
from osmosis_ai.runtime.run.scoring import score_conversations
from osmosis_ai.store.scratch import ScratchStore
from osmosis_ai.validate import Finding, finding
from osmosis_ai.validate.check import Check, Subject
from osmosis_ai.validate.controls import (
    ControlledFunction,
    ControlReport,
    Trial,
    judge,
    judge_together,
    tells_rows_apart,
)
from osmosis_ai.validate.functions import (
    check_load_problems,
    is_about_form,
    reads_ground_truth,
    refs_of,
)
from osmosis_ai.validate.probes import MAX_ROWS, Form, Probe, answer_forms, conversation, probes
from osmosis_ai.validate.registry import CHECKS, FIRST

__all__ = ["Validation", "ValidationOptions", "run_check", "validate", "validate_agent"]

CALL_SECONDS = 10.0
"""How long a reward function may take for one answer."""

FUNCTION_SECONDS = 20.0
CONTROL_SECONDS = 120.0
"""How long the controls of one function, and of all of them, go on before what is left is left out."""

ONE_BY_ONE = 12
BATCH = 16
QUICK_SECONDS = 0.02
"""The first calls are sent one by one; those of functions that turn out to be quicker than this, so many together."""

GIVE_UP_AFTER = 2
"""Timeouts or lost processes after which a function isn't called any more."""

MAX_PROMPT = 50_000
MAX_SCANNED_ROWS = 10_000
MAX_MODULES_ALONE = 8


class ValidationOptions(Record, frozen=True):
    """How to validate. `load_seconds` bounds the loading of `mcp/` and of the functions, each."""

    static: bool = False
    dataset: str | None = None
    forms: tuple[Form, ...] = ()
    load_seconds: float = 30.0


class Validation(Record, frozen=True):
    """What was found: tools and functions, problems in order of file and line, and what the controls say.

    `tools` are an agent loop's, as the model sees them.
    """

    components: list[Component]
    findings: list[Finding]
    controls: list[ControlReport]
    tools: list[Tool] = []


async def validate(root: Path, options: ValidationOptions, environ: Mapping[str, str]) -> Validation:
    """Check a repository. None of its code is imported into this process.

    Args:
        root: Its root, absolute.
        options: How to check.
        environ: Variables, `.env` included.
    """
    return await _Validation(root, options, environ).run()


async def validate_agent(source: AgentSource, options: ValidationOptions) -> Validation:
    """Check an agent loop, in a worker.

    Args:
        source: The loop.
        options: How long it may take to load.
    """
    spec = WorkerSpec(source.root, LimitsConfig(), agent=source, batch_size=1)
    file, line = source.file or source.module, source.line
    tools: list[Tool] = []
    name = source.attribute
    try:
        async with ProcessPool.open(spec, PoolOptions(workers=1, load_seconds=options.load_seconds)) as pool:
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
        components.append(
            Component("tool", str(function.get("name")), file, line or 1, source.module, False, parameters)
        )
    findings = [
        Finding(one.code, "warning" if one.warning else "error", file, line, one.subject, one.message, "")
        for one in found
    ]
    return Validation(components, findings, [], tools)


def _why_not_loaded(message: str) -> str:
    # It is raised in a worker, from which only texts arrive.
    if "is an agent loop without a name" in message:
        return "MISSING_NAME"
    return "CANNOT_BE_CREATED" if "can't be made without arguments" in message else "CANNOT_BE_LOADED"


def run_check(check: Check, subject: Subject) -> Iterator[Finding]:
    """Run one check. Whatever goes wrong in it is a finding, and the others go on."""
    try:
        for found in check.run(subject):
            assert found.code in check.codes, f"{found.code} isn't registered for {check.area}"
            yield found
    except Exception as error:  # noqa: BLE001 - an area's failure must not cost the report of the others
        yield _could_not_run(check.area, error)


class _Validation:
    """One validation while it runs."""

    def __init__(self, root: Path, options: ValidationOptions, environ: Mapping[str, str]) -> None:
        self._root = root
        self._options = options
        self._subject = Subject(root, environ, root / (options.dataset or "test_data.jsonl"))
        self._components = self._subject.components
        self._findings: list[Finding] = []
        self._controls: list[ControlReport] = []

    async def run(self) -> Validation:
        for check in FIRST:
            self._findings += run_check(check, self._subject)
        if not self._options.static:
            self._subject.loaded = await self._load_tools()
        for check in CHECKS:
            self._findings += run_check(check, self._subject)
        if not self._options.static:
            await self._run_functions([] if self._subject.loaded is None else self._subject.loaded.tools)
        components = [component for found in self._components.values() for component in found]
        unique = dict.fromkeys(map(msgspec.json.encode, self._findings))
        findings = [msgspec.json.decode(one, type=Finding) for one in unique]
        findings.sort(key=lambda one: (one.file or "", one.line or 0, one.code))
        return Validation(components, findings, self._controls)

    # Running

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
            self._findings.append(
                finding(
                    "OSM102" if isinstance(error, RepositoryError) else "OSM103",
                    message,
                    file=place[1] if place else "mcp/main.py",
                    line=int(place[2]) if place and place[2] else None,
                    hint=" ".join(rest.split()) if isinstance(error, RepositoryError) else _LOADING_HINT,
                )
            )
        except Exception as error:  # noqa: BLE001 - an area's failure must not cost the report of the others
            self._findings.append(_could_not_run("mcp/", error))
        return None

    async def _run_functions(self, tools: Sequence[Tool]) -> None:
        refs = refs_of([*self._components["reward"], *self._components["rubric"]], self._root)
        if not refs:
            return
        tool = str(tools[0]["function"]["name"]) if tools else None
        try:
            try:
                await self._with_functions(refs, tool)
            except StartError as error:
                good = await self._load_alone(refs, error)
                if good:
                    await self._with_functions(good, tool)
        except Exception as error:  # noqa: BLE001 - an area's failure must not cost the report of the others
            self._findings.append(_could_not_run("functions", error))

    async def _with_functions(self, refs: Sequence[FunctionRef], tool: str | None) -> None:
        """Load functions and run their controls; raises StartError when loading doesn't come to an end."""
        async with (
            ScratchStore.open(Masker.from_environment(self._subject.environ)) as scratch,
            self._pool(self._function_spec(refs, scratch)) as pool,
        ):
            self._findings += check_load_problems(pool.loaded.problems, self._findings)
            loaded = set(pool.loaded.functions)
            rewards = [ref for ref in refs if ref.name in loaded and ref.kind == "reward"]
            await self._control(rewards, pool, scratch, tool)

    async def _load_alone(self, refs: Sequence[FunctionRef], error: StartError) -> list[FunctionRef]:
        """The functions whose modules load on their own; for the others there is a finding."""
        modules = list(dict.fromkeys(ref.module for ref in refs))
        good: list[FunctionRef] = []
        for module in modules[:MAX_MODULES_ALONE]:
            of_module = [ref for ref in refs if ref.module == module]
            try:
                if len(modules) > 1:
                    async with self._pool(self._function_spec(of_module)):
                        good += of_module
                    continue
            except StartError as own:
                error = own
            message = f"{of_module[0].file} can't be loaded: {str(error).rpartition('was lost: ')[2]}"
            self._findings.append(finding("OSM203", message, file=of_module[0].file, hint=_LOADING_HINT))
        return good

    def _function_spec(self, refs: Sequence[FunctionRef], scratch: ScratchStore | None = None) -> WorkerSpec:
        return WorkerSpec(
            str(self._root),
            LimitsConfig(reward_timeout=CALL_SECONDS),
            functions=list(refs),
            batch_size=1,
            store=None if scratch is None else str(scratch.path),
        )

    @asynccontextmanager
    async def _pool(self, spec: WorkerSpec) -> AsyncIterator[Pool]:
        options = PoolOptions(workers=1, load_seconds=self._options.load_seconds)
        async with open_pool(spec, options) as pool:
            yield pool

    # Controls

    async def _control(self, refs: Sequence[FunctionRef], pool: Pool, scratch: ScratchStore, tool: str | None) -> None:
        if not refs:
            return
        rows = self._control_rows()
        if not rows:
            self._findings.append(
                finding(
                    "OSM309",
                    "the controls need rows with a ground truth, and there are none",
                    file=self._subject.shown(self._subject.dataset),
                    hint="Reward functions were loaded, but not run.",
                )
            )
            return
        forms = answer_forms([row.system_prompt for row in rows], self._options.forms)
        trials = await _Trials(pool, scratch, refs, tool).run(rows, forms)
        functions = []
        reports = []
        components = {f"{found.module}:{found.name}": found for found in self._components["reward"]}
        for ref in refs:
            component = components[ref.name]
            tried = trials[ref.name]
            reads = reads_ground_truth(component, self._root) or tells_rows_apart(tried)
            function = ControlledFunction(ref, reads, is_about_form(component, self._root))
            report, findings = judge(function, tried)
            functions.append(function)
            reports.append(report)
            self._findings += findings
        self._controls = reports
        self._findings += judge_together(functions, reports, len(self._components["rubric"]))

    def _control_rows(self) -> list[Row]:
        rows: list[Row] = []
        try:
            for number, item in enumerate(open_dataset(self._subject.dataset).scan()):
                if number >= MAX_SCANNED_ROWS or len(rows) >= MAX_ROWS:
                    break
                if isinstance(item, RowProblem) or not (item.ground_truth or "").strip():
                    continue
                if len(item.system_prompt) + len(item.user_prompt) + len(item.ground_truth or "") <= MAX_PROMPT:
                    rows.append(item)
        except DatasetError:
            return []  # the dataset's own checks say so
        return rows


class _Trials:
    """Runs probes: every function on the same answer, twice at once.

    Args:
        pool: Holds the functions.
        scratch: Where it reads what is tried.
        refs: The functions.
        tool: A tool's name for the conversations.
    """

    def __init__(self, pool: Pool, scratch: ScratchStore, refs: Sequence[FunctionRef], tool: str | None) -> None:
        self._pool = pool
        self._scratch = scratch
        self._tool = tool
        self._trials: dict[str, list[Trial]] = {ref.name: [] for ref in refs}
        self._seconds = dict.fromkeys(self._trials, 0.0)
        self._strikes = dict.fromkeys(self._trials, 0)

    async def run(self, rows: Sequence[Row], forms: Sequence[Form]) -> dict[str, list[Trial]]:
        """Try everything there is time for; the trials of each function, in order."""
        deadline = monotonic() + CONTROL_SECONDS
        waiting = probes(rows, forms)
        while names := [name for name in self._trials if self._goes_on(name)]:
            tried = list(islice(waiting, self._at_once(names)))
            if not tried or monotonic() > deadline:
                break
            await self._try(tried, names)
        return self._trials

    def _goes_on(self, name: str) -> bool:
        return self._seconds[name] < FUNCTION_SECONDS and self._strikes[name] < GIVE_UP_AFTER

    def _at_once(self, names: list[str]) -> int:
        """How many probes to send together: one, until it is known that the functions are quick."""
        quick = all(
            len(self._trials[name]) >= ONE_BY_ONE and self._seconds[name] / len(self._trials[name]) < QUICK_SECONDS
            for name in names
        )
        return BATCH if quick else 1

    async def _try(self, tried: Sequence[Probe], names: list[str]) -> None:
        twice = [(probe.row, conversation(probe, self._tool)) for probe in tried for _ in range(2)]
        scores = await score_conversations(self._pool, self._scratch, twice, names)
        for number, probe in enumerate(tried):
            again = {score.function: score for score in scores[2 * number + 1]}
            for first in scores[2 * number]:
                self._count(first)
                repeated = again[first.function] if first.failure is None else None
                if repeated is not None:
                    self._count(repeated)
                self._trials[first.function].append(Trial(probe, first, repeated))

    def _count(self, score: Score) -> None:
        self._seconds[score.function] += score.duration_ms / 1000
        if score.failure is not None and score.failure.kind in ("timeout", "died", "blocked"):
            self._strikes[score.function] += 1


_LOADING_HINT = "See what it does when it is imported: a server that is started, a download, a loop."


def _could_not_run(name: str, error: Exception) -> Finding:
    said = str(error) if isinstance(error, OsmosisError) else tracebacks.describe(error, 300)
    return finding("OSM009", f"the checks of {name} could not run: {said}")
