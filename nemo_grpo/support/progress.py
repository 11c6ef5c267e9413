"""Progress of long work: a bar on a terminal, elsewhere one plain log line every so often."""

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
LINE_SECONDS = 10.0
"""Shortest time between two log lines of one piece of work."""
FIRST_SECONDS = 3.0
"""Shortest time before the first log line of metered work."""
NAME_WIDTH = 24
"""Width of a bar's description, in columns of the terminal."""
BAR_WIDTH = 12
"""Width of the bar itself, in columns of the terminal."""


class Advance(Protocol):
    """Callback for each finished piece of the work, from any thread."""

    def __call__(self, note: str = "", amount: int = 1) -> None:
        """Count a piece.

        Args:
            note: Text beside the bar, such as ``"loss 0.31"``.
            amount: Units in the piece.
        """
        ...


@contextmanager
def progress(
    description: str,
    total: int,
    *,
    done: int = 0,
    in_bytes: bool = False,
    bar: bool = True,
    metered: bool = False,
) -> Iterator[Advance]:
    """Show the progress of ``total`` units of work.

    Args:
        description: Name of the work.
        total: Units of work in all.
        done: Units that are finished already.
        in_bytes: True if a unit is a byte; sizes and rates are then shown in GB and MB/s.
        bar: False for work within other work that has a bar. It writes log lines even on a terminal.
        metered: True if a `TokenMeter` counts the units. The meter's notes then give the time left.
    Returns: a context manager that gives the function to call after each finished piece.
    """
    # The bar goes to standard error, so that the output of a command can be piped while the bar is shown.
    console = Console(stderr=True)
    if not (bar and console.is_terminal):
        yield _Lines(description, total, done, in_bytes=in_bytes, metered=metered)
        return
    # While the bar is shown, rich writes all other output to `sys.stderr` above the bar.
    columns = _columns(in_bytes=in_bytes, metered=metered)
    with Progress(*columns, console=console, expand=True) as display:
        task = display.add_task(description, total=total, completed=done, note="")
        yield lambda note="", amount=1: display.update(task, advance=amount, note=note)


def _columns(*, in_bytes: bool, metered: bool) -> list[ProgressColumn]:
    """Build the columns of the bar. The note gets the width that the others leave."""
    name_cell = Column(no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH)
    note_cell = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    one_line = Column(no_wrap=True)
    columns: list[ProgressColumn] = [TextColumn("{task.description}", table_column=name_cell)]
    bar = BarColumn(BAR_WIDTH, table_column=one_line)
    if in_bytes:
        columns += [DownloadColumn(table_column=one_line), bar, TransferSpeedColumn(table_column=one_line)]
    else:
        columns += [MofNCompleteColumn(table_column=one_line), bar, TimeElapsedColumn(table_column=one_line)]
    # The note of a meter has a better estimate: rich's column stays empty until the first response has ended.
    if not metered:
        columns.append(TimeRemainingColumn(table_column=one_line))
    # Without markup: a note may contain square brackets, which rich reads as styles.
    columns.append(TextColumn("{task.fields[note]}", table_column=note_cell, markup=False))
    return columns


class TokenMeter:
    """Counts the tokens of a sampler, so that rates and time left are shown before a response has ended."""

    def __init__(self, advance: Advance, num_responses: int, max_new_tokens: int) -> None:
        """Start the clock.

        Args:
            advance: Callback of a `progress` whose units are responses.
            num_responses: Responses in all.
            max_new_tokens: Longest response.
        """
        self.advance = advance
        self.num_left = num_responses
        self.max_new_tokens = max_new_tokens
        self.num_tokens = 0
        self.num_ended = 0
        self._num_unreported = 0
        self.start = time.monotonic()
        self.last = self.start

    def __call__(self, num_tokens: int, num_ended: int) -> None:
        """Count the tokens that the sampler drew in a step, and the responses that ended in it."""
        self.num_tokens += num_tokens
        self.num_ended += num_ended
        self._count(num_ended)

    def recalled(self, num_responses: int) -> None:
        """Count responses that need no sampling."""
        self._count(num_responses)

    def _count(self, num_responses: int) -> None:
        self.num_left -= num_responses
        self._num_unreported += num_responses
        now = time.monotonic()
        is_last = num_responses > 0 and self.num_left <= 0
        # A decoder counts after every token; redrawing that often would cost more than it shows.
        if now - self.last >= METER_SECONDS or is_last:
            self.last = now
            self.advance(self.note(now - self.start), self._num_unreported)
            self._num_unreported = 0

    def note(self, seconds: float) -> str:
        """Write ``820 tokens/s, 2.1 responses/s, about 310 s left``.

        The estimate takes unfinished responses to become as long as the average of those that ended. Before
        any has ended, it takes the longest possible length.
        """
        tokens_per_second = self.num_tokens / max(seconds, 1e-9)
        responses_per_second = self.num_ended / max(seconds, 1e-9)
        length = float(self.max_new_tokens)
        precision = "at most"
        if self.num_ended:
            # Unfinished responses have tokens too, so the quotient can exceed the longest response.
            length = min(self.num_tokens / self.num_ended, self.max_new_tokens)
            precision = "about"
        num_tokens_to_come = max((self.num_left + self.num_ended) * length - self.num_tokens, 0)
        seconds_left = num_tokens_to_come / max(tokens_per_second, 1e-9)
        return (
            f"{tokens_per_second:.0f} tokens/s, {responses_per_second:.1f} responses/s, "
            f"{precision} {seconds_left:.0f} s left"
        )


class _Lines:
    """Logs a line for the last unit, and for earlier ones if enough time has passed since the previous line.

    With a meter the first line comes after a few seconds, even before any unit is finished.
    """

    def __init__(self, description: str, total: int, done: int, *, in_bytes: bool, metered: bool) -> None:
        self.description = description
        self.total = total
        self.done = done
        self.done_before = done
        self.in_bytes = in_bytes
        self.metered = metered
        self.start = time.monotonic()
        self.last_line = self.start
        self.lock = threading.Lock()

    def __call__(self, note: str = "", amount: int = 1) -> None:
        # Writers of a checkpoint and workers of a sweep report from their own threads.
        with self.lock:
            self.done += amount
            now = time.monotonic()
            is_first_line = self.last_line == self.start
            wait = FIRST_SECONDS if self.metered and is_first_line else LINE_SECONDS
            if self.done < self.total and now - self.last_line < wait:
                return
            self.last_line = now
            log.info("%s %s", self.description, self._line(note, now - self.start))

    def _line(self, note: str, seconds: float) -> str:
        """Write counts, time, time left and the note."""
        rate = (self.done - self.done_before) / max(seconds, 1e-9)
        if self.in_bytes:
            counts = f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s"
        else:
            counts = f"{self.done}/{self.total}, {seconds:.0f} s"
        parts = [counts]
        # Without a rate there is no time left: nothing has been finished since the start.
        if rate and not self.metered:
            parts.append(f"{(self.total - self.done) / rate:.0f} s left")
        if note:
            parts.append(note)
        return ", ".join(parts)
