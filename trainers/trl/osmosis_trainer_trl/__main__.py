"""`python -m osmosis_trainer_trl JOB.json`: one training run, as a process that the runtime starts and stops.

Ends with 0 when the run is complete or was stopped by the runtime, with 143 by SIGTERM, and otherwise with 1 and the
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
    os.dup2(1, 2)  # warnings of libraries stand where they belong in the log
    token = os.environ.pop(TOKEN_VARIABLE, "")
    # Model and tokenizer are files of this machine. The hub would be asked for them all the same.
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    # What the libraries deprecate in each other is nothing that a user could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|peft|transformers|trl)\b")
    try:
        if not token:
            raise ProtocolError(f"{TOKEN_VARIABLE} isn't set: `osmosis train run` starts the trainer with it")
        job = read_job(Path(sys.argv[1]))
        from osmosis_trainer_trl.training import serve, train  # seconds: torch, transformers, TRL

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
    """From a thread: a handler would wait until the main thread returns from torch, at worst a whole backward pass."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there are other threads, which inherit it

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


if __name__ == "__main__":
    _end_by_sigterm()
    sys.exit(main())
