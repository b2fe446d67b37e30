"""Check a rollout server with one row: it starts, works on the row without a model, and grades it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from osmosis_ai.config import RunConfig
from osmosis_ai.data.dataset import open_dataset
from osmosis_ai.data.formats import FORMATS
from osmosis_ai.discovery.eval_configs import read_eval_config
from osmosis_ai.discovery.scan import Component
from osmosis_ai.discovery.workflows import WorkflowSource
from osmosis_ai.errors import DatasetError, RepositoryError, StartError, UsageError
from osmosis_ai.records import Failure, Row
from osmosis_ai.runtime.run.session import run
from osmosis_ai.runtime.worker.workflows.environments import interpreter_of
from osmosis_ai.store.queries import Queries, ScoredRollout
from osmosis_ai.validate.findings import Finding, Place, finding
from osmosis_ai.validate.ignoring import ignored_codes, split_ignored
from osmosis_ai.validate.validation import Validation

__all__ = ["validate_rollout"]

MODEL = "offline/oracle"
"""The stand-in that replies with the row's solution or ground truth, without a network or a key."""
MAX_ROWS = 1000
"""Rows searched for one with a right answer."""
MADE_UP = {"system_prompt": "Answer with one word.", "user_prompt": "Say yes.", "ground_truth": "yes"}
GRADING = {"no_ground_truth": "OSM706", "timeout": "OSM704", "no_report": "OSM704"}
"""The codes of failed gradings, by the kind of failure."""
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def validate_rollout(source: WorkflowSource, root: Path, dataset: Path | None, seconds: float) -> Validation:
    """Check a rollout.

    Args:
        source: The rollout.
        root: Its workspace.
        dataset: The file to take the row from; None for the one that an eval config names for the rollout, else the one
            of its name in `data`, else a made-up row.
        seconds: Time limit for the workflow, and for the grader.
    """
    entrypoint = os.path.relpath(source.entrypoint, root)
    components = [Component("rollout", source.name, entrypoint, 1, source.name)]
    with TemporaryDirectory(prefix="osmosis-") as folder:
        found = list(_check(source, root, dataset or _dataset(source, root), seconds, Path(folder)))
    findings, ignored = split_ignored(found, ignored_codes([], root), root)
    return Validation(components, findings, [], ignored=ignored)


def _check(source: WorkflowSource, root: Path, dataset: Path | None, seconds: float, folder: Path) -> Iterator[Finding]:
    script = Place(os.path.relpath(source.entrypoint, root), subject=source.name)
    try:
        interpreter_of(source)
    except RepositoryError as error:
        yield finding("OSM701", str(error), Place(os.path.relpath(Path(source.folder, "pyproject.toml"), root)))
        return
    file, row = dataset, None if dataset is None else _first_row(dataset)
    if file is None or row is None:
        file = folder / "row.jsonl"
        file.write_bytes(msgspec.json.encode(MADE_UP))
    config = RunConfig.of(
        rollout=source.entrypoint,
        sdk="own" if source.own_sdk else "declared",
        dataset=str(file),
        rows=str(0 if row is None else row.index),
        model=MODEL,
        workers=1,
        timeout=seconds,
        reward_timeout=seconds,
        # A check leaves no run in the repository's own store.
        store=str(folder),
        keep_going=True,
    )
    try:
        report = run(config, directory=root)
    except StartError as error:
        message, _, output = str(error).partition("\n")
        yield finding("OSM702", f"{message}\n{output}".rstrip(), _raised_at(output, source, root) or script)
        return
    # The run has one row and one attempt.
    (scored,) = Queries(Path(report.store)).scored(report.run_id, with_trajectory=True)
    yield from _judge(scored, source, script, right=row is not None)


def _judge(scored: ScoredRollout, source: WorkflowSource, script: Place, *, right: bool) -> Iterator[Finding]:
    """Yield what is wrong with a rollout on a row; `right` if its replies were the row's own right answer."""
    rollout = scored.stored.rollout
    failure, score = rollout.failure, scored.scores.get(source.name)
    if failure is not None:
        code = "OSM704" if failure.origin == "timeout" else "OSM703"
        yield finding(code, failure.message, _at(failure, script))
    elif not rollout.turns:
        yield finding(
            "OSM705", "the workflow made no model call", script, "Call the model at get_rollout_context()'s address."
        )
    if failure is not None:
        return
    if score is None:
        if rollout.finish_reason != "removed":
            yield finding("OSM706", "no reward came back", script)
    elif score.failure is not None:
        code = GRADING.get(score.failure.kind, "OSM707")
        yield finding(code, score.failure.message, _at(score.failure, script))
    elif right and score.value is not None and score.value < 1:
        message = f"row {rollout.row_index} has the reward {score.value:g} with its own solution or ground truth"
        yield finding("OSM708", message, script, "Correct the row, or what the grader accepts.")


def _at(failure: Failure, script: Place) -> Place:
    return script if failure.file is None else Place(failure.file, failure.line, script.subject)


def _raised_at(output: str, source: WorkflowSource, root: Path) -> Place | None:
    """Return the last place of the rollout's own code in a traceback."""
    frames = [match for match in FRAME.finditer(output) if Path(match["file"]).is_relative_to(source.folder)]
    if not frames:
        return None
    return Place(os.path.relpath(frames[-1]["file"], root), int(frames[-1]["line"]), source.name)


def _dataset(source: WorkflowSource, root: Path) -> Path | None:
    """Return the dataset that an eval config names for the rollout, else the one of its name in `data`."""
    for config in sorted((root / "configs" / "eval").glob("*.toml")):
        with suppress(UsageError):
            options = read_eval_config(str(config), root).options
            if options["rollout"] == source.entrypoint and "dataset" in options:
                return Path(options["dataset"])
    files = [root / "data" / f"{source.name}{form.suffix}" for form in FORMATS]
    return next((file for file in files if file.is_file()), None)


def _first_row(dataset: Path) -> Row | None:
    """Return the first row with a right answer."""
    with suppress(DatasetError):
        for row in islice(open_dataset(dataset, bare=True).scan(), MAX_ROWS):
            if isinstance(row, Row) and (row.ground_truth is not None or row.solution is not None):
                return row
    return None
