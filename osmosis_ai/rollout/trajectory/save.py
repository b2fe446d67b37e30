"""Write the trajectory and the diagnostics of a finished rollout into its folder."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio.to_thread
import msgspec

from osmosis_ai.records import JsonObject
from osmosis_ai.rollout.artifacts import artifact_root as default_root
from osmosis_ai.rollout.trajectory.conversion import convert_sample_to_trajectory
from osmosis_ai.rollout.trajectory.report import SampleReport, TrajectoryReport
from osmosis_ai.rollout.types import ExecutionResult

__all__ = ["save_trajectory"]

logger = logging.getLogger(__name__)


async def save_trajectory(
    *,
    rollout_id: str,
    result: ExecutionResult,
    request_label: str | None = None,
    request_metadata: JsonObject | None = None,
    request_extra_fields: JsonObject | None = None,
    report: TrajectoryReport | None = None,
    artifact_root: Path | None = None,
    diagnostics: JsonObject | None = None,
) -> None:
    """Write `trajectory.json` and `diagnostics.json`. A failure is logged, never raised.

    A rollout with several samples has a `trajectory-<number>.json` for each.

    Args:
        rollout_id: The rollout's id, one path segment.
        result: Its result.
        request_label: The label of its request.
        request_metadata: The metadata of its request.
        request_extra_fields: Further fields of its request.
        report: The controller's report on its model calls.
        artifact_root: The folder with one subfolder per rollout. Default: as `artifacts.artifact_root`.
        diagnostics: The content of `diagnostics.json`. Default: the result's `extra_fields`.
    """
    files: dict[str, object] = {}
    details = result.extra_fields if diagnostics is None else diagnostics
    if details is not None:
        files["diagnostics.json"] = details
    samples = list(result.samples.values()) or [*filter(None, [result.sample])]
    matched, unmatched = _matched(report)
    try:
        for number, sample in enumerate(samples, 1):
            if sample.trajectory_messages is None:
                continue
            trajectory = convert_sample_to_trajectory(
                sample,
                rollout_id=rollout_id,
                request_label=request_label,
                request_metadata=request_metadata,
                request_extra_fields=request_extra_fields,
                report=matched if len(samples) == 1 else None,
                default_model_name=report.model_name if report else None,
                unmatched_sample_reports=unmatched,
            )
            name = "trajectory.json" if len(samples) == 1 else f"trajectory-{number}.json"
            files[name] = trajectory.to_json_dict()
        folder = (artifact_root or default_root()) / rollout_id
        await anyio.to_thread.run_sync(_write, folder, files)
    except Exception as error:  # noqa: BLE001  a framework's messages may hold anything
        logger.warning("the trajectory of rollout %s isn't saved: %s", rollout_id, error)


def _matched(report: TrajectoryReport | None) -> tuple[SampleReport | None, dict[str, SampleReport] | None]:
    """Return the report of the only sample, or else all reports, which can't be matched to samples."""
    samples = report.samples if report else {}
    return (next(iter(samples.values()), None), None) if len(samples) <= 1 else (None, samples)


def _write(folder: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        folder.mkdir(parents=True, exist_ok=True)
        # What JSON doesn't know, such as a path, becomes its text.
        data = msgspec.json.encode(content, enc_hook=str)
        (folder / name).write_bytes(msgspec.json.format(data, indent=2))
