"""Write a run as the files that the tools of rollout servers read: metrics, an index, a journal, trajectories.

`docs/workflows.md` describes the files. The journal is written during the run. At the end of the run, all files are
written from the run store into a temporary folder, which then replaces an earlier folder of the same run.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import IO, Literal, TypeAlias

import msgspec

from osmosis_ai import __version__
from osmosis_ai.data.dataset import open_dataset
from osmosis_ai.errors import DatasetError, OutputError, UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.masking import MASK, Masker
from osmosis_ai.records import Failure, JsonObject, Record, Rollout, Score, TokenIds
from osmosis_ai.reward_fn.statistics import pass_at_powers_of_2
from osmosis_ai.row_numbers import RowNumbers
from osmosis_ai.runtime.logs import run_logs
from osmosis_ai.runtime.run import events
from osmosis_ai.runtime.run.events import RunEvent
from osmosis_ai.runtime.run.plan import POLICY
from osmosis_ai.runtime.run.report import Report
from osmosis_ai.runtime.worker.workflows.outcome import error_type
from osmosis_ai.store.queries import Queries, RunInfo, ScoredRollout
from osmosis_ai.text import iso_time

__all__ = ["Journal", "check_folder", "write_eval_files"]

SCHEMA_VERSION = 1
REDACTED = "[REDACTED]"
MANIFEST = "manifest.json"
JOURNAL = "events.jsonl"
Status: TypeAlias = Literal["success", "failed", "skipped"]


class Item(Record, frozen=True, omit_defaults=False):
    """One line of the index. `row_index` is the row's place in the run, `source_row_index` that in the file."""

    row_index: int
    run_index: int
    rollout_id: str
    status: Status
    source_row_index: int
    reward: float | None
    tokens: int | None
    duration_ms: float
    error_type: str | None


class _Logged(Record, frozen=True):
    """An item with its log message. The time is in seconds since the epoch."""

    at: float
    item: Item
    failure: Failure | None


