"""Faults of megatron-core and torch that the engine works around.

A test fails when the oldest supported version has the fault no longer: then remove the workaround with it.
"""

import inspect
import re
import warnings
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import torch
from megatron.core import dist_checkpointing, jit
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from nemo_grpo.engine.megatron import cpu

ROOT = Path(__file__).parents[3]
OLDEST = re.findall(r"megatron-core>=([\d.]+)", (ROOT / "pyproject.toml").read_text())[0]
"""Oldest minor version of pyproject.toml."""
SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}

of_the_oldest = pytest.mark.skipif(
    not megatron.core.__version__.startswith(f"{OLDEST}."), reason=f"needs megatron-core {OLDEST}"
)


@of_the_oldest
def test_a_strided_tensor_is_returned_without_the_sum_of_the_ranks(monkeypatch):
    """NVIDIA/Megatron-LM#5337; the contiguous copy in `PackableGPTModel._postprocess`."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: tensor.mul_(2))
    two_ranks = SimpleNamespace(size=lambda: 2)
    assert mappings._reduce(torch.ones(2, 3), two_ranks).sum() == 12
    assert mappings._reduce(torch.ones(2, 3).t(), two_ranks).sum() == 6  # not 12


@of_the_oldest
def test_a_save_forks_a_process_per_file():
    """NVIDIA/Megatron-LM#3633; `policy_checkpoint.write_in_this_process`."""
    assert hasattr(FileSystemWriterAsync, "write_preloaded_data_multiproc")


@of_the_oldest
@pytest.mark.parametrize(("module", "attribute"), cpu._AS_CUDA)
def test_a_function_takes_cuda_tensors_alone(module, attribute):
    """`cpu._AS_CUDA`."""
    function = reduce(getattr, attribute.split("."), import_module(f"megatron.core.{module}"))
    assert re.search(r"'torch\.cuda\.|\.cuda\(", inspect.getsource(function))


@of_the_oldest
def test_the_random_state_is_set_through_torchs_c_interface():
    """`cpu._replace_rng_setter`."""
    assert "_C._cuda_setRNGState(" in inspect.getsource(random)


@of_the_oldest
def test_fused_functions_are_compiled_on_import():
    """`torch.compile` in `engine.megatron.__init__`."""
    assert "jit_fuser = torch.compile" in inspect.getsource(jit)


@of_the_oldest
def test_a_missing_transformer_engine_is_warned_of_on_import():
    """The filter of warnings in `engine.megatron.__init__`."""
    assert "Transformer Engine and Apex are not installed" in inspect.getsource(clip_grads)


@of_the_oldest
def test_the_norm_of_torch_refuses_sequence_parallelism():
    """`layers.RMSNorm`."""
    config = TransformerConfig(
        **SIZES, normalization="RMSNorm", sequence_parallel=True, tensor_model_parallel_size=2
    )
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(config, 8)


@of_the_oldest
def test_sequences_of_several_lengths_refuse_the_default_dispatcher_of_experts():
    """``moe_token_dispatcher_type`` in `model.transformer_config`."""
    with pytest.raises(ValueError, match="use alltoall dispatcher instead"):
        TransformerConfig(**SIZES, variable_seq_lengths=True)


@of_the_oldest
def test_a_configuration_warns_of_options_that_it_does_not_use():
    """The filter of warnings in `model.transformer_config`."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        TransformerConfig(**SIZES, recompute_granularity="selective", recompute_modules=["core_attn"])
    messages = " ".join(str(warning.message) for warning in issued)
    assert "full scope is deprecated" in messages
    assert "If you are using transformer_engine" in messages


@of_the_oldest
def test_a_model_takes_only_the_factor_of_llama3_rotary_scaling():
    """``inv_freq`` in `model.build_model`."""
    parameters = inspect.signature(GPTModel).parameters
    assert "rope_scaling_factor" in parameters
    assert "low_freq_factor" not in parameters


@of_the_oldest
def test_a_checkpoint_is_read_by_a_deprecated_function():
    """The filter of warnings in `policy_checkpoint.load_policy`."""
    assert "checkpoint.load_state_dict(" in inspect.getsource(torch_strategy)


def test_a_block_whose_input_needs_no_gradient_gives_its_weights_none():
    """torch's reentrant checkpointing, as megatron-core's; `lora._require_gradient`."""
    weight = torch.ones(1, requires_grad=True)
    for needs_gradient in (False, True):
        x = torch.ones(1, requires_grad=needs_gradient)
        output = torch.utils.checkpoint.checkpoint(lambda x: x * weight, x, use_reentrant=True)
        assert output.requires_grad == needs_gradient


def test_torch_runs_pickled_code_of_a_checkpoint():
    """`policy_checkpoint._data_alone`."""
    assert "weights_only=False" in inspect.getsource(DefaultLoadPlanner.load_bytes)


@pytest.mark.skipif(
    "async_strategy" not in inspect.signature(dist_checkpointing.save).parameters,
    reason="needs a megatron-core with several writers of checkpoints",
)
def test_the_default_writer_of_checkpoints_is_another_package():
    """`policy_checkpoint._STRATEGY`."""
    assert inspect.signature(dist_checkpointing.save).parameters["async_strategy"].default != "mcore"
