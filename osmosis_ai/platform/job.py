"""Run one run in a separate process: `python -m osmosis_ai.platform.job`.

The job reads its order from stdin, then `stop` if the user stops the run. It reports to the server on stdout, which no
other code can write to. EOF on stdin means that the server is gone: the job and all its processes end at once, and the
next server restarts it from the recorded items.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import BinaryIO, Literal

import anyio
import anyio.to_thread
import msgspec

from osmosis_ai.config import RunConfig
from osmosis_ai.discovery.eval_configs import eval_config_of
from osmosis_ai.errors import OsmosisError, StartError
from osmosis_ai.masking import VARIABLE, Masker
from osmosis_ai.output_lines import output_lines
from osmosis_ai.platform.orders import (
    Ended,
    JobMessage,
    JobOrder,
    Logged,
    Resolved,
    Results,
    Started,
    Step,
    TrainingOrder,
)
from osmosis_ai.platform.repositories import Revision, check_out
from osmosis_ai.platform.results import graded, run_results
from osmosis_ai.process_tree import end_group
from osmosis_ai.records import JsonObject
from osmosis_ai.row_numbers import read_row_numbers
from osmosis_ai.runtime.pool import forkserver
from osmosis_ai.runtime.run import events
from osmosis_ai.runtime.run.eval_files import write_eval_files
from osmosis_ai.runtime.run.report import Report
from osmosis_ai.runtime.run.session import RunSession
from osmosis_ai.runtime.worker.workflows import keeper
from osmosis_ai.tasks import task_group
from osmosis_ai.text import counted

__all__ = ["Job", "main", "sampled_rows"]

SAMPLE = 10
"""Without a limit, a run samples one row in this many."""
GRACE_SECONDS = 10.0
"""How long running rollouts, or the trainer, may take to end when the user stops a run."""
RESULT_SECONDS = 0.5
"""Least time between two reports of results."""
MAX_OUTPUT_LINE = 1 << 20
"""Longest line of a trainer's output, in bytes."""


