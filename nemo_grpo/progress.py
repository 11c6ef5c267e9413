"""Where long work stands: a bar on a terminal, one plain log line every so often elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

log = logging.getLogger(__name__)


class Advance(Protocol):
    """To be called after each piece of the work, from any thread."""

    def __call__(self, note: str = "", amount: int = 1) -> None:
        """``note``: where things stand (``"loss 0.31"``).  ``amount``: units in the piece."""
        ...


@contextmanager
def progress(
    description: str,
    total: int,
    *,
    done: int = 0,
    in_bytes: bool = False,
    every_seconds: float = 10.0,
    console: Console | None = None,
) -> Iterator[Advance]:
    """Show the progress of ``total`` units of work, of which ``done`` are finished already.

    Args:    in_bytes: a unit is a byte; sizes and rates are shown as such.
             every_seconds: least time between two log lines (no terminal).
             console: where the bar goes; None is standard error.
    Returns: a context manager that gives the function to call after each piece.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(description, total, done, in_bytes, every_seconds)
        return
    counts = (DownloadColumn, TransferSpeedColumn) if in_bytes else (MofNCompleteColumn, TimeElapsedColumn)
    columns = (BarColumn(), *(kind() for kind in counts), TimeRemainingColumn())
    words = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    with Progress(words[0], *columns, words[1], console=console) as bar:
        task = bar.add_task(description, total=total, completed=done, note="")
        yield lambda note="", amount=1: bar.update(task, advance=amount, note=note)


class _Lines:
    """Logs the last unit, and others when enough time has passed since the line before."""

    def __init__(self, description: str, total: int, done: int, in_bytes: bool, every_seconds: float) -> None:
        self.description, self.total, self.every_seconds = description, total, every_seconds
        self.done = self.first = done
        self.show = _bytes if in_bytes else _units
        self.start = self.last_line = time.monotonic()
        self.lock = threading.Lock()

    def __call__(self, note: str = "", amount: int = 1) -> None:
        with self.lock:
            self.done += amount
            now = time.monotonic()
            if self.done < self.total and now - self.last_line < self.every_seconds:
                return
            self.last_line = now
            rate = (self.done - self.first) / max(now - self.start, 1e-9)
            shown = self.show(self.done, self.total, rate, now - self.start)
            left = (self.total - self.done) / rate
            log.info("%s %s, %.0f s left%s", self.description, shown, left, f", {note}" if note else "")


def _units(done: int, total: int, _rate: float, seconds: float) -> str:
    return f"{done}/{total}, {seconds:.0f} s"


def _bytes(done: int, total: int, rate: float, _seconds: float) -> str:
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s"
