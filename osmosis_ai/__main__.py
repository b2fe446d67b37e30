"""The commands `osmosis`, `osmosis-ai`, `osmosis_ai` and `python -m osmosis_ai`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    # Imported here because worker processes import this module again, and they need no command line.
    from osmosis_ai.runtime.forkserver import start_early

    start_early(sys.argv[1:])
    from osmosis_ai.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
