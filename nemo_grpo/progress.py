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

METER_SECONDS = 1.0
"""Least time between two notes of a `TokenMeter`."""
FIRST_SECONDS = 3.0
"""When a note may be the first line of a log."""


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
    bar: bool = True,
) -> Iterator[Advance]:
    """Show the progress of ``total`` units of work, of which ``done`` are finished already.

    Args:    in_bytes: a unit is a byte; sizes and rates are shown as such.
             every_seconds: least time between two log lines (no terminal).
             console: where the bar goes; None is standard error.
             bar: False: log lines on a terminal too, for work within other work that has a bar.
    Returns: a context manager that gives the function to call after each piece.
    """
    console = console or Console(stderr=True)
    if not (bar and console.is_terminal):
        yield _Lines(description, total, done, in_bytes, every_seconds)
        return
    counts = (DownloadColumn, TransferSpeedColumn) if in_bytes else (MofNCompleteColumn, TimeElapsedColumn)
    columns = (BarColumn(), *(kind() for kind in counts), TimeRemainingColumn())
    words = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    with Progress(words[0], *columns, words[1], console=console) as shown:
        task = shown.add_task(description, total=total, completed=done, note="")
        yield lambda note="", amount=1: shown.update(task, advance=amount, note=note)


class TokenMeter:
    """Counts what a sampler draws; shows rate and time left long before the first unit of work is done."""

    def __init__(self, advance: Advance, num_responses: int, max_new_tokens: int) -> None:
        """Args: num_responses: to be sampled in all.  max_new_tokens: the most that one of them may have."""
        self.advance, self.num_responses, self.max_new_tokens = advance, num_responses, max_new_tokens
        self.num_tokens = self.num_finished = 0
        self.start = self.last = time.monotonic()

    def __call__(self, num_tokens: int, num_finished: int) -> None:
        """After each step of the sampler: tokens drawn in it, responses that ended with it."""
        self.num_tokens += num_tokens
        self.num_finished += num_finished
        now = time.monotonic()
        if now - self.last >= METER_SECONDS:
            self.last = now
            self.advance(self.note(now - self.start), 0)

    def note(self, seconds: float) -> str:
        """``820 tokens/s, 3/640 responses, about 310 s left``; the length of those to come is that of those
        that ended, or the longest possible one before any has."""
        rate = self.num_tokens / max(seconds, 1e-9)
        length = self.num_tokens / self.num_finished if self.num_finished else self.max_new_tokens
        tokens_left = max(self.num_responses * min(length, self.max_new_tokens) - self.num_tokens, 0)
        word = "about" if self.num_finished else "at most"
        return (
            f"{rate:.0f} tokens/s, {self.num_finished}/{self.num_responses} responses, {word} "
            f"{tokens_left / max(rate, 1e-9):.0f} s left"
        )


class _Lines:
    """Logs the last unit, and others when enough time has passed since the line before.

    A note without a unit (``amount=0``) is logged after a few seconds already, if it is the first line.
    """

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
            is_early = amount == 0 and self.last_line == self.start
            wait = FIRST_SECONDS if is_early else self.every_seconds
            if (self.done < self.total or amount == 0) and now - self.last_line < wait:
                return
            self.last_line = now
            rate = (self.done - self.first) / max(now - self.start, 1e-9)
            shown = self.show(self.done, self.total, rate, now - self.start)
            left = f", {(self.total - self.done) / rate:.0f} s left" if amount else ""  # else the note has it
            log.info("%s %s%s%s", self.description, shown, left, f", {note}" if note else "")


def _units(done: int, total: int, _rate: float, seconds: float) -> str:
    return f"{done}/{total}, {seconds:.0f} s"


def _bytes(done: int, total: int, rate: float, _seconds: float) -> str:
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s"
