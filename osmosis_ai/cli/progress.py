"""Progress of a run: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import anyio
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from osmosis_ai.cli.console import Output
from osmosis_ai.records import Rollout, Score
from osmosis_ai.runtime.pool.base import InFlight

__all__ = ["DatasetCheckProgress", "RunProgress"]

LINE_SECONDS = 5.0
SLOW_SECONDS = 10.0


class RunProgress:
    """Hears of every record and shows how far the run is. Use as a context manager.

    Args:
        output: Where to show it.
        total: How many rollouts there will be.
        oldest: Gives the rollout that has been running longest.
        done: How many rollouts a resumed run has already.
        debugger: Keep off the terminal, which user code in this process may want for a debugger.
    """

    def __init__(
        self,
        output: Output,
        total: int,
        oldest: Callable[[], InFlight | None],
        *,
        done: int = 0,
        debugger: bool = False,
    ) -> None:
        self._output = output
        self._total = total
        self._oldest = oldest
        self._done = self._before = done
        self._errors = self._scoring_errors = self._values = self._tokens = self._unscored = 0
        self._sum = 0.0
        self._started = monotonic()
        self._bar: Progress | None = None
        self._silent = output.quiet or (debugger and output.messages.is_terminal)
        if output.messages.is_terminal and not self._silent:
            self._bar = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                _Status(self),
                TimeRemainingColumn(compact=True),
                console=output.messages,
                transient=True,
            )

    def __enter__(self) -> RunProgress:
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def rollout_done(self, rollout: Rollout) -> None:
        self._done += 1
        self._errors += rollout.failure is not None
        self._tokens += rollout.usage.total_tokens
        self._unscored += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def scores_done(self, scores: list[Score]) -> None:
        self._unscored -= 1
        for score in scores:
            self._scoring_errors += score.failure is not None
            if score.value is not None:
                self._values += 1
                self._sum += score.value

    async def keep_showing(self) -> None:
        """Without a terminal, say every few seconds how far the run is, also while nothing ends."""
        while self._bar is None and not self._silent:
            await anyio.sleep(LINE_SECONDS)
            self._output.say(f"{self._done}/{self._total} rollouts, {self.status()}")

    def status(self) -> str:
        """Rate, running mean, errors, tokens, and what is slow."""
        elapsed = max(monotonic() - self._started, 1e-6)
        parts = [f"{(self._done - self._before) / elapsed:.1f}/s"]
        if self._values:
            parts.append(f"mean {self._sum / self._values:.3f}")
        parts.append(f"{self._errors} failed")
        if self._scoring_errors:
            parts.append(f"{self._scoring_errors} scoring errors")
        parts.append(f"{self._tokens:,} tokens")
        if self._unscored > 0 and self._done == self._total:
            parts.append(f"{self._unscored} being scored")
        oldest = self._oldest()
        if oldest is not None and oldest.seconds >= SLOW_SECONDS:
            parts.append(f"oldest: row {oldest.row_index} for {oldest.seconds:.0f} s, waiting for {oldest.waiting_on}")
        return ", ".join(parts)


class _Status(ProgressColumn):
    def __init__(self, progress: RunProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress.status())


class DatasetCheckProgress:
    """Progress of reading a large dataset: says something only when it takes longer than a second."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._started = self._said = monotonic()

    def show(self, read: int, total: int) -> None:
        """So many bytes of so many are read."""
        now = monotonic()
        if now - self._started > 1 and now - self._said > 1:
            self._said = now
            self._output.say(f"checking the dataset: {read / max(total, 1):.0%} of {total >> 20} MiB")
