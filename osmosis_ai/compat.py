"""Names kept for repositories and scripts written for earlier versions.

New code doesn't need them. Everything kept for compatibility alone is defined or listed here:

- `osmosis_ai.rollout` exports every name of the rollout SDK, because agent loops in training repositories import from
  there.
- `osmosis_ai.rollout.core.base`, `.core.schemas` and `.core.exceptions` are the modules that once held those names. The
  errors have moved to `osmosis_ai.errors`; `core/exceptions.py` only re-exports them.
- `serve_agent_loop(skip_register=…)` and `osmosis serve --skip-register`: earlier versions registered loops with the
  platform; nothing is registered now.
- `FLAGS` and `COMMANDS`: options and commands released under a second name. `osmosis preview --path FILE` is the second
  form of `osmosis preview FILE`.
- `EXTRAS` of `pip install osmosis-ai[…]`: the base install holds what they added; two used to add the MCP packages.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COMMANDS", "EXTRAS", "FLAGS"]

EXTRAS = {"mcp": True, "server": False, "full": True}
"""The extras that are empty now; True for those that used to add the MCP packages."""

FLAGS: Mapping[str, tuple[str, ...]] = {
    "--dataset": ("--data",),
    "--module": ("--agent",),
    "--n": ("--number", "-n"),
}
"""Second names of options, by current name."""

COMMANDS: Mapping[str, str] = {
    "eval rubric": "eval-rubric",
    "login": "auth login",
    "logout": "auth logout",
    "whoami": "auth whoami",
}
"""Current names of commands, by second name."""
