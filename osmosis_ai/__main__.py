"""Entry point of the commands `osmosis`, `osmosis-ai`, `osmosis_ai` and `python -m osmosis_ai`."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        from osmosis_ai.cli.early import start_early

        start_early(sys.argv[1:])
        from osmosis_ai.cli.app import run

        code = run()
        # Only interpreter shutdown remains; a Ctrl-C there would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
