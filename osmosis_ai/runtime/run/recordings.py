"""The recordings of a run: the cassettes of its models and judges, and the recordings that stay unused."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.models.cassette import judge_file, policy_file, prune, unused_recordings
from osmosis_ai.records import CassetteSpec
from osmosis_ai.reward_rubric.target import cassette_variables
from osmosis_ai.text import counted

__all__ = ["Recordings", "find_recordings", "open_recordings"]


class Recordings(NamedTuple):
    """The cassettes of one or more runs, and the folder or file that the user named."""

    policy: CassetteSpec
    judges: CassetteSpec
    shown: str

    @property
    def variables(self) -> dict[str, str]:
        """The variables that tell a process which recordings its judge calls use."""
        return cassette_variables(self.judges)

    @property
    def banner(self) -> str:
        """How the run uses the recordings, for the report."""
        if self.policy.mode == "replay":
            return f"replies are replayed from {self.shown}; no model is called"
        return f"replies are recorded in {self.shown}"

    def tidy(self) -> None:
        """Sort the lines of the files that were written; raise StartError if that fails."""
        for spec in (self.policy, self.judges):
            if spec.mode == "record":
                prune(Path(spec.path))

    def unused(self, cassettes: Iterable[CassetteSpec]) -> list[str]:
        """Report recordings in these cassettes that no process used."""
        reports = []
        for cassette in cassettes:
            count = len(unused_recordings(cassette))
            if count:
                was = "was" if count == 1 else "were"
                reports.append(f"{counted(count, 'recording')} in {Path(cassette.path).name} {was} not used")
        return reports


@contextmanager
def find_recordings(record: str | None, replay: str | None, cwd: Path) -> Iterator[Recordings | None]:
    """Open the recordings that `--record` or `--replay` names, if any; raise UsageError if there are none to replay."""
    if record is not None and replay is not None:
        raise UsageError("--record and --replay exclude each other: --record already replays recorded requests")
    given = record or replay
    if given is None:
        yield None
        return
    again = f"record it with the same command and --record {given}"
    with open_recordings(given_path(given, cwd), given, replay=replay is not None, advice=again) as recordings:
        try:
            yield recordings
        finally:
            recordings.tidy()


@contextmanager
def open_recordings(path: Path, shown: str, *, replay: bool, advice: str) -> Iterator[Recordings]:
    """Open the recordings in a folder, or in a `.jsonl` file; `advice` says in an error message how to record.

    Raises UsageError if there are none to replay.
    """
    policy, judges = policy_file(path), judge_file(path)
    if replay and not policy.is_file() and not judges.is_file():
        raise UsageError(f"there are no recordings in {shown}; {advice}")
    with tempfile.TemporaryDirectory(prefix="osmosis-") as folder:
        policy_spec, judge_spec = (
            CassetteSpec(str(file), "replay" if replay else "record", str(Path(folder, name)), advice)
            for file, name in ((policy, "policy"), (judges, "judges"))
        )
        yield Recordings(policy_spec, judge_spec, shown)
