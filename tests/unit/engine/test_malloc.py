"""Freed memory is kept for a step's next allocations, and goes back to the system where a step is left."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_grpo.support import machine

BLOCK = 100_000  # bytes; larger ones the C library gives back itself


def resident() -> int:
    """Bytes of this process in memory."""
    return int(re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_memory_below_a_block_in_use_is_given_back():
    blocks = [b"x" * BLOCK for _ in range(2000)]
    del blocks[:-1]
    before = resident()
    machine.release_freed_memory()
    assert before - resident() > 1000 * BLOCK
    assert blocks == [b"x" * BLOCK]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_large_block_that_was_freed_costs_no_page_faults_again():
    script = """
import resource
from nemo_grpo.support import machine
machine.keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**26 / 4096 / 10
