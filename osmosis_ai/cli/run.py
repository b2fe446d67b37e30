"""One run of `osmosis test` or `osmosis eval`: progress, report, results file, exit code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.options import Given, OutputOptions, effective_config, output_options
from osmosis_ai.cli.progress import DatasetCheckProgress, RunProgress
from osmosis_ai.cli.report import lead_on, print_report
from osmosis_ai.cli.session import CommandSession, ExitCode, command_session, interrupts
from osmosis_ai.cli.status import STATUS
from osmosis_ai.cli.view import BesideRun
from osmosis_ai.collector import calm_collector
from osmosis_ai.config import Command, RunConfig
from osmosis_ai.errors import OutputError
from osmosis_ai.folders import given_path, replaced_file
from osmosis_ai.options import secret_values
from osmosis_ai.runtime.run import events
from osmosis_ai.runtime.run.events import RunEvent
from osmosis_ai.runtime.run.prepare import check_output, find_runner
from osmosis_ai.runtime.run.report import Report
from osmosis_ai.runtime.run.session import RunSession
from osmosis_ai.tasks import task_group
from osmosis_ai.text import counted

if TYPE_CHECKING:
    from osmosis_ai.runtime.run.eval_files import Journal

__all__ = ["begin_command", "introduce", "run_command", "save_results"]

GRACE_SECONDS = 10.0
"""How long running rollouts may take to finish after the first Ctrl-C."""


def run_command(given: Given, command: Command, *, files: Path | None = None, counts_failures: bool = True) -> int:
    """Run a command line of `test` or `eval` and return the exit code.

    Args:
        given: The typed options.
        command: The kind of run.
        files: The folder for the files of `eval_files`, None to write none.
        counts_failures: False if only missing rollouts count, and not failed ones.
    """
    output = output_options(given)
    with command_session(quiet=output.quiet, store_error=ExitCode.FAILED) as session:
        config, results = begin_command(session, given, command, output)
        calm_collector()
        with BesideRun(session, config, shown=output.view) as viewer:
            run = _Run(session, config, output, results, viewer, files, counts_failures=counts_failures)
            code = asyncio.run(run.run())
            viewer.stay()
        return code


def begin_command(
    session: CommandSession, given: Given, command: Command, output: OutputOptions
) -> tuple[RunConfig, Path | None]:
    """Return a command line's config and its results file, checked to be writable; raises UsageError."""
    config = msgspec.structs.replace(effective_config(RunConfig, given, session.cwd).config, command=command)
    if config.workers.workers == 0 or config.workers.debug:
        # User code writes to the terminal, perhaps with a debugger.
        STATUS.turn_off()
    _, repository = find_runner(config, session.cwd)
    session.use(repository.root, keys=secret_values(config))
    return config, check_output(output.output, session.cwd)


