"""A bar on a terminal, lines elsewhere."""

import io
import logging
import re

import pytest
from rich.console import Console

from nemo_grpo.cli import StderrHandler
from nemo_grpo.support import progress as module
from nemo_grpo.support.progress import TokenMeter, progress


@pytest.fixture
def show_on(monkeypatch):
    """Show bars on a console in place of standard error."""
    return lambda console: monkeypatch.setattr(module, "Console", lambda **_: console)


def run(caplog, monkeypatch, seconds_per_unit, total):
    clock = iter(range(0, 10**6, seconds_per_unit))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO), progress("work", total) as advance:
        for unit in range(total):
            advance(f"loss {unit}")
    return [record.getMessage() for record in caplog.records]


def test_without_a_terminal_lines_come_now_and_then_and_at_the_end(caplog, monkeypatch, show_on):
    out = io.StringIO()
    show_on(Console(file=out, force_terminal=False))
    lines = run(caplog, monkeypatch, 4, 7)
    # a line when 10 s have passed since the last one (at 12 s, 24 s), and after the last unit (28 s)
    assert lines == [
        "work 3/7, 12 s, 16 s left, loss 2",
        "work 6/7, 24 s, 4 s left, loss 5",
        "work 7/7, 28 s, 0 s left, loss 6",
    ]
    assert out.getvalue() == ""


def test_where_nothing_is_done_yet_no_time_is_promised(caplog, monkeypatch, show_on):
    clock = iter([0, 30])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    show_on(Console(file=io.StringIO(), force_terminal=False))
    with caplog.at_level(logging.INFO), progress("work", 7) as advance:
        advance("0 of 2 runs ended", 0)
    assert [record.getMessage() for record in caplog.records] == ["work 0/7, 30 s, 0 of 2 runs ended"]


def test_on_a_terminal_there_is_a_bar_and_no_line(caplog, show_on):
    out = io.StringIO()
    show_on(Console(file=out, force_terminal=True, width=100))
    with caplog.at_level(logging.INFO), progress("work", 3) as advance:
        for unit in range(3):
            advance(f"loss {unit}")
    assert caplog.records == []
    assert "3/3" in out.getvalue()
    assert "loss 2" in out.getvalue()
    shown = out.getvalue()
    with caplog.at_level(logging.INFO), progress("work", 1, bar=False) as advance:
        advance()  # within other work
    assert [record.getMessage()[:8] for record in caplog.records] == ["work 1/1"]
    assert out.getvalue() == shown


def test_what_is_logged_stands_above_the_bar_on_a_line_of_its_own(monkeypatch, show_on):
    out = io.StringIO()
    show_on(Console(file=out, force_terminal=True, width=80, color_system=None))
    monkeypatch.setattr(logging.getLogger(), "handlers", [StderrHandler()])
    with progress("work", 2) as advance:
        advance()
        logging.getLogger("x").warning("step 1: accuracy 0.5 [red]")
        advance()
    assert "\r\x1b[2Kstep 1: accuracy 0.5 [red]\n" in out.getvalue(), "the bar is erased first"


def test_a_narrow_terminal_cuts_the_note_and_nothing_else(show_on):
    out = io.StringIO()
    show_on(Console(file=out, force_terminal=True, width=80, color_system=None))
    note = "reward 0.61  right 52%  signal 81%  length 36  cut 7%  entropy 0.82  14291 tokens/s"
    with progress("grpo quickstart-gpg", 160, done=39) as advance:
        advance(note)
    last = [line for line in re.split(r"[\r\n]", out.getvalue()) if "grpo" in line][-1]
    assert re.search(r"grpo quickstart-gpg +40/160 .* 0:00:0\d \S+:\S+ reward 0.*\u2026", last), last


def test_a_meter_shows_rate_and_time_left_before_a_unit_is_done(caplog, monkeypatch, show_on):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    show_on(Console(file=io.StringIO(), force_terminal=False))
    with caplog.at_level(logging.INFO), progress("work", 6, metered=True) as advance:
        meter = TokenMeter(advance, num_responses=6, max_new_tokens=100)
        meter.recalled(2)
        for second in range(1, 21):
            now[0] = float(second)
            meter(10, int(second == 10))
        meter(0, 3)
    lines = [record.getMessage() for record in caplog.records]
    # 10 tokens a second: at 3 s at most 400 - 30 are left; at 13 s one of 130, so 100, has ended: 400 - 130
    assert lines == [
        "work 2/6, 3 s, 10 tokens/s, 0.0 responses/s, at most 37 s left",
        "work 3/6, 13 s, 10 tokens/s, 0.1 responses/s, about 27 s left",
        "work 6/6, 20 s, 10 tokens/s, 0.2 responses/s, about 0 s left",
    ]
