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
- `NOT_OFFERED`: commands of the platform, which tell the user what works locally instead.
- `EXTRAS` of `pip install osmosis-ai[…]`: the base install holds all of them; two used to add the MCP packages.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COMMANDS", "EXTRAS", "FLAGS", "NOT_OFFERED"]

EXTRAS = {"mcp": True, "server": False, "full": True}
"""The extras that are empty now; True for those that used to add the MCP packages."""

FLAGS: Mapping[str, tuple[str, ...]] = {
    "--dataset": ("--data",),
    "--module": ("--agent",),
    "--n": ("--number", "-n"),
}
"""Second names of options, by current name."""

COMMANDS: Mapping[str, str] = {"eval rubric": "eval-rubric"}
"""Current names of commands, by second name."""

_ACCOUNT = "everything here runs locally, without an account"
_RUNS = "`osmosis eval` runs locally, and `osmosis runs` lists past runs"
NOT_OFFERED: Mapping[str, str] = {
    "login": _ACCOUNT,
    "logout": _ACCOUNT,
    "whoami": _ACCOUNT,
    "workspace": f"{_ACCOUNT}: the folder you are in is the workspace",
    "train": "`osmosis validate` checks configs/training, and `osmosis serve` serves an agent to your own trainer",
    "dataset": "name a file with -d FILE; `osmosis preview` shows its rows",
    "secret": "put keys into the environment or into a .env file",
    "eval submit": f"{_RUNS}; `osmosis validate` checks configs/eval",
    "eval list": _RUNS,
    "eval info": "`osmosis runs show RUN` shows a run of this machine",
    "eval stop": "Ctrl-C stops a local run, and --resume continues it",
}
"""Commands not offered yet, and what works locally instead."""
