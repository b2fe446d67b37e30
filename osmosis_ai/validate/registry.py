"""All checks of a repository. To add one, write it in its area's module, and list its codes there and in `CODES`."""

from __future__ import annotations

from osmosis_ai.validate import functions, imports, judges, layout, rows, run_configs, state, tools, workcopy
from osmosis_ai.validate.findings import codes

__all__ = ["CHECKS", "CONTROLS", "FIRST", "LOADING", "ROLLOUTS", "SOLUTIONS"]

FIRST = layout.CHECKS
"""Run before anything is loaded, because they fill `Subject.components`."""

CHECKS = (
    *tools.CHECKS,
    *state.CHECKS,
    *functions.CHECKS,
    *judges.CHECKS,
    *imports.CHECKS,
    *rows.CHECKS,
    *run_configs.CHECKS,
    *workcopy.CHECKS,
)
"""Run after the server is loaded, if it can be, and before functions are."""

LOADING = "OSM009 OSM102 OSM103 OSM202 OSM203"
CONTROLS = codes(301, 320)
SOLUTIONS = "OSM122 OSM410 OSM411"
ROLLOUTS = codes(701, 708)
"""The codes reported by loading, by the controls of reward functions, by playing solutions, and for a rollout."""
