"""Workarounds around faults of NeMo-RL, Ray and Megatron, one file each.

A file's docstring names the fault, says what it would cause, and ends with three lines: ``Upstream`` is the
fault's number there, ``Versions`` are those that need the workaround, and ``Needed while`` is the test that
fails once the workaround is no longer needed. Then the file is to be deleted.
"""
