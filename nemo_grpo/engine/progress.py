"""How long work shows where it is: a bar on a terminal, one plain log line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers.utils import logging as transformers_logging

log = logging.getLogger(__name__)

Advance = Callable[[str], None]
"""Call once per finished unit, with a short text on where things stand (``"loss 0.31"``), or an empty one."""


@contextmanager
def progress(
    description: str, total: int, *, every_seconds: float = 10.0, console: Console | None = None
) -> Iterator[Advance]:
    """Show the progress of ``total`` units of work.

    Args:    description: what is being done.  every_seconds: least time between two log lines (no terminal).
             console: where the bar goes; None is standard error.
    Returns: a context manager that gives the function to call after each unit.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(
            TextColumn("{task.description}"), *columns, TextColumn("{task.fields[note]}"), console=console
        ) as bar:
            task = bar.add_task(description, total=total, note="")

            def advance(note: str = "") -> None:
                bar.update(task, advance=1, note=note)

            yield advance
    else:
        yield _Lines(description, total, every_seconds)


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Hide the bars that transformers draws while it reads or writes weights; restores its setting."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


class _Lines:
    """Logs the last unit, and others when enough time has passed since the line before."""

    def __init__(self, description: str, total: int, every_seconds: float) -> None:
        self.description, self.total, self.every_seconds = description, total, every_seconds
        self.done = 0
        self.start = self.last_line = time.monotonic()

    def __call__(self, note: str = "") -> None:
        self.done += 1
        now = time.monotonic()
        if self.done < self.total and now - self.last_line < self.every_seconds:
            return
        self.last_line = now
        elapsed = now - self.start
        remaining = elapsed / self.done * (self.total - self.done)
        log.info(
            "%s %d/%d, %.0f s, %.0f s left%s", self.description, self.done, self.total, elapsed, remaining,
            f", {note}" if note else "",
        )  # fmt: skip
