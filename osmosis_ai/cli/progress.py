"""Show a command's progress: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

import anyio
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from osmosis_ai.cli.console import Output

if TYPE_CHECKING:
    from typing_extensions import Self

    from osmosis_ai.records import Rollout, Score
    from osmosis_ai.runtime.pool.base import InFlight

__all__ = ["DatasetCheckProgress", "LiveProgress", "RunProgress"]

LINE_SECONDS = 5.0
SLOW_SECONDS = 10.0


class LiveProgress:
    """A progress display with a count and a status. Use as a context manager."""

    def __init__(
        self, output: Output, total: int, noun: str, status: Callable[[], str], *, done: int = 0, silent: bool = False
    ) -> None:
        self.done = done
        self._output = output
        self._total = total
        self._noun = noun
        self._status = status
        self._bar: Progress | None = None
        self._silent = output.quiet or silent
        if output.messages.is_terminal and not self._silent:
            self._bar = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                _Status(status),
                TimeRemainingColumn(compact=True),
                console=output.messages,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total, completed=self.done)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int = 1) -> None:
        """Count `count` more as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)

    async def keep_showing(self) -> None:
        """Print the progress every few seconds if there is no terminal, even while nothing finishes."""
        while self._bar is None and not self._silent:
            await anyio.sleep(LINE_SECONDS)
            self._output.say(f"{self.done}/{self._total} {self._noun}, {self._status()}")


class RunProgress(LiveProgress):
    """The progress of a run. With `debugger`, it leaves the terminal to user code, which may start a debugger there."""

    def __init__(
        self,
        output: Output,
        total: int,
        oldest: Callable[[], InFlight | None],
        *,
        done: int = 0,
        debugger: bool = False,
    ) -> None:
        silent = debugger and output.messages.is_terminal
        super().__init__(output, total, "rollouts", self.status, done=done, silent=silent)
        self._oldest = oldest
        self._before = done
        self._errors = self._scoring_errors = self._values = self._tokens = self._unscored = 0
        self._sum = 0.0
        self._started = monotonic()

    def rollout_done(self, rollout: Rollout) -> None:
        self._errors += rollout.failure is not None
        self._tokens += rollout.usage.total_tokens
        self._unscored += 1
        self.advance()

    def scores_done(self, scores: list[Score]) -> None:
        self._unscored -= 1
        for score in scores:
            self._scoring_errors += score.failure is not None
            if score.value is not None:
                self._values += 1
                self._sum += score.value

    def status(self) -> str:
        """Return rate, running mean, errors, tokens and the slowest rollout."""
        elapsed = max(monotonic() - self._started, 1e-6)
        parts = [f"{(self.done - self._before) / elapsed:.1f}/s"]
        if self._values:
            parts.append(f"mean {self._sum / self._values:.3f}")
        parts.append(f"{self._errors} failed")
        if self._scoring_errors:
            parts.append(f"{self._scoring_errors} scoring errors")
        parts.append(f"{self._tokens:,} tokens")
        if self._unscored > 0 and self.done == self._total:
            parts.append(f"{self._unscored} being scored")
        oldest = self._oldest()
        if oldest is not None and oldest.seconds >= SLOW_SECONDS:
            parts.append(f"oldest: row {oldest.row_index} for {oldest.seconds:.0f} s, waiting for {oldest.waiting_on}")
        return ", ".join(parts)


class _Status(ProgressColumn):
    def __init__(self, status: Callable[[], str]) -> None:
        super().__init__()
        self._status = status

    def render(self, task: Task) -> Text:
        return Text(self._status())


class DatasetCheckProgress:
    """The progress of reading a dataset, shown only after a second."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._started = self._said = monotonic()

    def show(self, read: int, total: int) -> None:
        """Note that `read` of `total` bytes are read."""
        now = monotonic()
        if now - self._started > 1 and now - self._said > 1:
            self._said = now
            self._output.say(f"checking the dataset: {read / max(total, 1):.0%} of {total >> 20} MiB")
