"""Where tables go."""

from __future__ import annotations

import os

from rich.console import Console

WIDTH = 200
"""Columns where there is no terminal that has some."""


def wide_console() -> Console:
    """As wide as the terminal, or COLUMNS; in a pipe or a file so wide that names stay whole."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)
