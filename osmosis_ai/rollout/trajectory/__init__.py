"""Finished rollouts as trajectory files, in the Agent Trajectory Interchange Format (ATIF) 1.7."""

from __future__ import annotations

from osmosis_ai.rollout.trajectory.conversion import convert_sample_to_trajectory
from osmosis_ai.rollout.trajectory.report import TrajectoryReport, report_from_response
from osmosis_ai.rollout.trajectory.save import save_trajectory

__all__ = ["TrajectoryReport", "convert_sample_to_trajectory", "report_from_response", "save_trajectory"]
