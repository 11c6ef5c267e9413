"""Progress of long work: a bar on a terminal, elsewhere one plain log line every so often."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

log = logging.getLogger(__name__)

METER_SECONDS = 1.0
"""Shortest time between two notes of a `TokenMeter`."""
FIRST_SECONDS = 3.0
"""Time after which a note may be the first line of a log."""
NAME_WIDTH, BAR_WIDTH = 24, 12
"""Columns of a terminal."""


class Advance(Protocol):
    """Callback for each finished piece of the work, from any thread."""

    def __call__(self, note: str = "", amount: int = 1) -> None:
        """Count a piece.  Args: note: as ``"loss 0.31"``.  amount: units in the piece."""
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
    metered: bool = False,
) -> Iterator[Advance]:
    """Show the progress of ``total`` units of work, of which ``done`` are finished already.

    Args:    in_bytes: a unit is a byte; sizes and rates are shown as such.
             every_seconds: least time between two log lines (no terminal).
             console: of the bar; None: standard error.
             bar: False: log lines on a terminal too, for work within other work that has a bar.
             metered: a `TokenMeter` counts the units; its notes give the time left.
    Returns: a context manager that gives the function to call after each piece.
    """
    console = console or Console(stderr=True)
    if not (bar and console.is_terminal):
        yield _Lines(description, total, done, in_bytes, every_seconds, metered)
        return
    # While the bar is shown, rich puts what is written to `sys.stderr` above it.
    with Progress(*_columns(in_bytes, metered), console=console, expand=True) as shown:
        task = shown.add_task(description, total=total, completed=done, note="")
        yield lambda note="", amount=1: shown.update(task, advance=amount, note=note)


def _columns(in_bytes: bool, metered: bool) -> list[ProgressColumn]:
    """Lay out the bar: name, count, bar and times keep their width, the note gets the rest of the line."""

    def cut(**widths: Any) -> Column:
        return Column(no_wrap=True, overflow="ellipsis", **widths)

    counts = (DownloadColumn, TransferSpeedColumn) if in_bytes else (MofNCompleteColumn, TimeElapsedColumn)
    times = () if metered else (TimeRemainingColumn,)
    first, *others = (kind(table_column=Column(no_wrap=True)) for kind in (*counts, *times))
    name = TextColumn("{task.description}", table_column=cut(max_width=NAME_WIDTH))
    note = TextColumn("{task.fields[note]}", table_column=cut(ratio=1), markup=False)
    return [name, first, BarColumn(BAR_WIDTH, table_column=Column(no_wrap=True)), *others, note]


class TokenMeter:
    """Counts a sampler's tokens; shows rates and time left long before the first response has ended."""

    def __init__(self, advance: Advance, num_responses: int, max_new_tokens: int) -> None:
        """Args: advance: of `progress` in responses.  num_responses: in all.  max_new_tokens: of one."""
        self.advance, self.num_left, self.max_new_tokens = advance, num_responses, max_new_tokens
        self.num_tokens = self.num_ended = self._num_untold = 0
        self.start = self.last = time.monotonic()

    def __call__(self, num_tokens: int, num_ended: int) -> None:
        """Count a step of the sampler: tokens drawn in it, responses that ended with it."""
        self.num_tokens += num_tokens
        self.num_ended += num_ended
        self._count(num_ended)

    def recalled(self, num_responses: int) -> None:
        """Count responses that need no sampling."""
        self._count(num_responses)

    def _count(self, num_responses: int) -> None:
        self.num_left -= num_responses
        self._num_untold += num_responses
        now = time.monotonic()
        if now - self.last >= METER_SECONDS or (num_responses and self.num_left <= 0):
            self.last = now
            self.advance(self.note(now - self.start), self._num_untold)
            self._num_untold = 0

    def note(self, seconds: float) -> str:
        """Write ``820 tokens/s, 2.1 responses/s, about 310 s left``.

        Responses to come are taken to be as long as those that ended; before any has, as long as possible.
        """
        rate, ended = self.num_tokens / max(seconds, 1e-9), self.num_ended
        length = min(self.num_tokens / ended if ended else self.max_new_tokens, self.max_new_tokens)
        tokens_left = max((self.num_left + ended) * length - self.num_tokens, 0)
        return (
            f"{rate:.0f} tokens/s, {ended / max(seconds, 1e-9):.1f} responses/s, "
            f"{'about' if ended else 'at most'} {tokens_left / max(rate, 1e-9):.0f} s left"
        )


class _Lines:
    """Logs the last unit, and others if enough time has passed since the previous line.

    With a meter the first line comes after a few seconds, even before any unit is done.
    """

    def __init__(
        self, description: str, total: int, done: int, in_bytes: bool, every_seconds: float, metered: bool
    ) -> None:
        self.description, self.total, self.every_seconds = description, total, every_seconds
        self.done = self.first = done
        self.in_bytes, self.metered = in_bytes, metered
        self.start = self.last_line = time.monotonic()
        self.lock = threading.Lock()

    def __call__(self, note: str = "", amount: int = 1) -> None:
        with self.lock:
            self.done += amount
            now = time.monotonic()
            is_first = self.last_line == self.start
            wait = FIRST_SECONDS if self.metered and is_first else self.every_seconds
            if self.done < self.total and now - self.last_line < wait:
                return
            self.last_line = now
            rate = (self.done - self.first) / max(now - self.start, 1e-9)
            shown = f"{self.done}/{self.total}, {now - self.start:.0f} s"
            if self.in_bytes:
                shown = f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s"
            left = f", {(self.total - self.done) / rate:.0f} s left" if rate and not self.metered else ""
            log.info("%s %s%s%s", self.description, shown, left, f", {note}" if note else "")
