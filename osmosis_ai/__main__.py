"""Entry point of the commands `osmosis`, `osmosis-ai`, `osmosis_ai` and `python -m osmosis_ai`."""

import os
import sys

# `python -m` puts the working directory first on the path, and PYTHONPATH may contain it. It goes last before anything
# else is imported, because a repository's own files must not hide libraries.
try:
    here = os.getcwd()  # noqa: PTH109 - pathlib isn't imported yet
except OSError:
    here = ""  # the folder is gone; the command reports it
sys.path.sort(key=here.__eq__)


def main() -> None:
    """Run the command line."""
    import signal

    from osmosis_ai.cli.signals import ended_by_signal, forward_signals, interrupted_code
    from osmosis_ai.cli.status import STATUS
    from osmosis_ai.cli.streams import prepare_streams

    prepare_streams()
    forward_signals()
    try:
        from osmosis_ai.cli.early import show_status, start_early

        show_status(sys.argv[1:])
        start_early(sys.argv[1:])
        from osmosis_ai.cli.app import run

        code = run()
        # Only interpreter shutdown remains; a Ctrl-C there would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        code = interrupted_code()
    finally:
        STATUS.clear()
    sys.exit(interrupted_code() if code and ended_by_signal() else code)


if __name__ == "__main__":
    main()
