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
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

VARIANTS = ("cw_grpo", "erpo", "tr_grpo_random")  # token weights, entropies and reference, random draws
TIMEOUT = 900


@pytest.fixture(scope="session")
def stack():
    """NeMo-RL's source and the Python that runs these tests; no vLLM."""
    return importlib.import_module("benchmarks.engines_agree").sides_stack()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small model and recorded responses."""
    folder = tmp_path_factory.mktemp("agree")
    code = f"from benchmarks import engines_agree as e; e.record(e.sides_stack(), e.Path({str(folder)!r}))"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env=clean(), check=True, timeout=TIMEOUT
    )
    return folder


def clean():
    """The environment without what this process has added for tests."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }


def test_engines_agree_on_three_variants(folder, stack, monkeypatch):
    agree = importlib.import_module("benchmarks.engines_agree")
    comparison = importlib.import_module("benchmarks.agreement.comparison")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cases = [agree.Case(variant, "TP1", "float32") for variant in VARIANTS]
    embedded, cluster = agree.run(stack, folder, cases)
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


def test_a_resumed_policy_goes_on_exactly_where_it_stopped(folder, stack, tmp_path, monkeypatch):
    cluster = importlib.import_module("nemo_grpo.rehearsal.cluster")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    log, output = folder / "resumed.log", tmp_path / "resumed.pt"
    script = Path(__file__).with_name("resumed_policy.py")
    with cluster.ray_cluster(stack, folder, 2) as ray, log.open("wb") as out:
        command = [sys.executable, "-W", "ignore", script, folder, output]
        done = subprocess.run(
            command, env=ray.environment, stdout=out, stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    found = torch.load(output, weights_only=False)
    unbroken, resumed = found["unbroken"], found["resumed"]
    assert resumed["lr"] == unbroken["lr"] == pytest.approx(1e-4)  # cosine over 4 steps, at its middle
    assert resumed["loss"] == unbroken["loss"]
    assert resumed["grad_norm"] == unbroken["grad_norm"]
    for name, tensor in unbroken["weights"].items():  # Adam's moments and FP32 weights are in them
        assert torch.equal(resumed["weights"][name], tensor), name