def check_folder(given: str, cwd: Path) -> Path:
    """Return the folder for runs' folders, and create it before the run rather than after it; raise UsageError."""
    folder = given_path(given, cwd)
    if folder.suffix == ".json" or folder.is_file():
        raise UsageError(f"-o {given}: `osmosis eval run` writes a folder of files; name one, or use --json > {given}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"-o {given} can't be written: {error.strerror or error}") from None
    return folder


def write_eval_files(folder: Path, report: Report, masker: Masker) -> Path:
    """Write a run's files into a folder of the run's name in `folder`, and return that.

    An earlier folder of the same run is replaced. One of another run of this name is kept, with its time in its name.

    Raises:
        OutputError: The files can't be written.
        StoreError: The run store can't be read.
    """
    store = Queries(Path(report.store))
    info = store.find_run(report.run_id)
    target = folder / str(info.config.get("name") or info.id)
    try:
        aside = Path(tempfile.mkdtemp(prefix=".osmosis-", suffix=".partial", dir=folder))
        try:
            _Files(aside, report, info, store, masker).write()
            # Readable for others, as any new folder.
            aside.chmod(0o755)
            _put(aside, target, info.id)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{target} could not be written: {error.strerror or error}") from error
    return target


class Journal:
    """The journal of a run in progress: `add` writes a line for each rollout, as it ends.

    The journal of a continued run starts with the lines of its recorded rollouts, except those that run `again`. Raises
    OutputError, like `add`, if the file can't be written.
    """

    def __init__(
        self, folder: Path, run_id: str, store: Path, masker: Masker, planned: int, *, again: bool = False
    ) -> None:
        queries = Queries(store)
        info = queries.find_run(run_id)
        self._items = _Items(info)
        self._masker = masker
        self._waiting: dict[tuple[int, int], Rollout] = {}
        target = folder / str(info.config.get("name") or info.id)
        stored = queries.scored(run_id, with_trajectory=True)
        items = (self._items.of(each) for each in stored if each.stored.rollout.policy == POLICY)
        recorded = sorted(items, key=lambda each: each.at)
        try:
            if target.exists() and _run_in(target) != run_id:
                target.rename(_archived(target))
            target.mkdir(exist_ok=True)
            manifest = masker.encoded(msgspec.json.encode(_manifest(info, store)))
            (target / MANIFEST).write_bytes(msgspec.json.format(manifest, indent=2) + b"\n")
            # Unbuffered, so that a killed run leaves every line that it reported.
            self._file = (target / JOURNAL).open("wb", buffering=0)
        except OSError as error:
            raise OutputError(f"{target} could not be written: {error.strerror or error}") from error
        self._write(_started(info, planned))
        for each in recorded:
            if not (again and each.failure is not None):
                self._write(_completed(each))

    def add(self, event: RunEvent) -> None:
        """Record a rollout's event."""
        if isinstance(event, events.RolloutDone) and event.rollout.policy == POLICY:
            rollout = event.rollout
            own = rollout.agent.score if rollout.agent is not None else None
            if own is None and rollout.failure is None and rollout.finish_reason != "removed":
                # A function scores it.
                self._waiting[rollout.row_index, rollout.run_index] = rollout
            else:
                self._complete(rollout, [] if own is None else [own])
        elif isinstance(event, events.RolloutScored) and event.policy == POLICY:
            waiting = self._waiting.pop((event.row_index, event.run_index), None)
            if waiting is not None:
                self._complete(waiting, event.scores)

    def close(self) -> None:
        """Add the rollouts that nothing has scored, and close the file."""
        for rollout in self._waiting.values():
            self._complete(rollout, [])
        self._file.close()

    def _complete(self, rollout: Rollout, scores: Iterable[Score]) -> None:
        by_function = {each.function: each for each in scores}
        self._write(_completed(self._items.logged(rollout, len(rollout.turns), by_function, time.time())))

    def _write(self, event: JsonObject) -> None:
        try:
            self._file.write(self._masker.encoded(msgspec.json.encode(event)) + b"\n")
        except OSError as error:
            raise OutputError(f"{self._file.name} could not be written: {error.strerror or error}") from error


def _put(aside: Path, target: Path, run_id: str) -> None:
    """Rename the new folder to its final name, after moving away an existing folder of that name."""
    old = None
    if target.exists():
        same = _run_in(target) == run_id
        moved = _archived(target)
        target.rename(moved)
        # The folder of another run with this name is kept.
        old = moved if same else None
    aside.rename(target)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _run_in(folder: Path) -> object:
    """Return the id of the run whose files are in a folder, or None if unknown."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=dict[str, object]).get("local_run_id")
    except (OSError, msgspec.DecodeError):
        return None


def _archived(folder: Path) -> Path:
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S%fZ")
    return folder.with_name(f"{folder.name}.archive-{stamp}")


class _Items:
    """Makes the items of one run's rollouts."""

    def __init__(self, info: RunInfo) -> None:
        rows = info.identity.get("rows") or {}
        self._offset = int(rows.get("offset") or 0)
        self._only = RowNumbers(rows["rows"]) if rows.get("rows") else None

    def of(self, scored: ScoredRollout) -> _Logged:
        """Return a stored rollout's item with its log message."""
        stored = scored.stored
        return self.logged(stored.rollout, stored.turns, scored.scores, stored.finished_at)

    def logged(self, rollout: Rollout, turns: int, scores: Mapping[str, Score], at: float) -> _Logged:
        """Return the item of a rollout with `turns` turns, with its log message."""
        failure, score = _judged(rollout, scores)
        removed = rollout.finish_reason == "removed"
        item = Item(
            row_index=rollout.row_index - self._offset if self._only is None else self._only.place(rollout.row_index),
            run_index=rollout.run_index,
            rollout_id=rollout.id,
            status="skipped" if removed else "success" if failure is None else "failed",
            source_row_index=rollout.row_index,
            reward=None if score is None else score.value,
            # Null if the model was never called.
            tokens=rollout.usage.total_tokens if turns else None,
            duration_ms=rollout.duration_ms,
            error_type=None if failure is None else error_type(failure),
        )
        return _Logged(at, item, failure)


def _started(info: RunInfo, planned: int) -> JsonObject:
    return {"at": iso_time(info.created_at), "type": "run_started", **_named(info), "total_runs": planned}


def _completed(logged: _Logged) -> JsonObject:
    error = {} if logged.failure is None else {"err_message": logged.failure.message}
    return {"at": iso_time(logged.at), "type": "item_completed", **msgspec.structs.asdict(logged.item), **error}


def _named(info: RunInfo) -> JsonObject:
    return {"run_id": info.id, "run_name": info.config.get("name")}


def _manifest(info: RunInfo, store: Path) -> JsonObject:
    return {
        "schema_version": SCHEMA_VERSION,
        "local_run_id": info.id,
        "run_name": info.config.get("name"),
        "created_at": iso_time(info.created_at),
        "inputs": info.identity,
        "provenance": {
            "osmosis_ai": __version__,
            "python": sys.version.split()[0],
            "store": str(store),
            "options": info.config.get("options", {}),
        },
    }


class _Files:
    """The files of one run, written into `folder`."""

    def __init__(self, folder: Path, report: Report, info: RunInfo, store: Queries, masker: Masker) -> None:
        self._folder = folder
        self._report = report
        self._info = info
        self._store = store
        self._masker = masker
        self._home = Path(report.store).parent
        self._items = _Items(info)
        self._logged: list[_Logged] = []

    def write(self) -> None:
        for name in ("trajectories", "artifacts"):
            (self._folder / name).mkdir()
        with (self._folder / "index.jsonl").open("wb") as index:
            for scored in self._store.scored(self._info.id, with_trajectory=True):
                if scored.stored.rollout.policy == POLICY:
                    self._add(scored, index)
        shutil.copyfile(self._folder / "index.jsonl", self._folder / "summary.jsonl")
        self._logged.sort(key=lambda logged: logged.at)
        self._write(MANIFEST, _manifest(self._info, Path(self._report.store)))
        self._write("progress.json", self._progress())
        self._write("metrics.json", self._metrics())
        journal = (msgspec.json.encode(event) for event, _ in self._events())
        self._write_lines(JOURNAL, map(self._masker.encoded, journal))
        self._write_lines("logs.txt", (self._redacted(line).encode() for line in self._log_lines()))
        self._write_lines("server.log", (self._redacted(line).encode() for line in self._server_lines()))

    def _add(self, scored: ScoredRollout, index: IO[bytes]) -> None:
        """Write a rollout's line, trajectory and artifacts."""
        rollout = scored.stored.rollout
        logged = self._items.of(scored)
        item = logged.item
        name = f"row_{item.row_index}_run_{item.run_index}"
        index.write(msgspec.json.encode(item) + b"\n")
        self._logged.append(logged)
        self._write(f"trajectories/{name}.json", _trajectory(scored, item, self._report.policy.model))
        # A second attempt's are the latest.
        written = sorted((self._home / "artifacts").glob(f"{rollout.id}*/artifacts"), key=os.path.getmtime)
        if written and any(written[-1].iterdir()):
            shutil.copytree(written[-1], self._folder / "artifacts" / name, symlinks=True)

    def _progress(self) -> JsonObject:
        try:
            total = open_dataset(Path(self._report.dataset)).count()
        except DatasetError:
            # The dataset has changed since; it had at least these rows.
            total = self._report.rows
        planned = self._report.policy.planned
        return {"total_runs": planned, "sampled_rows": self._report.rows, "total_dataset_rows": total}

    def _metrics(self) -> JsonObject:
        report, info = self._report, self._info
        items = [logged.item for logged in self._logged]
        statuses = Counter(item.status for item in items)
        rewards = [item.reward for item in items if item.reward is not None]
        passed = sum(reward >= report.pass_threshold for reward in rewards)
        counted = len(items) - statuses["skipped"]
        summary: JsonObject = {
            "total_samples": report.policy.planned,
            "completed_samples": len(items),
            "graded": len(rewards),
            "passed": passed,
            "failed": statuses["failed"],
            "skipped": statuses["skipped"],
            "pass_rate": passed / counted if counted else 0.0,
            "pass_threshold": report.pass_threshold,
            "tokens_used": sum(item.tokens or 0 for item in items),
            "reward_stats": _reward_stats(rewards),
        }
        if report.n > 1:
            summary |= {"n_runs": report.n, "pass_at_k": _pass_at_k(items, report.n, report.pass_threshold)}
        return {
            "eval_run": {
                "id": info.id,
                "status": self._status,
                "name": info.config.get("name"),
                "dataset_name": Path(report.dataset).stem,
                "model_name": report.policy.model,
                "rollout_name": report.agent,
                "duration_ms": round(((info.finished_at or info.created_at) - info.created_at) * 1000, 1),
                "started_at": iso_time(info.created_at),
                "completed_at": iso_time(info.finished_at) if info.finished_at and self._report.complete else None,
            },
            "summary": summary,
        }

    @property
    def _status(self) -> str:
        return "finished" if self._report.complete else "incomplete"

    def _events(self) -> Iterator[tuple[JsonObject, Failure | None]]:
        """Yield the run's events in the order of their times, with the failures of failed items."""
        info = self._info
        yield _started(info, self._report.policy.planned), None
        for logged in self._logged:
            yield _completed(logged), logged.failure
        if info.finished_at is not None:
            yield {"at": iso_time(info.finished_at), "type": f"run_{self._status}", **_named(info)}, None

    def _log_lines(self) -> Iterator[str]:
        for event, failure in self._events():
            level, step, said = "INFO", "run", event["type"].replace("_", " ")
            details = {name: value for name, value in event.items() if name not in ("at", "type") and value is not None}
            if event["type"] == "item_completed":
                step, said = f"row {event['row_index']} run {event['run_index']}", event["status"]
            if failure is not None:
                level, said = "ERROR", failure.message.partition("\n")[0]
                found = {"file": failure.file, "line": failure.line, "traceback": failure.detail}
                details |= {name: value for name, value in found.items() if value is not None}
            yield f"{event['at']} {level} [{step}] {said} {msgspec.json.encode(details).decode()}"

    def _server_lines(self) -> Iterator[str]:
        """Yield the output of the rollout server, of all parts of a run that was continued."""
        for log in run_logs(self._home, self._info.id):
            with log.open(encoding="utf-8", errors="replace") as file:
                yield from (line.rstrip("\n") for line in file)

    def _redacted(self, line: str) -> str:
        return self._masker.text(line).replace(MASK, REDACTED)

    def _write(self, name: str, content: JsonObject) -> None:
        encoded = self._masker.encoded(msgspec.json.encode(content))
        (self._folder / name).write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

    def _write_lines(self, name: str, lines: Iterator[bytes]) -> None:
        with (self._folder / name).open("wb") as file:
            for line in lines:
                file.write(line + b"\n")


def _judged(rollout: Rollout, scores: Mapping[str, Score]) -> tuple[Failure | None, Score | None]:
    """Return why an item failed, if it did, and the grader's score; without a grader, that of the only function."""
    own = None if rollout.agent is None else scores.get(rollout.agent.name)
    score = own or (next(iter(scores.values())) if len(scores) == 1 else None)
    if rollout.failure is not None or rollout.finish_reason == "removed":
        return rollout.failure, None
    if score is not None and score.failure is not None:
        return score.failure, None
    if score is None:
        return Failure("agent", f"the rollout has no reward; it ended with {rollout.finish_reason}"), None
    return None, score


def _trajectory(scored: ScoredRollout, item: Item, model: str) -> JsonObject:
    from osmosis_ai.rollout.trajectory.conversion import convert_sample_to_trajectory
    from osmosis_ai.rollout.trajectory.report import LlmCallMetrics, SampleReport
    from osmosis_ai.rollout.types import RolloutSample

    rollout, row = scored.stored.rollout, scored.row
    calls = []
    for turn in rollout.turns:
        tokens = turn.token_ids or TokenIds()
        logprobs = None if turn.logprobs is None else turn.logprobs.content
        calls.append(
            LlmCallMetrics(
                prompt_tokens=turn.usage.prompt_tokens,
                completion_tokens=turn.usage.completion_tokens,
                cost_usd=turn.cost_usd,
                prompt_token_ids=tokens.prompt_token_ids,
                completion_token_ids=tokens.token_ids,
                logprobs=None if logprobs is None else [token.logprob for token in logprobs],
                model_name=turn.model,
            )
        )
    sample = RolloutSample(
        messages=rollout.messages,
        label=row.ground_truth,
        reward=item.reward,
        metrics={} if rollout.agent is None else rollout.agent.metrics,
    )
    metadata = row.extra.get("metadata")
    return convert_sample_to_trajectory(
        sample,
        rollout_id=rollout.id,
        request_metadata=metadata if isinstance(metadata, dict) else None,
        report=SampleReport(model_name=model, llm_call_metrics=calls),
    ).to_json_dict()


def _reward_stats(rewards: list[float]) -> JsonObject | None:
    if not rewards:
        return None
    return {
        "mean": statistics.fmean(rewards),
        "median": statistics.median(rewards),
        "std": statistics.pstdev(rewards),
        "min": min(rewards),
        "max": max(rewards),
    }


def _pass_at_k(items: list[Item], n: int, threshold: float) -> list[JsonObject]:
    """Return pass@k for k = 1, 2, 4, … up to n."""
    kept = sorted((item for item in items if item.status != "skipped"), key=lambda item: item.row_index)
    rows = []
    for _, attempts in groupby(kept, key=lambda item: item.row_index):
        rewards = [attempt.reward for attempt in attempts]
        rows.append((len(rewards), sum(reward is not None and reward >= threshold for reward in rewards)))
    return [{"k": k, "value": value} for k, value in pass_at_powers_of_2(rows, n).items()]