class Job:
    """One run, from its order to its end: an evaluation, unless a subclass runs something else."""

    def __init__(self, order: JobOrder, tell: Callable[[JobMessage], None], masker: Masker) -> None:
        self._order = order
        self._tell = tell
        self._masker = masker
        self._folder = Path(order.folder)
        self._step: Step = "clone"
        self._session: RunSession | None = None
        self._scope = anyio.CancelScope()
        self._stopping = False
        self.commit = ""
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Stop the run for the user: in-flight rollouts get a grace period, then are cancelled."""
        self._stopping = True
        # Before the first rollout there is nothing to wait for.
        if self._session is None:
            self._scope.cancel()
            return
        self._log("stop", f"stopping: running rollouts have {GRACE_SECONDS:.0f} s to finish")
        self._session.stop()
        # `stop` alone would wait for running rollouts until their own time limits.
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._session.cancel)

    async def run(self) -> None:
        """Run to the end, and report how it ended."""
        try:
            with self._scope:
                if not self._stopping:
                    await self._run()
            status: Literal["finished", "failed", "stopped"] = "stopped" if self._stopping else "finished"
        except OsmosisError as error:
            self._fail(str(error))
            status = "failed"
        except Exception as error:  # noqa: BLE001 - the user reads it in the run's log
            self._fail(f"{type(error).__name__}: {error}", {"traceback": traceback.format_exc()})
            status = "failed"
        if status == "stopped":
            self._log("stop", "stopped; the recorded results are kept")
        self._tell(Ended(status))

    async def _run(self) -> None:
        code = await self._clone()
        self._resolve_secrets()
        config = self._config(code)
        self._step = "environment"
        began = time.monotonic()
        async with RunSession.open(config, code, self._environ(), self._hear) as session:
            await session.begin()
            self._session = session
            seconds = time.monotonic() - began
            self._tell(Started(config.data.rows))
            self._step = "rollout"
            rollouts = counted(session.plan.total_rollouts, "rollout")
            self._log("rollout", f"{rollouts} of {counted(session.plan.total_rows, 'row')}, after {seconds:.1f} s")
            async with task_group() as reporting:
                reporting.start_soon(self._report_results, session)
                report = await session.report()
                reporting.cancel_scope.cancel()
            self._tell(Results(self._results(session)))
        await anyio.to_thread.run_sync(self._write_files, report)
        if not self._stopping:
            self._conclude(report)

    async def _clone(self) -> Path:
        order = self._order
        experiment = order.document["experiment"]
        code = self._folder / "code"
        revision = Revision(order.commit or experiment.get("commit_sha"), experiment.get("branch"))
        self._log("clone", f"getting the code of {revision.commit or revision.branch or 'the default branch'}")
        done = await anyio.to_thread.run_sync(
            check_out, revision, order.sources, Path(order.repository), code, dict(order.variables)
        )
        self.commit = done.commit
        self._tell(Resolved(done.commit))
        self._log("clone", f"commit {done.commit} from {done.source}")
        if done.left_out:
            self._log("clone", f"submodules aren't fetched: {', '.join(done.left_out[:10])}", "WARNING")
        return code

    def _resolve_secrets(self) -> None:
        self._step = "secrets"
        scopes = self._order.scopes
        said = ", ".join(f"{name} ({scope})" for name, scope in scopes.items()) or "none are needed"
        self._log("secrets", said)

    def _config(self, code: Path) -> RunConfig:
        self._step = "select"
        order = self._order
        # There is no such file: the path says in which workspace to look for the rollout.
        found = eval_config_of(order.document, code / "configs" / "eval" / f"{order.name}.toml")
        options = {**found.options, **order.workers, "dataset": order.dataset, "store": order.store, "name": order.name}
        rows = order.row_numbers
        if "limit" in options:
            self._log("select", f"the first {options['limit']} of {counted(order.dataset_rows, 'row')}")
        else:
            # A run that continues keeps the rows of its first process.
            rows = rows or sampled_rows(order.dataset_rows, order.seed)
            options["rows"] = rows
            self._log(
                "select",
                f"a random tenth of {counted(order.dataset_rows, 'row')}",
                details={"seed": order.seed, "rows": rows},
            )
        if order.retry_failed:
            options["retry_failed"] = True
        endpoint = order.document.get("advanced", {}).get("base_url")
        if endpoint is not None:
            options["base_url"] = endpoint
        return RunConfig.of("eval", **options)

    def _environ(self) -> dict[str, str]:
        order = self._order
        # Names such as MY_LOGIN don't look like those of keys, so name each one to the masker.
        masked = ",".join(order.secrets)
        return {**order.variables, **order.document.get("env", {}), **order.secrets, VARIABLE: masked}

    def _hear(self, event: events.RunEvent) -> None:
        if isinstance(event, events.Waiting):
            self._log(self._step, event.what)
        elif isinstance(event, events.Notice):
            self._log(self._step, event.message, "WARNING" if event.severity == "warning" else "INFO")
        elif isinstance(event, events.RunLoaded):
            self._step = "preflight"
        elif isinstance(event, events.RunStarted) and event.recorded:
            self._log("rollout", f"continuing: {counted(event.recorded, 'rollout')} recorded before")
        elif isinstance(event, events.RolloutDone):
            rollout, self._step = event.rollout, "rollout"
            if rollout.failure is not None:
                where = {"row_index": rollout.row_index, "run_index": rollout.run_index}
                message = f"row {rollout.row_index}: {rollout.failure.message}"
                self._log("rollout", message, "ERROR", {**where, **msgspec.to_builtins(rollout.failure)})
            self._changed.set()
        elif isinstance(event, events.RolloutScored):
            self._changed.set()

    async def _report_results(self, session: RunSession) -> None:
        """Report the results as items end, at intervals that grow with the cost of summarizing them."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            began = time.monotonic()
            found = await anyio.to_thread.run_sync(self._results, session)
            self._tell(Results(found))
            # Spend at most a sixth of the time on summaries, which read every record.
            await anyio.sleep(max(RESULT_SECONDS, 5 * (time.monotonic() - began)))

    def _results(self, session: RunSession) -> JsonObject:
        plan = session.plan
        return run_results(
            map(graded, session.outcomes()),
            n=plan.config.scoring.n,
            threshold=plan.config.scoring.pass_threshold,
            rows=plan.total_rows,
            dataset_rows=self._order.dataset_rows,
            resumed=session.done_before,
        )

    def _write_files(self, report: Report) -> None:
        target = self._folder / "files"
        target.mkdir(exist_ok=True)
        write_eval_files(target, report, self._masker)

    def _conclude(self, report: Report) -> None:
        policy = report.policy
        self._step = "finish"
        means = ", ".join(f"{name} {found.mean:.3f}" for name, found in report.functions.items()) or "no score"
        failed = f", {policy.failed} failed" if policy.failed else ""
        self._log("finish", f"{counted(policy.rollouts, 'rollout')}{failed}: {means}")

    def _fail(self, message: str, details: JsonObject | None = None) -> None:
        self._log(self._step, message, "ERROR", details)

    def _log(self, step: Step, message: str, level: str = "INFO", details: JsonObject | None = None) -> None:
        self._tell(Logged(step, message, level, details))  # type: ignore[arg-type]


