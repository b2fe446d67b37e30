"""What a run does, once everything that was asked for is found and checked."""

from __future__ import annotations

import msgspec

from osmosis_ai.config import RunConfig
from osmosis_ai.data.dataset import DatasetSummary
from osmosis_ai.models.choice import named_by_rows
from osmosis_ai.records import FunctionRef, ModelSpec, Record

__all__ = ["BASELINE", "POLICY", "RunPlan"]

POLICY = "policy"
BASELINE = "baseline"


class RunPlan(Record, frozen=True):
    """A config with everything it names resolved.

    `root` is the repository's folder, `dataset` the file; `policies` are the models, by `policy`, and `baseline` when
    one is compared; `total_rows` is 0 until the dataset has been counted. `agent` is the repository's own agent loop as
    it was asked for, None for the built-in one; `agent_dir` the folder of the tools' or the loop's code, if it has one.
    """

    config: RunConfig
    root: str
    dataset: str
    policies: dict[str, ModelSpec]
    functions: list[FunctionRef]
    total_rows: int = 0
    agent: str | None = None
    agent_dir: str | None = None

    def with_dataset(self, summary: DatasetSummary) -> RunPlan:
        """The plan, once its dataset is known: the number of rows, and which stand-in they let run."""
        references = summary.with_ground_truth + summary.with_solution > 0
        policies = {policy: named_by_rows(spec, references=references) for policy, spec in self.policies.items()}
        return msgspec.structs.replace(self, total_rows=summary.count, policies=policies)

    @property
    def total_rollouts(self) -> int:
        """The number of rollouts to run."""
        return self.total_rows * self.config.scoring.n * len(self.policies)
