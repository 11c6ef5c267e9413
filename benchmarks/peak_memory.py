"""Peak resident memory of a Python module, and the resources of a command with its child processes.

Run as a program it prints a module's peak in kB. That figure is the kernel's VmHWM at the end of the process;
getrusage's figure for a child includes the memory of the process that started it.

    python -m benchmarks.peak_memory checkpoints_conv inspect DIR
"""

import os
import re
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SAMPLING_SECONDS = 0.02
"""Time between two looks at a process tree's memory."""


class Usage(NamedTuple):
    """Resources that a command and its child processes used.

    Attributes:
        seconds: wall time, the start of the process included.
        processor_seconds: user and system time.
        peak_bytes: largest resident memory of all processes together.
        peak_anonymous_bytes: the same without pages of files, which the kernel can drop at any time.
        error: end of the error output of a command that failed; "" after success.
    """

    seconds: float
    processor_seconds: float
    peak_bytes: float
    peak_anonymous_bytes: float
    error: str = ""


def in_child(program: str, *arguments: str | Path) -> tuple[float, float]:
    """Run a module; returns seconds and peak resident memory in bytes."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, program, *map(str, arguments)]
    start = time.monotonic()
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return time.monotonic() - start, float(result.stdout.split()[-1]) * 1024


def processor_seconds() -> float:
    """Return user and system time of all children that have ended so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(command: Sequence[str | Path], environment: Mapping[str, str]) -> Usage:
    """Run a command and measure its process tree; a failure is an outcome, not an exception."""
    peak_bytes = 0.0
    peak_anonymous_bytes = 0.0
    processor_seconds_before = processor_seconds()
    start = time.monotonic()
    # A file and not a pipe: nobody would empty a pipe while the loop samples, and a full one blocks.
    with tempfile.TemporaryFile() as error_output:
        process = subprocess.Popen(command, stdout=error_output, stderr=error_output, env=environment)
        while process.poll() is None:
            usages = [_memory_of(pid) for pid in _tree(process.pid)]
            peak_anonymous_bytes = max(peak_anonymous_bytes, sum(usage["RssAnon"] for usage in usages))
            peak_bytes = max(peak_bytes, sum(usage["VmRSS"] for usage in usages))
            # The kernel's own peak also holds what the first process had between two samples.
            peak_bytes = max(peak_bytes, usages[0]["VmHWM"])
            time.sleep(SAMPLING_SECONDS)
        seconds = time.monotonic() - start
        error_output.seek(0)
        lines = error_output.read().decode(errors="replace").strip().splitlines()
    error = ""
    if process.returncode != 0:
        last_line = lines[-1] if lines else ""
        error = f"exit status {process.returncode}: {last_line}"
    used_processor_seconds = processor_seconds() - processor_seconds_before
    return Usage(seconds, used_processor_seconds, peak_bytes, peak_anonymous_bytes, error)


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            child_pids = path.read_text().split()
        except OSError:
            # The thread or its process has ended since it was listed.
            continue
        for child_pid in child_pids:
            yield from _tree(int(child_pid))


def _memory_of(pid: int) -> dict[str, float]:
    """Read a process's memory in bytes; zeros once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        status = ""
    kilobytes = dict(re.findall(r"^(\w+):\s*(\d+) kB$", status, re.MULTILINE))
    return {name: 1024 * float(kilobytes.get(name, 0)) for name in ("VmRSS", "VmHWM", "RssAnon")}


def main() -> None:
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        print(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0])


if __name__ == "__main__":
    main()
