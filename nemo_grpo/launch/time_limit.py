"""Slurm's time limits."""

from __future__ import annotations

import re
from datetime import timedelta

from nemo_grpo.errors import UserError

_MINUTES = re.compile(r"(?P<minutes>\d+)(:(?P<seconds>\d+))?")
_HOURS = re.compile(r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)")
_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?")
UNLIMITED = ("infinite", "unlimited", "-1")


def parse_time_limit(text: str) -> timedelta | None:
    """A time limit as ``sbatch --time`` reads it; None: no limit.

    Forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
    days-hours:minutes:seconds, infinite, unlimited.

    Raises: UserError: another form, or no time at all.
    """
    if text.lower() in UNLIMITED:
        return None
    found = next((m for form in (_MINUTES, _HOURS, _DAYS) if (m := form.fullmatch(text))), None)
    parts = found.groupdict() if found else {}
    limit = timedelta(**{name: int(part) for name, part in parts.items() if part})
    if not limit:
        hint = _with_units(text)
        raise UserError(
            f"--time={text}: Slurm reads minutes, hours:minutes:seconds or days-hours:minutes:seconds"
            f"{f'; use {hint}' if hint else ', such as 04:00:00'}"
        )
    return limit


def _with_units(text: str) -> str:
    """What ``4h``, ``90m`` or ``2d`` means, in Slurm's form; empty: it has no such form."""
    parts = re.fullmatch(r"(?:(\d+)d)? ?(?:(\d+)h)? ?(?:(\d+)m(?:in)?)?", text.strip().lower())
    days, hours, minutes = (int(part or 0) for part in parts.groups()) if parts else (0, 0, 0)
    if not (days or hours or minutes):
        return ""
    hours, minutes = hours + minutes // 60, minutes % 60
    return f"{f'{days}-' if days else ''}{hours:02d}:{minutes:02d}:00"
