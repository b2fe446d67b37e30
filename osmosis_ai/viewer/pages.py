"""What each page shows: read from the store, and made into plain data for its template."""

from __future__ import annotations

import functools
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from osmosis_ai.conversation import steps
from osmosis_ai.errors import StoreError
from osmosis_ai.records import Failure, Outcome, Rollout, Score
from osmosis_ai.reward_fn.statistics import FunctionStatistics, summarize
from osmosis_ai.store.alignment import AlignedStep, word_changes
from osmosis_ai.store.browsing import FailureGroup, ListedRow, RowFilter, RunTotals, Selected, Selection
from osmosis_ai.store.compare import compare_row, compare_runs
from osmosis_ai.store.queries import RolloutFilter, RunInfo, ScoredRollout
from osmosis_ai.store.views import ComparedRuns, RunView, run_view
from osmosis_ai.text import content_text, cost, counted, duration, excerpt, failure_line, score_number, visible
from osmosis_ai.viewer.stores import Repository, Stores, compare_path, run_path
from osmosis_ai.viewer.trees import TEXT_CHARACTERS, tree

__all__ = ["PAGE_ROWS", "Pages", "environment"]

PAGE_ROWS = 100
LISTED_RUNS = 500
FIGURES_AT_ONCE = 3000
"""Rollouts of a run whose figures are in its page; those of a larger one follow."""
SHOWN_ATTEMPTS = 32
LOG_BYTES = 8 << 20
LOG_LINES = 500
IMAGE_CHARACTERS = 8 << 20
_IMAGES = tuple(f"data:image/{kind};base64," for kind in ("png", "jpeg", "gif", "webp"))


def shown(value: Any) -> Any:
    """Escape what a browser would render as something else: control characters, bidi overrides, lone surrogates."""
    if not isinstance(value, str) or _is_markup(value):
        return value
    return visible(value.encode("utf-8", "backslashreplace").decode("utf-8"))


def _is_markup(value: object) -> bool:
    return hasattr(value, "__html__")


@functools.cache
def environment() -> Environment:
    """Return the templates' environment: everything that they show is escaped, by these two settings alone."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        cost=cost, counted=counted, duration=duration, excerpt=excerpt, score=score_number, failure_line=failure_line
    )
    found.globals.update(tree=tree, text_of=content_text, images_of=images_of, word_changes=word_changes)
    found.globals["TEXT_CHARACTERS"] = TEXT_CHARACTERS
    return found


class Address(NamedTuple):
    """A page and its query, from which links to other views of it are made."""

    path: str
    query: Mapping[str, str] = {}

    def __str__(self) -> str:
        return self.path + (f"?{urlencode(self.query)}" if self.query else "")

    def but(self, **changes: object) -> str:
        """Return the URL with some parameters changed, or removed if they are None."""
        query = {**self.query, **{name: None if value is None else str(value) for name, value in changes.items()}}
        return str(Address(self.path, {name: value for name, value in query.items() if value}))

    def at(self, path: str, **changes: object) -> str:
        """Return the URL of another page with the same query, but for some parameters."""
        return Address(f"{self.path}{path}", self.query).but(**changes)


class ScoreBar(NamedTuple):
    """A mean score, and its 95 % interval if it is known."""

    function: str
    mean: float | None
    interval: tuple[float, float] | None

    @property
    def parts(self) -> tuple[float, float, float] | None:
        """The bar's length and its whiskers' ends, in percent; None if the score is outside 0 … 1."""
        if self.mean is None or not 0 <= self.mean <= 1:
            return None
        low, high = self.interval or (self.mean, self.mean)
        return self.mean * 100, max(low, 0.0) * 100, min(high, 1.0) * 100


class ListedRun(NamedTuple):
    """A run in the list of runs."""

    repository: Repository
    run: RunInfo
    view: RunView
    url: str
    scores: list[ScoreBar]

    @property
    def dataset(self) -> str:
        return (self.view.dataset or "").replace("\\", "/").rpartition("/")[2]


class Attempt(NamedTuple):
    """One rollout of a row as a cell: its text, its colour, and what it says when it is pointed at."""

    url: str
    text: str
    look: str
    title: str
    matches: bool = True


class TableRow(NamedTuple):
    """A row of a run's table."""

    number: int
    url: str
    prompt: str
    attempts: list[Attempt]
    more: int
    tokens: int
    calls: int
    duration_ms: float
    problem: str


