"""End a command at SIGTERM and SIGHUP as at Ctrl-C, with an exit code that tells them apart."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["ended_by_signal", "forward_signals", "interrupted_code"]

_received: int | None = None


def forward_signals() -> None:
    """Turn SIGTERM and SIGHUP into Ctrl-C, whatever a command does at Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # An ignored signal stays ignored, as nohup wants it.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _forward)


def ended_by_signal() -> bool:
    """Return True if one of the signals has arrived, after which no prompt should wait for the user."""
    return _received is not None


def interrupted_code() -> int:
    """Return the exit code of an interrupted command: 128 and the number of the signal."""
    return 128 + (_received or signal.SIGINT)


def _forward(number: int, frame: FrameType | None) -> None:
    global _received
    # A closing terminal sends SIGHUP twice, and a second Ctrl-C would skip the grace period.
    if _received is None:
        _received = number
        signal.raise_signal(signal.SIGINT)
