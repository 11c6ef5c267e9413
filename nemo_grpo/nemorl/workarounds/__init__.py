"""Workarounds around faults of NeMo-RL, Ray and Megatron, one file each.

A file's docstring says what goes wrong without it, and has three lines: ``Upstream`` (the number there, or
that none is known), ``Versions`` (those that need it) and ``Needed while`` (the test that fails once it is no
longer needed; then the file goes).
"""
