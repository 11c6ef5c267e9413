"""Run a Python module, then print its peak resident memory in kB.

The figure is the kernel's VmHWM at the end of the process; getrusage's figure for a child includes the memory
of the process that started it.

    python -m benchmarks.peak_memory checkpoints_conv inspect DIR
"""

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path


def in_child(program: str, *arguments: str | Path) -> tuple[float, float]:
    """Run a module; returns seconds and peak resident memory in bytes."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, program, *map(str, arguments)]
    start = time.monotonic()
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return time.monotonic() - start, float(result.stdout.split()[-1]) * 1024


def main() -> None:
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        print(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0])


if __name__ == "__main__":
    main()