class Span(NamedTuple):
    """A model call or a tool call on the time line, in percent of its length."""

    left: float
    width: float
    lane: int
    kind: str
    title: str
    target: str


class Side(NamedTuple):
    """One of two rollouts that are compared."""

    view: RunView
    url: str
    attempts: list[Attempt]
    chosen: int
    scored: ScoredRollout


class Block(NamedTuple):
    """Steps of two conversations: a span of equal ones, or others. `first` is True if the two part here."""

    equal: bool
    steps: list[AlignedStep]
    first: bool


class Figures(NamedTuple):
    """What a run's scores and calls add up to."""

    totals: RunTotals
    statistics: dict[str, FunctionStatistics]
    histograms: dict[str, Any]
    tools: list[Any]
    failures: list[FailureGroup]


class Pages:
    """Renders the pages of a viewer. Any thread may call; raises StoreError if something isn't there.

    `masked` masks keys in what a page shows, also keys that weren't known when a run was stored.
    """

    def __init__(self, stores: Stores, masked: Callable[[str], str] | None = None) -> None:
        self._stores = stores
        self._templates = environment()
        if masked is not None:
            mask = masked
            self._templates = self._templates.overlay(
                finalize=lambda value: shown(mask(value) if isinstance(value, str) and not _is_markup(value) else value)
            )

    def render(self, template: str, **values: Any) -> str:
        """Render a template."""
        return self._templates.get_template(template).render(**values)

    def home(self, query: Mapping[str, str]) -> str:
        """The list of runs."""
        live = self._stores.version()
        runs = [self._listed(repository, run) for repository in self._stores
                for run in (repository.runs.list_runs(LISTED_RUNS) if repository.exists else [])]  # fmt: skip
        total = len(runs)
        chart = _chart(runs, query)
        runs = _sorted_runs([run for run in runs if _run_matches(run, query)], query.get("sort", "-when"))
        return self.render(
            "runs.html",
            runs=runs,
            total=total,
            here=Address("/", query),
            several=len(self._stores) > 1,
            chart=chart,
            live=live,
        )

    def run(self, repository: str, name: str, query: Mapping[str, str], *, with_rows: bool = True) -> str:
        """A run: its figures, and the first part of its rows."""
        live = self._stores.version()
        if name == "latest" and not self._has_runs(repository):
            return self.render("waiting.html", live=live)
        store, run = self._find(repository, name)
        here = Address(run_path(repository, name), query)
        wanted = _filter(query)
        selection = self.select(store, run, wanted)
        offset = min(_number(query.get("offset")), max(len(selection) - 1, 0))
        now = time.time()
        figures = self.figures_of(store, run) if run.rollouts <= FIGURES_AT_ONCE else None
        # A page that reads itself again asks for its rows alone.
        rows = self._table(store, run, selection, offset, PAGE_ROWS, query) if with_rows else []
        return self.render(
            "run.html",
            repository=store,
            run=run,
            view=run_view(run),
            here=here,
            query=query,
            wanted=wanted,
            filtered=wanted != RowFilter(sort=wanted.sort),
            functions=_functions(run, figures),
            threshold=threshold_of(run),
            count=len(selection),
            offset=offset,
            page_rows=PAGE_ROWS,
            rows=rows,
            in_flight=[(each, max(now - each.started_at, 0.0) * 1000) for each in store.runs.in_flight(run)],
            figures=figures,
            others=[other for other in store.runs.list_runs(50) if other.id != run.id],
            live=live,
        )

    def table(self, repository: str, name: str, query: Mapping[str, str]) -> str:
        """A part of a run's rows, as the rows of a table."""
        store, run = self._find(repository, name)
        selection = self.select(store, run, _filter(query))
        limit = min(_number(query.get("limit"), PAGE_ROWS), 2 * PAGE_ROWS)
        rows = self._table(store, run, selection, _number(query.get("offset")), limit, query)
        return self.render("rows.html", rows=rows, count=len(selection))

    def figures(self, repository: str, name: str, query: Mapping[str, str]) -> str:
        """A run's figures."""
        store, run = self._find(repository, name)
        here = Address(run_path(repository, name), query)
        figures = self.figures_of(store, run)
        return self.render("figures.html", figures=figures, run=run, here=here, threshold=threshold_of(run))

    def row(self, repository: str, name: str, row: int, query: Mapping[str, str]) -> str:
        """A row's conversation in one of its attempts."""
        live = self._stores.version()
        store, run = self._find(repository, name)
        run_url = Address(run_path(repository, name), _without(query, "attempt", "policy"))
        listed = _listed_row(store, run, row)
        chosen = _chosen(listed, query)
        scored = self.rollout(store, run, row, chosen)
        rollout = scored.stored.rollout
        selection = self.select(store, run, _filter(query))
        failing = self.select(store, run, RowFilter(status="not-passed"))
        here = Address(f"{run_url.path}/rows/{row}", query)
        return self.render(
            "row.html",
            repository=store,
            run=run,
            view=run_view(run),
            here=here,
            back=run_url,
            row=listed.row,
            attempts=[
                attempt_cell(outcome, run, query, here.but(attempt=outcome.run_index, policy=_policy(outcome)))
                for outcome in listed.outcomes
            ],
            chosen=listed.outcomes.index(chosen),
            outcomes=listed.outcomes,
            scored=scored,
            threshold=threshold_of(run),
            position=selection.position(row),
            count=len(selection),
            steps=list(steps(rollout.messages, rollout.turns, rollout.tool_calls)),
            spans=timeline(rollout),
            log=_log_lines(store, run, row, chosen.run_index),
            command=rerun_command(run, row),
            links={
                "previous": _beside(selection, row, -1, run_url),
                "next": _beside(selection, row, 1, run_url),
                "failure": _next_in(failing, row, run_url),
            },
            live=live,
        )

    def compare(self, repository: str, a: str, b: str, query: Mapping[str, str]) -> str:
        """Two runs: what flipped, and the paired differences of their scores."""
        live = self._stores.version()
        store, run_a = self._find(repository, a)
        _, run_b = self._find(repository, b)
        here = Address(compare_path(repository, a, b), query)
        compared = self.compared(store, run_a, run_b, query)
        offset = _number(query.get("offset"))
        function = query["fn"] if query.get("fn") in compared.functions else next(iter(compared.functions), None)
        flips = [] if function is None else compared.functions[function].flips
        kind = query.get("show")
        flips = [flip for flip in flips if kind not in ("pass", "fail") or flip.passes == (kind == "pass")]
        part = flips[offset : offset + PAGE_ROWS]
        prompts = {
            each.row.index: each.row.user_prompt for each in store.runs.page(run_a.id, [f.row_index for f in part])
        }
        return self.render(
            "compare.html",
            compared=compared,
            here=here,
            repository=store,
            function=function,
            kind=kind,
            flips=part,
            count=len(flips),
            offset=offset,
            page_rows=PAGE_ROWS,
            prompts=prompts,
            live=live,
        )

    def compare_row(self, repository: str, a: str, b: str, row: int, query: Mapping[str, str]) -> str:
        """An attempt of a row in two runs, step by step."""
        live = self._stores.version()
        store, run_a = self._find(repository, a)
        _, run_b = self._find(repository, b)
        runs = Address(compare_path(repository, a, b), _without(query, "attempt", "attempt_b"))
        here = Address(f"{runs.path}/rows/{row}", query)
        attempt = _number(query.get("attempt"))
        attempt_b = _number(query.get("attempt_b"), attempt)
        compared, first, second = compare_row(store.runs, run_a, run_b, row, attempt, attempt_b)
        functions = self.compared(store, run_a, run_b, query).functions
        function = query["fn"] if query.get("fn") in functions else next(iter(functions), None)
        flipped = [] if function is None else [flip.row_index for flip in functions[function].flips]
        after = next((index for index in flipped if index > row), None)
        selection = self.select(store, run_a, RowFilter())
        return self.render(
            "compare_row.html",
            compared=compared,
            blocks=blocks_of(compared.steps),
            runs=runs,
            here=here,
            row=row,
            sides=[
                self._side(store, run, name, scored, here)
                for name, run, scored in (("attempt", run_a, first), ("attempt_b", run_b, second))
            ],
            links={
                "previous": _beside(selection, row, -1, runs),
                "next": _beside(selection, row, 1, runs),
                "flip": None if after is None else runs.at(f"/rows/{after}"),
            },
            live=live,
        )

    def _side(self, store: Repository, run: RunInfo, name: str, scored: ScoredRollout, here: Address) -> Side:
        rollout = scored.stored.rollout
        listed = store.runs.page(run.id, [scored.row.index])[0]
        outcomes = [outcome for outcome in listed.outcomes if outcome.policy == "policy"]
        # Both attempts are named, so that one can change without the other.
        both = {"attempt": _number(here.query.get("attempt"))}
        both["attempt_b"] = _number(here.query.get("attempt_b"), both["attempt"])
        attempts = [
            attempt_cell(outcome, run, here.query, here.but(**{**both, name: outcome.run_index}))
            for outcome in outcomes
        ]
        chosen = [outcome.run_index for outcome in outcomes].index(rollout.run_index)
        url = f"{run_path(store.name, run.id)}/rows/{scored.row.index}?attempt={rollout.run_index}"
        return Side(run_view(run), url, attempts, chosen, scored)

    def compared(self, store: Repository, a: RunInfo, b: RunInfo, query: Mapping[str, str] = {}) -> ComparedRuns:
        """Compare two runs; `query` may have a `threshold`."""
        threshold = _float(query.get("threshold"))
        threshold = threshold_of(b) if threshold is None else threshold
        # Two runs that have ended don't change, and the other one's changes show in its own key.
        running, other = (a, b) if a.alive else (b, a)
        key = ("compared", a.id, b.id, threshold, other.rollouts, other.finished_at, repr(other.summary))
        return store.kept(key, running, lambda: compare_runs(store.runs, a, b, threshold))

    def raw(self, repository: str, name: str, row: int, query: Mapping[str, str]) -> ScoredRollout:
        """A row's rollout, for its JSON."""
        store, run = self._find(repository, name)
        return self.rollout(store, run, row, _chosen(_listed_row(store, run, row), query))

    def rollout(self, store: Repository, run: RunInfo, row: int, chosen: Outcome) -> ScoredRollout:
        """Read a rollout with its trajectory."""
        wanted = RolloutFilter(row=row, run_index=chosen.run_index)
        for scored in store.runs.scored(run.id, wanted, with_trajectory=True):
            if scored.stored.rollout.policy == chosen.policy:
                return scored
        raise StoreError(f"row {row} of run {run.id} was removed in the meantime")

    def error(self, message: str) -> str:
        """A page that says what isn't there."""
        return self.render("error.html", message=message, live="")

    def _has_runs(self, repository: str) -> bool:
        store = self._stores.get(repository)
        return store.exists and bool(store.runs.list_runs(1))

    def _find(self, repository: str, name: str) -> tuple[Repository, RunInfo]:
        store = self._stores.get(repository)
        return store, store.runs.find_run(name)

    def select(self, store: Repository, run: RunInfo, wanted: RowFilter) -> Selection:
        """Return the rows that a filter selects."""
        return store.kept(("rows", run.id, wanted), run, lambda: store.runs.select(run.id, wanted, threshold_of(run)))

    def figures_of(self, store: Repository, run: RunInfo) -> Figures:
        """Return what a run's scores and calls add up to."""

        def compute() -> Figures:
            runs = store.runs
            histograms = runs.histograms(run.id)
            names = dict.fromkeys([*_functions(run, None), *histograms])
            errors = {each.function: each.errors for each in runs.function_totals(run.id)}
            statistics = {
                name: summarize(runs.scores_by_row(run.id, name), threshold_of(run), scoring_errors=errors.get(name, 0))
                for name in names
            }
            failures = runs.failure_groups(run.id)
            return Figures(runs.run_totals(run.id), statistics, histograms, runs.tool_totals(run.id), failures)

        return store.kept(("figures", run.id), run, compute)

    def _table(
        self,
        store: Repository,
        run: RunInfo,
        selection: Selection,
        offset: int,
        limit: int,
        query: Mapping[str, str],
    ) -> list[TableRow]:
        listed = store.runs.page(run.id, selection.rows[offset : offset + limit])
        url = Address(run_path(store.name, run.id), _without(query, "offset", "limit"))
        return [table_row(each, run, query, url) for each in listed]

    def _listed(self, repository: Repository, run: RunInfo) -> ListedRun:
        view = run_view(run)
        intervals = view.intervals
        means = view.functions
        if run.status == "running" and 0 < run.rollouts <= FIGURES_AT_ONCE:
            statistics = self.figures_of(repository, run).statistics
            means = {name: each.mean for name, each in statistics.items()}
            intervals = {name: each.confidence_interval for name, each in statistics.items()}
        scores = [ScoreBar(name, mean, intervals.get(name)) for name, mean in means.items()]
        return ListedRun(repository, run, view, run_path(repository.name, run.id), scores)


