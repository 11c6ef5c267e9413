"""A bar on a terminal, lines elsewhere."""

import io
import logging

from rich.console import Console

from nemo_grpo import progress as module
from nemo_grpo.progress import progress


def run(caplog, monkeypatch, seconds_per_unit, total, console):
    clock = iter(range(0, 10**6, seconds_per_unit))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO), progress("work", total, every_seconds=10, console=console) as advance:
        for unit in range(total):
            advance(f"loss {unit}")
    return [record.getMessage() for record in caplog.records]


def test_without_a_terminal_lines_come_now_and_then_and_at_the_end(caplog, monkeypatch):
    out = io.StringIO()
    lines = run(caplog, monkeypatch, 4, 7, Console(file=out, force_terminal=False))
    # a line when 10 s have passed since the last one (at 12 s, 24 s), and after the last unit (28 s)
    assert lines == [
        "work 3/7, 12 s, 16 s left, loss 2",
        "work 6/7, 24 s, 4 s left, loss 5",
        "work 7/7, 28 s, 0 s left, loss 6",
    ]
    assert out.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_and_no_line(caplog):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with caplog.at_level(logging.INFO), progress("work", 3, console=console) as advance:
        for unit in range(3):
            advance(f"loss {unit}")
    assert caplog.records == []
    assert "3/3" in out.getvalue()
    assert "loss 2" in out.getvalue()
