"""The plan of a run: a config with all its names resolved and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from osmosis_ai.config import RunConfig
from osmosis_ai.data.dataset import DatasetSummary, open_dataset
from osmosis_ai.data.kept_rows import KeptRows, keep_rows
from osmosis_ai.models.choice import named_by_rows
from osmosis_ai.records import FunctionRef, ModelSpec, Record
from osmosis_ai.row_numbers import RowNumbers
from osmosis_ai.shards import Shard

__all__ = ["BASELINE", "POLICY", "RunPlan"]

POLICY = "policy"
BASELINE = "baseline"


class RunPlan(Record, frozen=True):
    """A config with all its names resolved.

    `root` is the repository's folder, `store` the folder of its runs, `dataset` the file. `policies` maps `policy`, and
    `baseline` if there is one, to models. `total_rows` is 0 until the dataset is counted. `agent` is the repository's
    own agent loop as named by the config, None for the built-in one; `agent_dir` is the folder of the tools' or the
    loop's code, if any. `entrypoint` is the script of a rollout server, relative to the root.
    """

    config: RunConfig
    root: str
    store: str
    dataset: str
    policies: dict[str, ModelSpec]
    functions: list[FunctionRef]
    total_rows: int = 0
    agent: str | None = None
    agent_dir: str | None = None
    entrypoint: str | None = None

    def with_dataset(self, summary: DatasetSummary) -> RunPlan:
        """Fill in the dataset's row count, and the stand-in that its rows allow."""
        references = summary.with_ground_truth + summary.with_solution > 0
        policies = {policy: named_by_rows(spec, references=references) for policy, spec in self.policies.items()}
        return msgspec.structs.replace(self, total_rows=summary.count, policies=policies)

    def keep_rows(
        self, folder: Path, progress: Callable[[int, int], None] | None = None
    ) -> tuple[DatasetSummary, KeptRows]:
        """Check the rows of the run, and keep them in a file in `folder`; see `kept_rows.keep_rows`."""
        data = self.config.data
        dataset = open_dataset(Path(self.dataset), bare=self.entrypoint is not None)
        only = None if data.rows is None else RowNumbers(data.rows)
        shard = None if data.shard is None else Shard.of(data.shard)
        return keep_rows(
            dataset, folder, offset=data.offset, limit=data.limit, only=only, shard=shard, progress=progress
        )

    @property
    def total_rollouts(self) -> int:
        """Number of rollouts to run."""
        return self.total_rows * self.config.scoring.n * len(self.policies)