def blocks_of(aligned: Sequence[AlignedStep]) -> list[Block]:
    """Group aligned steps into spans that are equal and those that aren't."""
    blocks: list[Block] = []
    for equal, group in groupby(aligned, key=lambda step: step.change == "equal"):
        first = not equal and all(block.equal for block in blocks)
        blocks.append(Block(equal, list(group), first))
    return blocks


def images_of(content: Any) -> list[tuple[str, str]]:
    """Return the images in a message's or a tool's content: a data URL, or an empty one, and what it is."""
    found = []
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict):
            continue
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if part.get("type") == "image" and isinstance(part.get("data"), str):
            url = f"data:{part.get('mimeType')};base64,{part['data']}"
        if not isinstance(url, str):
            continue
        whole = url.startswith(_IMAGES) and len(url) <= IMAGE_CHARACTERS
        found.append((url if whole else "", f"{excerpt(url, 60)} ({len(url):,} characters)"))
    return found


def timeline(rollout: Rollout) -> list[Span]:
    """Lay out a rollout's model calls one after the other, and beside each its tool calls, which run at one time."""
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


def rerun_command(run: RunInfo, row: int) -> str:
    """Return the command that steps through a row as this run ran it."""
    config = run.config
    words = ["osmosis", "test", "-i", "--row", str(row)]
    for flag, name in (("-d", "dataset"), ("--model", "model"), ("--base-url", "base_url"), ("-m", "agent")):
        if config.get(name):
            words += [flag, str(config[name])]
    for name, value in (config.get("params") or {}).items():
        words += ["--param", f"{name}={msgspec.json.encode(value).decode()}"]
    options = config.get("options") or {}
    return shlex.join([*words, *(["--mcp", str(options["mcp"])] if options.get("mcp") else [])])


