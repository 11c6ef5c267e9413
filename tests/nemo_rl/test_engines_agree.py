"""NeMo-RL's Megatron workers and the embedded engine compute the same from the same responses.

In FP32, so that a difference is one of the formulas: what is left is the order of sums. Both sides are
processes of `benchmarks/engines_agree.py`, which has all variants, layouts and BF16.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIANTS = ("cw_grpo", "erpo", "tr_grpo_random")  # token weights, entropies and reference, random draws


def test_engines_agree_on_three_variants(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    agree = importlib.import_module("benchmarks.engines_agree")
    comparison = importlib.import_module("benchmarks.agreement.comparison")
    code = f"from benchmarks import engines_agree as e; e.record(e.sides_stack(), e.Path({str(tmp_path)!r}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # without what this process has added for tests
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
    cases = [agree.Case(variant, "TP1", "float32") for variant in VARIANTS]
    embedded, cluster = agree.run(agree.sides_stack(), tmp_path, cases)
    for case in cases:
        ours, theirs = embedded[case], cluster[case]
        found = comparison.compare(ours, theirs)
        assert abs(ours[2].metrics["kl/reference"]) > 1e-4, "the policy has left the reference"
        assert found.advantages < 1e-3, case  # ERPO's depend on the logprobs
        assert not found.token_weights > 1e-6, case
        for name in ("logprobs", "reference", "entropies"):
            assert not getattr(found, name) > 1e-3, (case, name)
        for name in ("loss", "kl", "grad_norm", "first", "last"):
            assert getattr(found, name) < 1e-3, (case, name)
        for name in set(ours[2].metrics) & set(theirs[2].metrics):
            assert theirs[2].metrics[name] == pytest.approx(ours[2].metrics[name], rel=1e-2, abs=1e-3), name
