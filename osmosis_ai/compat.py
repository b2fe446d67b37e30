"""Names that stay because repositories and scripts written for earlier versions use them.

New code has no need of them; whatever is here for that reason alone stands in this file, with what it stands for.

- `osmosis_ai.rollout` gives every name of the rollout SDK, wherever it lives: agent loops in training repositories
  import them so.
- `osmosis_ai.rollout.core.base`, `.core.schemas` and `.core.exceptions`: the modules those names lived in. The
  errors have moved to `osmosis_ai.errors`; `core/exceptions.py` holds nothing but their names.
- `serve_agent_loop(skip_register=…)` and `osmosis serve --skip-register`: loops were registered with the platform;
  nothing is registered now.
- `FLAGS` and `COMMANDS`: options and commands that were released under another name too.
- `NOT_OFFERED`: commands of the platform. They exist to say what works locally instead.
- `EXTRAS` of `pip install osmosis-ai[…]`: everything is in the base install; two used to bring the MCP packages.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COMMANDS", "EXTRAS", "FLAGS", "NOT_OFFERED"]

EXTRAS = {"mcp": True, "server": False, "full": True}
"""The empty extras; True for those that brought the MCP packages."""

FLAGS: Mapping[str, tuple[str, ...]] = {"--dataset": ("--data",), "--module": ("--agent",)}
"""Other names of options, by the name of today."""

COMMANDS: Mapping[str, str] = {"eval rubric": "eval-rubric"}
"""The commands of today, by their other names."""

_ACCOUNT = "everything here runs locally, without an account"
_RUNS = "`osmosis eval` runs here, and `osmosis runs` lists what has run"
NOT_OFFERED: Mapping[str, str] = {
    "login": _ACCOUNT,
    "logout": _ACCOUNT,
    "whoami": _ACCOUNT,
    "workspace": f"{_ACCOUNT}: the folder you are in is the workspace",
    "train": "`osmosis validate` checks configs/training, and `osmosis serve` offers an agent to a trainer of yours",
    "dataset": "name a file with -d FILE; `osmosis preview` shows its rows",
    "secret": "put keys into the environment or into a .env file",
    "eval submit": f"{_RUNS}; `osmosis validate` checks configs/eval",
    "eval list": _RUNS,
    "eval info": "`osmosis runs show RUN` shows a run of this machine",
    "eval stop": "Ctrl-C stops a run here, and --resume goes on with it",
}
"""Commands that aren't offered yet, and what works locally instead."""
