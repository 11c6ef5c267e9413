"""The console that tables are printed on."""

import os

from rich.console import Console

WIDTH = 200
"""Columns if there is no terminal."""


def wide_console() -> Console:
    """Make one as wide as the terminal or COLUMNS; in a pipe or file wide enough for whole names."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)
