"""Read the progress, metrics and checkpoints of a platform's training runs, if `osmosis train run` trains them.

Other trainers keep no record in the workspace's store, so the platform knows only their status and log.
"""

from __future__ import annotations

from pathlib import Path

from osmosis_ai.errors import OsmosisError
from osmosis_ai.platform.database import Row
from osmosis_ai.platform.errors import not_found
from osmosis_ai.platform.paging import iso
from osmosis_ai.platform.runs import duration_ms
from osmosis_ai.records import JsonObject
from osmosis_ai.training.record import MetricsLine, TrainingRecord, TrainingState

__all__ = ["checkpoints", "progress", "training_metrics"]

TITLES = {"rollouts": "Rollouts", "trainer": "Trainer", "evaluation": "Held-out rows"}


def progress(row: Row, store: Path) -> JsonObject:
    """Return a training run's progress; every field is null if another trainer trains it."""
    state = _state(row, store)
    if state is None:
        return {"current_step": None, "total_steps": None, "reward": None, "examples_processed_count": None}
    return {
        "current_step": state.step,
        "total_steps": state.total_steps,
        "reward": state.reward,
        "examples_processed_count": state.step * state.rollouts_per_step,
    }


def training_metrics(row: Row, store: Path) -> JsonObject:
    """Return a training run's metrics, one series each; raise ApiError if there are none yet."""
    state = _state(row, store)
    lines = [] if state is None else TrainingRecord(store, state.name).metrics()
    if state is None or not lines:
        raise not_found(f"the run {row['name']} has no metrics yet")
    series = [_series(lines, kind, name) for kind, name in dict.fromkeys((e.kind, n) for e in lines for n in e.metrics)]
    return {
        "status": row["status"],
        "overview": {
            "duration_ms": duration_ms(row),
            "metric_summaries": [_summary(one) for one in series],
            "examples_processed_count": state.step * state.rollouts_per_step,
            "latest_step": state.step,
            "total_steps": state.total_steps,
        },
        "metrics": series,
    }


def checkpoints(row: Row, store: Path) -> list[JsonObject]:
    """Return a training run's checkpoints, oldest first."""
    state = _state(row, store)
    return [
        {
            "id": f"{row['id']}-{each.step}",
            "checkpoint_step": each.step,
            "status": "ready",
            "checkpoint_name": Path(each.path).name,
            "created_at": iso(each.created_at),
        }
        for each in ([] if state is None else state.checkpoints)
    ]


def _state(row: Row, store: Path) -> TrainingState | None:
    record = TrainingRecord(store, str(row["name"]))
    try:
        return record.read() if record.exists else None
    except OsmosisError:
        # Another trainer may write a file of this name in its own format.
        return None


def _series(lines: list[MetricsLine], kind: str, name: str) -> JsonObject:
    points = [
        {"step": line.step, "value": line.metrics[name], "timestamp": round(line.time * 1000)}
        for line in lines
        if line.kind == kind and name in line.metrics
    ]
    return {"metric_key": f"{kind}/{name}", "title": f"{TITLES[kind]}: {name}", "data_points": points}


def _summary(series: JsonObject) -> JsonObject:
    values = [point["value"] for point in series["data_points"]]
    return {
        "key": series["metric_key"],
        "title": series["title"],
        "initial": values[0],
        "latest": values[-1],
        "delta": values[-1] - values[0],
        "min": min(values),
        "max": max(values),
    }
