"""The GPU benchmark's arithmetic by hand, and its loop on a very small shape on the CPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[3] / "benchmarks/gpu_policy_update.py"
spec = importlib.util.spec_from_file_location("gpu_policy_update", PATH)
bench = sys.modules["gpu_policy_update"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)

# h = q = 8, kv = 8 / 4 x 2 = 4, f = 16, V = 32
TINY = bench.Shape(hidden=8, num_layers=2, heads=4, kv_heads=2, ffn=16, vocab=32, tied=True)


def test_flops_count_every_product_three_times():
    # one layer: qkv 2 x 8 x (8 + 8) = 256, projection 2 x 8 x 8 = 128, mlp 6 x 8 x 16 = 768,
    # attention 2 x 8 x 10 = 160; vocabulary 2 x 8 x 32 = 512
    assert bench.update_flops_per_token(TINY, length=10) == 3 * (2 * (256 + 128 + 768 + 160) + 512)


def test_layers_fit_by_their_state_and_activations():
    # one layer: 576 weights x 18 = 10368 bytes, and per token 2 (64 + 32 + 64) = 320, so 13568;
    # vocabulary 256 x 18 = 4608; logits 4 x 10 x 32 = 1280
    assert bench.layers_that_fit(TINY, 20952, 10) == 1
    assert bench.layers_that_fit(TINY, (2 * 13568 + 4608 + 1280 - 1) / 0.9, 10) == 1
    assert bench.layers_that_fit(TINY, (2 * 13568 + 4608 + 1280 + 1) / 0.9, 10) == 2
    assert bench.layers_that_fit(TINY, 1e12, 10) == 2  # no more than the model has


def test_drift_of_logprobs_by_hand():
    found = bench.drift(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]]))
    assert found["abs_mean"] == pytest.approx(0.25)
    assert found["abs_max"] == pytest.approx(0.5)
    assert found["kl"] == pytest.approx((2.718281828459045**0.5 - 0.5 - 1) / 2)


def test_the_loop_runs_and_two_runs_start_from_the_same_weights(capsys):
    sizes = {"num_sequences": 8, "length": 9, "micro_batch_size": 4, "num_steps": 4}
    shape = bench.Shape(hidden=32, num_layers=2, heads=4, kv_heads=2, ffn=64, vocab=96, tied=False)
    results = [bench.measure(name, shape, {}, torch.device("cpu"), **sizes) for name in ("bf16", "again")]
    assert results[0].losses == results[1].losses
    assert len(set(results[0].losses)) > 1
    found = bench.report("tiny", results)
    assert found["again"]["drift"]["abs_max"] == 0
    assert found["bf16"]["losses"] == results[0].losses
    assert "tokens/s" in capsys.readouterr().out