class _Run:
    """A run with its terminal output."""

    def __init__(
        self,
        session: CommandSession,
        config: RunConfig,
        output: OutputOptions,
        results: Path | None,
        viewer: BesideRun,
        files: Path | None,
        *,
        counts_failures: bool,
    ) -> None:
        self._files = files
        self._counts_failures = counts_failures
        self._session = session
        self._output = session.output
        self._config = config
        self._options = output
        self._results = results
        self._run: RunSession | None = None
        self._viewer = viewer
        self._journal: Journal | None = None
        self._progress: RunProgress | None = None
        self._started = False
        self._checking = DatasetCheckProgress(session.output)

    async def run(self) -> int:
        """Run to the end and return the exit code."""
        with anyio.CancelScope() as self._scope, interrupts(self._stop, self._kill):
            async with RunSession.open(self._config, self._session.cwd, listener=self._hear) as run:
                await run.begin()
                self._run = run
                self._open_journal(run)
                report = await self._with_progress(run)
            # Print only after the workers are closed: until then, stdout of this process may be redirected to stderr.
            self._print(report)
            return self._exit_code(report, interrupted=run.interrupted)
        # Only `_stop`, which cancels the scope, leads here.
        self._output.warn("interrupted before the first rollout")
        return ExitCode.INTERRUPTED

    def _open_journal(self, run: RunSession) -> None:
        resume = self._config.resume
        # A replaced grading isn't a new rollout.
        if self._files is not None and not resume.regrade:
            from osmosis_ai.runtime.run.eval_files import Journal

            planned, masker = run.plan.total_rows * self._config.scoring.n, self._session.masker
            self._journal = Journal(self._files, run.id, run.store.path, masker, planned, again=resume.retry_failed)

    async def _with_progress(self, run: RunSession) -> Report:
        with RunProgress(
            self._output,
            run.plan.total_rollouts,
            run.pool.oldest,
            done=run.done_before,
            debugger=self._config.workers.workers == 0,
            where=lambda: run.pool.where,
        ) as self._progress:
            async with task_group() as ticker:
                ticker.start_soon(self._progress.keep_showing)
                report = await run.report()
                ticker.cancel_scope.cancel()
        return report

    def _hear(self, event: RunEvent) -> None:
        if self._journal is not None:
            try:
                self._journal.add(event)
            except OutputError as error:
                # The run continues; its files are written again at its end.
                self._output.warn(str(error))
                self._journal = None
        if isinstance(event, events.RolloutDone):
            assert self._progress is not None
            self._progress.rollout_done(event.rollout)
        elif isinstance(event, events.RolloutScored):
            assert self._progress is not None
            self._progress.scores_done(event.scores)
        elif isinstance(event, events.RolloutStarted):
            self._show_start()
        elif isinstance(event, events.DatasetProgress):
            self._checking.show(event.read, event.total)
        elif isinstance(event, events.RunStarted):
            self._viewer.open(event.run_id)
            if event.recorded is not None:
                # Even if quiet: there may be several runs to resume.
                self._output.warn(f"resuming run {event.run_id}: {event.recorded} rollouts are recorded")
        elif isinstance(event, events.LimitReached):
            self._output.warn(event.message)
        else:
            introduce(self._output, event)

    def _show_start(self) -> None:
        """With --debug, show where the time until the first rollout went."""
        if self._config.workers.debug and not self._started:
            times = ", ".join(f"{what} at {seconds:.2f} s" for what, seconds in STATUS.waits)
            self._output.say(f"first rollout after {STATUS.elapsed():.2f} s ({times})")
        self._started = True

    def _print(self, report: Report) -> None:
        results = None
        if self._results is not None or self._options.json:
            results = self._session.masker.encoded(report.to_json())
            # Before anything is printed, because printing fails if the reader of stdout has gone.
            save_results(results, self._results)
        if results is not None and self._options.json:
            self._output.json(results)
        else:
            print_report(self._output, report)
            if self._results is not None:
                self._output.say(f"results written to {self._results}")
        if self._files is not None:
            from osmosis_ai.runtime.run.eval_files import write_eval_files

            if self._journal is not None:
                self._journal.close()
            self._output.say(f"files written to {write_eval_files(self._files, report, self._session.masker)}")
        if self._options.junit is not None:
            self._save_junit(report, self._options.junit)
        lead_on(self._output, report)

    def _save_junit(self, report: Report, given: str) -> None:
        from osmosis_ai.cli.gate import junit, score_cases

        cases = score_cases(report.outcomes(), report.functions, report.pass_threshold)
        lines = "\n".join(junit("osmosis eval", cases))
        file = given_path(given, self._session.cwd)
        try:
            with replaced_file(file) as sink:
                sink.write(f"{self._session.masker.text(lines)}\n".encode("utf-8", "replace"))
        except OSError as error:
            raise OutputError(f"{file} could not be written: {error.strerror or error}") from error
        self._output.say(f"test results written to {file}")

    def _exit_code(self, report: Report, *, interrupted: bool) -> int:
        if interrupted:
            return ExitCode.INTERRUPTED
        if not (report.whole if self._counts_failures else report.complete):
            return ExitCode.FAILED
        if self._config.command == "eval" and report.rows and not report.functions:
            self._output.warn(
                "nothing was scored: there is no reward function, and the agent loop returned no reward; "
                "name a function with --eval-fn MODULE:FUNCTION"
            )
            return ExitCode.FAILED if self._counts_failures else ExitCode.OK
        bound = self._config.scoring.fail_under
        # A shard without rows has no scores to fall short.
        scored = {name: found for name, found in report.functions.items() if found.count}
        low = [name for name, found in scored.items() if bound is not None and found.mean < bound]
        for name in low:
            mean = report.functions[name].mean
            self._output.warn(f"{name}: the mean {mean:.3f} is under {bound:g} (--fail-under)")
        return ExitCode.FAILED if low else ExitCode.OK

    def _stop(self) -> None:
        """Give running rollouts a grace period at Ctrl-C."""
        if self._run is None:
            STATUS.wait_for("stopping")
            self._scope.cancel()
            return
        grace = f"running rollouts have {GRACE_SECONDS:.0f} s to finish"
        self._output.warn(f"stopping: {grace}; press Ctrl-C again to quit now")
        self._run.stop()
        # `stop` alone would wait for running rollouts until their own time limits.
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._run.cancel)

    def _kill(self) -> None:
        # The process exits next, without clean-up: leave no half a line behind.
        if self._progress is not None:
            self._progress.remove()
        if self._run is not None:
            self._run.pool.kill()


def introduce(output: Output, event: RunEvent) -> None:
    """Print the events of opening a run; ignore all others."""
    if isinstance(event, events.Waiting):
        STATUS.wait_for(output.shown(event.what))
    elif isinstance(event, events.Notice):
        (output.warn if event.severity == "warning" else output.say)(event.message)
    elif isinstance(event, events.RunLoaded):
        attempts = f" × {event.attempts}" if event.attempts > 1 else ""
        rows = f"{counted(event.total_rows, 'row')}{attempts} of {event.dataset}"
        output.say(f"{' against '.join(event.models)} on {rows}{f', shard {event.shard}' if event.shard else ''}")
        own = "nothing; write an @osmosis_reward function in reward_fn/"
        if event.agent is not None:
            asked, name = event.agent
            kind, own = ("workflow", "its grader") if event.workflow else ("agent", "the agent loop's own reward")
            output.say(f"{kind}: {name if name == asked else f'{asked} ({name})'}")
        output.say(f"tools: {', '.join(tool['function']['name'] for tool in event.tools) or 'none'}")
        output.say(f"scored with: {', '.join(event.functions) or own}")


def save_results(results: bytes, file: Path | None) -> None:
    """Replace the `-o` file with a results object, if there is one; on OutputError the earlier file is kept."""
    if file is None:
        return
    try:
        with replaced_file(file) as sink:
            sink.write(msgspec.json.format(results, indent=2) + b"\n")
    except OSError as error:
        raise OutputError(f"{file} could not be written: {error.strerror or error}") from error