class TrainingJob(Job):
    """A training run: writes the trainer's order file, starts the trainer, and logs its output."""

    _trainer: asyncio.subprocess.Process | None = None

    def stop(self) -> None:
        """Stop the trainer for the user, with SIGTERM, then SIGKILL after a grace period."""
        self._stopping = True
        if self._trainer is None or self._trainer.stdin is None:
            self._scope.cancel()
            return
        self._log("stop", f"stopping: the trainer has {GRACE_SECONDS:.0f} s to exit")
        # The keeper takes EOF for the order to end the trainer.
        self._trainer.stdin.close()

    async def _run(self) -> None:
        code = await self._clone()
        self._resolve_secrets()
        self._step = "train"
        command = shlex.split(self._order.trainer or "")
        if not command or shutil.which(command[0]) is None:
            raise StartError(
                f"the trainer command {self._order.trainer!r} doesn't exist; set it with `platform up --trainer`"
            )
        self._trainer = await asyncio.create_subprocess_exec(
            # The keeper ends the trainer with this process, even if this process is killed.
            *(sys.executable, "-I", "-S", keeper.__file__, str(GRACE_SECONDS)),
            *(*command, str(self._write_order(code))),
            cwd=code,
            env=self._environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            limit=MAX_OUTPUT_LINE,
            start_new_session=True,
        )
        assert self._trainer.stdout is not None
        self._tell(Started(None))
        async for line in output_lines(self._trainer.stdout):
            self._log("train", line)
        status = await self._trainer.wait()
        if status and not self._stopping:
            raise StartError(f"the trainer ended with status {status}")

    def _write_order(self, code: Path) -> Path:
        order, document = self._order, self._order.document
        experiment, output = document["experiment"], self._folder / "output"
        output.mkdir(exist_ok=True)
        training_order = TrainingOrder(
            schema_version=1,
            run_id=order.run_id,
            name=order.name,
            model=experiment["model_path"],
            code=str(code),
            commit=self.commit,
            rollout=experiment["rollout"],
            entrypoint=experiment["entrypoint"],
            dataset=order.dataset,
            dataset_sha256=order.dataset_sha256,
            dataset_rows=order.dataset_rows,
            **{name: document.get(name, {}) for name in ("training", "sampling", "checkpoints", "advanced", "env")},
            secrets=document["secrets"]["required"],
            output=str(output),
            store=order.store,
        )
        file = self._folder / "training.json"
        file.write_bytes(msgspec.json.format(msgspec.json.encode(training_order), indent=2))
        return file


def sampled_rows(rows: int, seed: int) -> str:
    """Choose a random tenth of a dataset's rows, at least one, and return their numbers."""
    chosen = sorted(Random(seed).sample(range(rows), max(1, rows // SAMPLE)))  # noqa: S311 - a sample, no secret
    return read_row_numbers(",".join(map(str, chosen)))


async def _main(order: JobOrder, orders: BinaryIO, answers: BinaryIO) -> None:
    masker = Masker([*order.secrets.values()])
    lock = threading.Lock()

    def tell(message: JobMessage) -> None:
        # Each message must stay on its own line, whichever thread sends it.
        with lock:
            answers.write(masker.encoded(msgspec.json.encode(message)) + b"\n")
            answers.flush()

    kind = Job if order.trainer is None else TrainingJob
    job = kind(order, tell, masker)
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in orders:
            if line.strip() == b"stop":
                loop.call_soon_threadsafe(job.stop)
        # EOF: the server is gone.
        end_group()

    threading.Thread(target=listen, daemon=True).start()
    await job.run()


def main() -> None:
    """Run the job that stdin describes."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Keep the protocol's file descriptors away from libraries, which may read stdin or print.
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    # Import what workers need while this process waits for its order.
    forkserver.start([forkserver.WORKFLOWS])
    line = orders.readline()
    if not line:
        end_group()
    order = msgspec.json.decode(line, type=JobOrder)
    asyncio.run(_main(order, orders, answers))
    answers.flush()
    # A normal exit would wait for the thread that reads stdin.
    os._exit(0)


if __name__ == "__main__":
    main()
