"""Python and the command line in processes of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_grpo.engine.launch import reserved_port

ROOT = Path(__file__).parents[1]
PATIENCE = 1000
"""Seconds before a process counts as hanging: some need 100 of a processor, and a busy machine gives few."""


def python(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    """Python in a process of its own, whose output is one stream."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


nemo_grpo = partial(python, "-m", "nemo_grpo.cli")


def output_of(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    """What it says until its end, which must be by this exit code."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == exit_code, output[-3000:]
    return output


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Until the condition is true; the process, if there is one, must live till then."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.01)


def free_port() -> int:
    """A port that is free right now, for servers that cannot take a `reserved_port`."""
    with reserved_port() as port:
        return port