def _run_matches(run: ListedRun, query: Mapping[str, str]) -> bool:
    view = run.view
    exact = {"status": view.status, "command": view.command, "model": view.model, "dataset": run.dataset}
    if any(query.get(name) and query[name] != value for name, value in exact.items()):
        return False
    words = " ".join(filter(None, [view.id, *exact.values(), run.repository.name])).lower()
    return all(word in words for word in query.get("q", "").lower().split())


def _sorted_runs(runs: list[ListedRun], sort: str) -> list[ListedRun]:
    keys: dict[str, Callable[[ListedRun], Any]] = {
        "when": lambda run: run.run.created_at,
        "status": lambda run: run.view.status,
        "command": lambda run: run.view.command,
        "model": lambda run: run.view.model or "",
        "dataset": lambda run: run.dataset,
        "rollouts": lambda run: run.view.rollouts,
        "failed": lambda run: run.view.failed,
        "score": lambda run: ((means := [bar.mean or 0.0 for bar in run.scores]) and sum(means) / len(means)) or 0.0,
        "cost": lambda run: run.view.cost_usd or 0.0,
    }
    return sorted(runs, key=keys.get(sort.removeprefix("-"), keys["when"]), reverse=sort.startswith("-"))


class Point(NamedTuple):
    """A run in the chart of a score over time, in the chart's coordinates."""

    x: float
    y: float
    low: float
    high: float
    run: ListedRun
    mean: float


