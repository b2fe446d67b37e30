"""Show a command's progress: one live line on a terminal, plain lines otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

import anyio
from rich.cells import cell_len
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.status import STATUS

if TYPE_CHECKING:
    from typing_extensions import Self

    from osmosis_ai.records import Rollout, Score
    from osmosis_ai.runtime.pool.base import InFlight

__all__ = ["DatasetCheckProgress", "LiveProgress", "RunProgress"]

LINE_SECONDS = 5.0
"""Time between two lines where there is no terminal, so that a CI log shows life and stays short."""
SLOW_SECONDS = 10.0
"""Age from which the oldest rollout is named, because something may hang."""
BAR_WIDTH = 16


class LiveProgress:
    """A progress display with a count and a status. Use as a context manager.

    `status` returns the facts beside the count, the most important first: a narrow terminal shows as many as fit.
    """

    def __init__(
        self,
        output: Output,
        total: int,
        noun: str,
        status: Callable[[], Sequence[str]],
        *,
        done: int = 0,
        silent: bool = False,
    ) -> None:
        self.done = done
        self._output = output
        self._total = total
        self._noun = noun
        self._status = status
        self._before = done
        self._started = monotonic()
        self._live: Live | None = None
        self._silent = output.quiet or silent

    def __enter__(self) -> Self:
        STATUS.clear()
        if self._output.messages.is_terminal and not self._silent:
            self._live = Live(get_renderable=self._rendered, console=self._output.messages, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the live line; it doesn't come back."""
        if self._live is not None:
            self._live.stop()
            self._live, self._silent = None, True

    def advance(self, count: int = 1) -> None:
        """Count `count` more as done."""
        self.done += count

    @property
    def rate(self) -> float:
        """Units done per second."""
        # Rollouts recorded before a resume took none of this time.
        return (self.done - self._before) / max(monotonic() - self._started, 1e-6)

    async def keep_showing(self) -> None:
        """Print the progress every few seconds if there is no terminal, even while nothing finishes."""
        while self._live is None and not self._silent:
            await anyio.sleep(LINE_SECONDS)
            self._output.say(", ".join([f"{self._count()} {self._noun}", *self._status(), self._clock()]))

    def line(self, width: int) -> tuple[int, str]:
        """Return the width of the bar, and the text beside it, for a terminal of this width."""
        first, *rest = self._status()
        shown = f"{self._count()}  {first}"
        bar = min(BAR_WIDTH, width // 8)
        # The most important fact outranks the bar.
        if bar + 2 + cell_len(shown) > width:
            bar = 0
        for part in (self._clock(), *rest):
            if bar + 2 + cell_len(shown) + 2 + cell_len(part) <= width:
                shown += f"  {part}"
        return bar, shown

    def _rendered(self) -> Table:
        bar, text = self.line(self._output.messages.width)
        line = Table.grid(padding=(0, 1))
        cells = [ProgressBar(self._total, self.done, bar)] if bar else []
        shown = self._output.styled(text)
        shown.no_wrap, shown.overflow = True, "crop"
        line.add_row(*cells, shown)
        return line

    def _count(self) -> str:
        total = f"{self._total:,}"
        # Padded to the width of the total, so that the line doesn't jump while it counts.
        return f"{self.done:{len(total)},}/{total}"

    def _clock(self) -> str:
        if self.done == self._before:
            return f"{_minutes(monotonic() - self._started)} elapsed"
        return f"{_minutes((self._total - self.done) / self.rate)} left"


class RunProgress(LiveProgress):
    """The progress of a run. With `debugger`, it leaves the terminal to user code, which may start a debugger there.

    `where` names the nodes that rollouts run on, if not this machine.
    """

    def __init__(
        self,
        output: Output,
        total: int,
        oldest: Callable[[], InFlight | None],
        *,
        done: int = 0,
        debugger: bool = False,
        where: Callable[[], str] = lambda: "",
    ) -> None:
        # A live line would overwrite a debugger's prompt.
        silent = debugger and output.messages.is_terminal
        super().__init__(output, total, "rollouts", self.status, done=done, silent=silent)
        self._oldest = oldest
        self._where = where
        self._errors = self._scoring_errors = self._values = self._tokens = self._unscored = 0
        self._sum = 0.0

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

    def status(self) -> list[str]:
        """Return the slowest rollout, errors, the running mean, the rate and tokens."""
        parts = []
        oldest = self._oldest()
        if oldest is not None and oldest.seconds >= SLOW_SECONDS:
            node = f" on {oldest.node}" if oldest.node else ""
            waiting = f"waiting for {oldest.waiting_on}"
            parts.append(f"oldest: row {oldest.row_index} for {oldest.seconds:.0f} s{node}, {waiting}")
        # While rollouts are running, a few are always being scored.
        if self._unscored > 0 and self.done == self._total:
            parts.append(f"{self._unscored:,} being scored")
        parts.append(f"{self._errors:,} failed")
        if self._scoring_errors:
            parts.append(f"{self._scoring_errors:,} scoring errors")
        if self._values:
            parts.append(f"mean score {self._sum / self._values:.3f}")
        parts.append(f"{self.rate:.1f}/s")
        if where := self._where():
            parts.append(where)
        parts.append(f"{self._tokens:,} tokens")
        return parts


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
