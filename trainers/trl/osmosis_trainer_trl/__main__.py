"""`python -m osmosis_trainer_trl JOB.json`: run one training job, in a process that the runtime starts and stops.

Exits with 0 if the run is complete or the runtime stopped it, with 143 after SIGTERM, and otherwise with 1 and the
reason in the last line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path

from osmosis_trainer_trl.errors import ProtocolError, Stopped, TrainerError
from osmosis_trainer_trl.job import read_job
from osmosis_trainer_trl.runtime import Runtime

TOKEN_VARIABLE = "OSMOSIS_TRAINER_TOKEN"  # noqa: S105 - the variable's name


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m osmosis_trainer_trl JOB.json")
        return 2
    os.dup2(1, 2)  # keeps the libraries' warnings in order with the other lines of the log
    token = os.environ.pop(TOKEN_VARIABLE, "")
    # Model and tokenizer are local files, but the libraries would still ask the hub about them.
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    # The libraries' deprecation warnings are about each other; a user can't act on them.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|peft|transformers|trl)\b")
    try:
        if not token:
            raise ProtocolError(f"{TOKEN_VARIABLE} isn't set: `osmosis train run` starts the trainer with it")
        job = read_job(Path(sys.argv[1]))
        from osmosis_trainer_trl.training import serve, train  # imports torch, transformers and TRL: takes seconds

        {"train": train, "serve": serve}[job.mode](job, Runtime(job.runtime_url, token), token)
    except Stopped as stopped:
        print(f"stopped: {stopped}")
    except TrainerError as error:
        print(" ".join(str(error).split()))
        return 1
    except Exception as error:  # noqa: BLE001 - the log has its traceback, and the last line the reason
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    return 0


def _end_by_sigterm() -> None:
    """Exit on SIGTERM, from a thread: a handler waits until torch returns, which can take a whole backward pass."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any other thread starts, so that all inherit it

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


if __name__ == "__main__":
    _end_by_sigterm()
    sys.exit(main())
