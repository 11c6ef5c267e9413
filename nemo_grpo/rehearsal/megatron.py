"""megatron-core and Megatron-Bridge without CUDA and without Transformer Engine, in a policy's processes."""

from __future__ import annotations

import importlib
import queue
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NEWER_NAMES = {
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": (
        "FullyShardedDataParallelV1",
        "FullyShardedDataParallelV2",
    )
}
"""Names of a megatron-core after the newest release that NeMo-RL's commit 7ea279abf imports and, without
FSDP, never uses."""
WITHOUT_TRANSFORMER_ENGINE = ("megatron.bridge.peft.utils", "megatron.bridge.peft.module_matcher")
"""Modules that take megatron-core's names of its layers, None where it is not installed, for found."""
OF_MODELOPT = ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state")


def add_newer_names(module: Any) -> None:
    """See `NEWER_NAMES`."""
    for name in NEWER_NAMES[module.__name__]:
        if not hasattr(module, name):
            setattr(module, name, type(name, (), {}))


def skip_compiling(module: Any) -> None:
    """megatron-core's wheel has no sources of its data sets' helpers, which reinforcement does not use."""
    module.compile_helpers = _nothing


def prepare(_module: Any = None) -> None:
    """Everything that matters once a model is built; NeMo-RL's worker has been imported with all it needs."""
    from nemo_grpo.engine.megatron import adam

    adam.install()  # what a GPU host saves; resuming torch's AdamW is broken in the distributed optimizer
    _use_cpu_generator()
    _use_local_layers()
    _deny_transformer_engine()
    _skip_modelopt()
    _save_in_this_process()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _set(module: str, **names: Any) -> None:
    for name, new in names.items():
        setattr(importlib.import_module(module), name, new)


def _use_cpu_generator() -> None:
    """megatron-core reaches CUDA's generator through torch's C interface."""
    _set(
        "megatron.core.tensor_parallel.random",
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
    )


def _use_local_layers() -> None:
    """megatron-core's own layers in place of Transformer Engine's, with an attention for packed sequences."""
    _set("megatron.bridge.models.gpt_provider", transformer_engine_layer_spec=local_layers)


def local_layers(config: Any) -> Any:
    """The block of this pipeline stage; the embedded engine's layers."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nemo_grpo.engine.megatron.layers import local_block_spec

    block = local_block_spec(config)
    for layer in block.layer_specs:
        assert isinstance(layer, ModuleSpec)
        layer.submodules.self_attention.submodules.core_attention = packed_attention()
    return block


def packed_attention() -> type:
    """The embedded engine's attention, taking packed sequences as NeMo-RL lays them out."""
    from megatron.core import parallel_state
    from torch.distributed.nn.functional import all_gather

    from nemo_grpo.engine.megatron.layers import CausalAttention
    from nemo_grpo.engine.megatron.packing import AttentionPlan, PaddedRows
    from nemo_grpo.engine.megatron.parallel import zigzag_positions

    class PackedAttention(CausalAttention):
        """Sequences one after the other; under context parallelism each is cut zigzag by itself."""

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
            packed = named.pop("packed_seq_params", None)
            if packed is None:
                return super().forward(query, key, value, *rest, **named)
            starts = packed.cu_seqlens_q_padded
            starts = packed.cu_seqlens_q if starts is None else starts
            rows = PaddedRows.of((starts[1:] - starts[:-1]).long())
            stream = [x.flatten(0, -3) for x in (query, key, value)]
            places = [self._places(starts.tolist(), rank) for rank in range(self.context_size)]
            if self.context_size > 1:
                group, order = parallel_state.get_context_parallel_group(), torch.cat(places).argsort()
                stream = [torch.cat(all_gather(x.contiguous(), group=group))[order] for x in stream]
            laid_out = AttentionPlan(rows).prompts.lay_out
            whole = rows.collect(self._attend(*map(laid_out, stream)))
            return whole[places[parallel_state.get_context_parallel_rank()]].flatten(1)[:, None]

        def _places(self, starts: list[int], rank: int) -> Tensor:
            """Where in the whole stream the tokens of a context-parallel rank stand."""
            size = self.context_size
            return torch.cat([a + zigzag_positions(b - a, size, rank) for a, b in pairwise(starts)])

    return PackedAttention


def _deny_transformer_engine() -> None:
    for name in WITHOUT_TRANSFORMER_ENGINE:
        module = importlib.import_module(name)
        _set(name, **{flag: False for flag in vars(module) if flag.startswith("HAVE_TE")})


def _skip_modelopt() -> None:
    """No model here is quantised: there is no such state to save or to restore."""
    _set("megatron.bridge.training.checkpointing", **dict.fromkeys(OF_MODELOPT, _nothing))


def _save_in_this_process() -> None:
    """Saves are synchronous: no process beside each rank that keeps their results, two seconds each."""
    _set("megatron.core.dist_checkpointing.strategies.filesystem_async", _results_queue=queue.Queue())