class Chart(NamedTuple):
    """A function's mean over the runs of one dataset."""

    dataset: str
    function: str
    functions: list[str]
    points: list[Point]


def _chart(runs: Sequence[ListedRun], query: Mapping[str, str]) -> Chart | None:
    """Lay out the chart of the asked dataset, else of the newest one with two scored runs."""
    by_dataset: dict[str, list[ListedRun]] = {}
    for run in runs:
        if run.dataset and any(bar.parts for bar in run.scores):
            by_dataset.setdefault(run.dataset, []).append(run)
    dataset = query.get("dataset") or next((name for name, found in by_dataset.items() if len(found) > 1), "")
    found = by_dataset.get(dataset, [])[::-1][-100:]
    functions = list(dict.fromkeys(bar.function for run in found for bar in run.scores))
    if len(found) < 2 or not functions:
        return None
    function = query["fn"] if query.get("fn") in functions else functions[0]
    scored = [(run, bar, bar.parts) for run in found for bar in run.scores if bar.function == function and bar.parts]
    if len(scored) < 2:
        return None
    points = [
        Point(
            18 + 570 * index / (len(scored) - 1), 110 - parts[0], 110 - parts[1], 110 - parts[2], run, bar.mean or 0.0
        )
        for index, (run, bar, parts) in enumerate(scored)
        if parts is not None
    ]
    return Chart(dataset, function, functions, points)


