"""Progress of long work: a bar with the time left on a terminal, plain lines elsewhere."""

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0
_BAR = (
    "{desc}: {percentage:3.0f}%|{bar:24}| {n_fmt}/{total_fmt} "
    "[{elapsed}, {remaining} left]{postfix}"
)


class Progress(Protocol):
    """What the work reports to."""

    def advance(self, note: str = "", amount: int = 1) -> None:
        """Counts finished work.

        Args:
            note: what was just finished, in a few words.
            amount: units finished since the last call.
        """

    def say(self, message: str) -> None:
        """Shows one line without disturbing the bar (a failed point, a mended file)."""


class _Bar:
    """The bar of a terminal."""

    def __init__(self, total: int, description: str, done: int, unit: str, stream: TextIO) -> None:
        self._stream = stream
        # smoothing=0 takes the mean rate: points of a sweep differ too much in length for a
        # moving one to say anything about the rest.
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=description,
            unit=unit,
            unit_scale=unit == "B",
            file=stream,
            bar_format=_BAR,
            smoothing=0,
            dynamic_ncols=True,
        )

    def advance(self, note: str = "", amount: int = 1) -> None:
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(amount)
        if note:
            self._bar.refresh()

    def say(self, message: str) -> None:
        self._bar.write(message, file=self._stream)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """One line per noted step, and otherwise one every ten seconds."""

    def __init__(self, total: int, description: str, done: int, unit: str, stream: TextIO) -> None:
        self._total, self._done, self._skipped = total, done, done
        self._description, self._unit, self._stream = description, unit, stream
        self._began = self._last_line = time.monotonic()
        self.say(f"{description}: {self._count()}")

    def advance(self, note: str = "", amount: int = 1) -> None:
        self._done += amount
        now = time.monotonic()
        due = now - self._last_line >= _SECONDS_BETWEEN_LINES
        if not (note or due or self._done >= self._total):
            return
        self._last_line = now
        elapsed = now - self._began
        left = elapsed / max(self._done - self._skipped, 1) * max(self._total - self._done, 0)
        clock = f"{_clock(elapsed)} elapsed, about {_clock(left)} left"
        self.say(f"{self._description}: {self._count()}{' ' + note if note else ''} ({clock})")

    def say(self, message: str) -> None:
        self._stream.write(message + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Lines are complete as they stand."""

    def _count(self) -> str:
        if self._unit != "B":
            return f"{self._done}/{self._total}"
        return f"{self._done / 1e6:.1f}/{self._total / 1e6:.1f} MB"


@contextlib.contextmanager
def progress(
    total: int,
    description: str,
    *,
    done: int = 0,
    unit: str = "points",
    stream: TextIO | None = None,
) -> Iterator[Progress]:
    """Shows how far long work has come and how long the rest may take.

    Args:
        total: units of work in all.
        description: what the work is, in a few words.
        done: units that an earlier run finished; they do not count towards the rate.
        unit: what is counted; "B" (bytes) is shown in megabytes.
        stream: where to write, standard error by default; a terminal gets a bar.

    Yields:
        The object whose `advance` the work calls.
    """
    target = sys.stderr if stream is None else stream
    shown = (_Bar if _has_width(target) else _Lines)(total, description, done, unit, target)
    try:
        yield shown
    finally:
        shown.close()


def _has_width(stream: TextIO) -> bool:
    """Whether a bar can be drawn: on a terminal, unless that says that it is 0 columns wide."""
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # no file behind the stream: its width is not known
        return True


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
