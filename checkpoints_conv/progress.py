"""A progress bar in bytes on a terminal, one log line every so often elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

log = logging.getLogger(__name__)

Advance = Callable[[int], None]
"""Call after each piece with its bytes; from any thread."""


@contextmanager
def byte_progress(
    description: str, total: int, done: int = 0, every_seconds: float = 10.0
) -> Iterator[Advance]:
    """Show progress, rate and time left of a conversion.

    Args: total: bytes of the whole work.  done: bytes finished by an earlier attempt.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(description, total, done, every_seconds)
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as bar:
        task = bar.add_task(description, total=total, completed=done)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class _Lines:
    """Logs where things stand when enough time has passed since the line before, and at the end."""

    def __init__(self, description: str, total: int, done: int, every_seconds: float) -> None:
        self.description, self.total, self.every_seconds = description, total, every_seconds
        self.done = self.first = done
        self.start = self.last = time.monotonic()
        self.lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self.lock:
            self.done += num_bytes
            now = time.monotonic()
            if self.done < self.total and now - self.last < self.every_seconds:
                return
            self.last = now
            rate = (self.done - self.first) / max(now - self.start, 1e-9)
            log.info(
                "%s %.2f of %.2f GB, %.0f MB/s, %.0f s left", self.description, self.done / 1e9,
                self.total / 1e9, rate / 1e6, (self.total - self.done) / max(rate, 1.0),
            )  # fmt: skip