def _filter(query: Mapping[str, str]) -> RowFilter:
    return RowFilter(
        status=_STATUSES.get(query.get("status")),
        function=query.get("fn") or None,
        low=_float(query.get("min")),
        high=_float(query.get("max")),
        kind=query.get("kind") or None,
        message=query.get("message") or None,
        tool=query.get("tool") or None,
        text=query.get("q") or None,
        sort=query.get("sort") or "row",
    )


_STATUSES: dict[str | None, Selected] = {"failed": "failed", "passed": "passed", "not-passed": "not-passed",
                                         "tool-errors": "tool-errors"}  # fmt: skip


def _float(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _number(text: str | None, default: int = 0) -> int:
    # A number of more digits isn't a position, and int() refuses thousands of them.
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else default


def _without(query: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in query.items() if name not in names}


def threshold_of(run: RunInfo) -> float:
    return float(run.config.get("pass_threshold", 1.0))


def _functions(run: RunInfo, figures: Figures | None) -> list[str]:
    known = [str(name) for name in run.config.get("functions") or ()]
    return list(dict.fromkeys([*known, *(figures.statistics if figures is not None else ())]))


def _policy(outcome: Outcome) -> str | None:
    return None if outcome.policy == "policy" else outcome.policy


def _listed_row(store: Repository, run: RunInfo, row: int) -> ListedRow:
    found = store.runs.page(run.id, [row])
    if not found:
        raise StoreError(f"run {run.id} has no row {row}")
    return found[0]


def _chosen(listed: ListedRow, query: Mapping[str, str]) -> Outcome:
    policy, attempt = query.get("policy") or "policy", _number(query.get("attempt"), -1)
    for outcome in listed.outcomes:
        if outcome.run_index == attempt and outcome.policy == policy:
            return outcome
    return listed.outcomes[0]


def table_row(listed: ListedRow, run: RunInfo, query: Mapping[str, str], url: Address) -> TableRow:
    index, outcomes = listed.row.index, listed.outcomes
    attempts = [
        attempt_cell(
            outcome, run, query, url.at(f"/rows/{index}", attempt=outcome.run_index or None, policy=_policy(outcome))
        )
        for outcome in outcomes[:SHOWN_ATTEMPTS]
    ]
    problems = [failure_line(failure) for outcome in outcomes if (failure := _problem(outcome)) is not None]
    return TableRow(
        index,
        url.at(f"/rows/{index}"),
        excerpt(listed.row.user_prompt, 200),
        attempts,
        max(len(outcomes) - SHOWN_ATTEMPTS, 0),
        sum(outcome.usage.total_tokens for outcome in outcomes),
        sum(len(outcome.calls) for outcome in outcomes),
        sum(outcome.duration_ms for outcome in outcomes),
        excerpt(problems[0], 200) if problems else "",
    )


def _problem(outcome: Outcome) -> Failure | None:
    failures = (score.failure for score in outcome.scores.values() if score.failure is not None)
    return outcome.failure or next(failures, None)


def attempt_cell(outcome: Outcome, run: RunInfo, query: Mapping[str, str], url: str) -> Attempt:
    whose = "baseline, " if outcome.policy == "baseline" else ""
    title = f"{whose}attempt {outcome.run_index}: "
    if outcome.failure is not None:
        return Attempt(url, "✗", "failed", title + excerpt(failure_line(outcome.failure), 200))
    scores = outcome.scores
    if query.get("fn") in scores:
        scores = {query["fn"]: scores[query["fn"]]}
    told = "; ".join(f"{name} {_score_words(score)}" for name, score in scores.items()) or outcome.finish_reason
    values = [score.value for score in scores.values() if score.value is not None]
    if len(values) < len(scores):
        return Attempt(url, "!", "unscored", title + excerpt(told, 400))
    if not values:
        return Attempt(url, "–", "plain", title + told)
    mean, threshold = sum(values) / len(values), threshold_of(run)
    passes = all(value >= threshold for value in values)
    part = 0 if threshold <= 0 else max(min(int(mean / threshold * 3), 2), 0)
    return Attempt(url, f"{mean:.3g}", "passed" if passes else f"part{part}", title + excerpt(told, 400))


def _score_words(score: Score) -> str:
    return score_number(score.value) if score.failure is None else failure_line(score.failure)


def _beside(selection: Selection, row: int, step: int, run_url: Address) -> str | None:
    position = selection.position(row)
    if position is None or not 0 <= position + step < len(selection):
        return None
    return run_url.at(f"/rows/{selection.rows[position + step]}")


def _next_in(selection: Selection, row: int, run_url: Address) -> str | None:
    following = next((index for index in selection.rows if index > row), None)
    return None if following is None else run_url.at(f"/rows/{following}")


def _log_lines(store: Repository, run: RunInfo, row: int, run_index: int) -> list[str]:
    """Return what this rollout's code printed, from the end of the run's logs."""
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
