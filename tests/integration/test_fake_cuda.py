"""A rehearsal for the GPU: losses, policy and checkpoints on a CUDA device that is not there."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import run
from toy_policies import FULL_RECOMPUTE

from nemo_grpo import VARIANTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/gpu runs on it"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler"),
]

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "padded": (1, {}, {"variant": "grpo"}),
    "fp32-scoring": (1, {}, {"variant": "dapo", "dtype": "float32", "scoring": True}),
    "packed-recompute": (1, {}, {"variant": "erpo", "mb_tokens": 40, "fields": FULL_RECOMPUTE}),
    "lora": (1, {}, {"variant": "grpo", "mb_tokens": 40, "lora": True}),
    "tp2-sp-dp2": (4, {"tensor": 2, "sequence_parallel": True}, {"variant": "cw_grpo", "mb_tokens": 40}),
    "tp2-cp2": (4, {"tensor": 2, "context": 2}, {"variant": "tr_grpo", "mb_tokens": 40}),
    "cp2-padded": (2, {"context": 2}, {"variant": "clip_cov"}),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, Any]:
    """What every case answered, by its name or its layout's."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ("device", "losses")}
    cases["checkpoint"] = ("checkpoint", {"folder": str(tmp_path_factory.mktemp("checkpoint"))})
    cases["benchmark"] = ("benchmark", {"output": str(tmp_path_factory.mktemp("benchmark") / "x.json")})
    cases["gpu_tests"] = ("gpu_tests", {"folder": str(tmp_path_factory.mktemp("gpu_tests"))})
    for name, (world_size, layout, how) in LAYOUTS.items():
        cases[name] = ("policy", {"world_size": world_size, "layout": layout, "rows": 2, **how})
    found = dict(zip(cases, run(list(cases.values())), strict=True))
    found["benchmark"]["written"] = json.loads(Path(cases["benchmark"][1]["output"]).read_text())
    return found


def test_the_device_that_is_not_there_tells_what_a_gpu_would(seen):
    found = dict(seen["device"])
    assert "mixes devices: cuda:0 [4, 8], cpu [4, 8]" in found.pop("mixed")
    assert "mixes devices" in found.pop("mixed in place")
    assert found.pop("mask").startswith("DynamicOutputShapeException")
    assert found.pop("nonzero").startswith("DynamicOutputShapeException")
    assert "of a CPU tensor, which NCCL does not have" in found.pop("reduce on the CPU")
    assert found == {
        "add": "",
        "item": "read",
        "if": "read",
        "tolist": "read",
        "cpu": "read",
        "to": "upload",
        "to, pinned": "",
        "tensor": "upload",
        "index": "upload",
        "synchronize": "sync",
        "reduce": "",
        "gradient": "cuda:0",
    }


def test_no_loss_waits_and_nemo_rls_reads_once(seen):
    found = seen["losses"]
    assert found.keys() == set(VARIANTS)
    for variant, seen in found.items():
        assert seen["waits"] == {}, variant
        assert seen["devices"] == ["cuda:0"], variant
        assert seen["nemo_rl"] == {"read nemo_grpo/nemorl/loss.py:__call__": 1}, variant


def total(waits: dict[str, int], kind: str, where: str = "") -> int:
    return sum(number for place, number in waits.items() if place.startswith(kind) and where in place)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_waits_for_the_gpu_only_between_passes(seen, layout):
    found, how = seen[layout], LAYOUTS[layout][2]
    assert found["inside"] == []  # the schedule: forward, loss, backward of every microbatch
    assert found["weights"] == ["cuda:0"]
    for name in ("score", "reference"):
        assert total(found[name], "read") == 1  # all scores together
        assert total(found[name], "upload", "reference_weights") == 0  # from pinned memory
    # metrics, gradient norm and whether it is finite; and the scores, if the update scored
    assert total(found["update"], "read", "_add_up") == 1
    assert total(found["update"], "read", "_collect") == bool(how.get("scoring"))
    assert total(found["update"], "read") <= 6
    assert total(found["update"], "upload", "adam.py") == 0
    assert not found["cudnn_attention"]  # it would plan anew for every length
    assert found["loss"] == 1  # what a read gives here


def test_a_checkpoint_is_written_from_the_gpu_and_read_back_to_it(seen):
    found = seen["checkpoint"]
    assert found["devices"] == [["cuda:0"], ["cuda:0"]]
    assert {".metadata", "metadata.json"} < set(found["files"])


def test_the_gpu_benchmark_measures_bf16_then_fp8_and_writes_both(seen):
    found = seen["benchmark"]
    assert found["exit"] == 0
    assert found["fields"] == [{}, {"fp8": "e4m3", "fp8_recipe": "blockwise"}]
    measured = found["written"]["tiny"]
    assert measured.keys() == {"bf16", "fp8 blockwise"}
    assert measured["fp8 blockwise"]["drift"].keys() == {"abs_mean", "abs_max", "kl"}
    assert measured["bf16"]["losses"] == [1.0] * 8  # what a read gives here
    assert measured["bf16"]["num_layers"] == 2


def test_the_tests_for_a_gpu_go_through_the_policy_as_it_is(seen):
    assert seen["gpu_tests"] == ["weights"]
