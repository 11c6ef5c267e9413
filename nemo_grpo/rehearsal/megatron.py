"""Patches of megatron-core and Megatron-Bridge for policy processes without CUDA and Transformer Engine."""

import importlib
import inspect
import queue
import sys
import types
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NEWER_NAMES = ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2")
"""Names of an unreleased megatron-core's FSDP, which NeMo-RL 7ea279abf imports and uses with FSDP alone."""
WITHOUT_TRANSFORMER_ENGINE = ("megatron.bridge.peft.utils", "megatron.bridge.peft.module_matcher")
"""Modules that copy Transformer Engine names from megatron-core, which are None if it is not installed."""
MODELOPT_FUNCTIONS = ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state")


def add_newer_names(module: Any) -> None:
    """Add `NEWER_NAMES`."""
    for name in NEWER_NAMES:
        if not hasattr(module, name):
            setattr(module, name, type(name, (), {}))


def compute_yarn_here(module: Any) -> None:
    """Avoid ``torch.device(current_device())``, which torch refuses without a GPU."""
    stock = module.YarnRotaryEmbedding.__init__

    def initialise(self: Any, *args: Any, **further: Any) -> None:
        stock(self, *args, **further | {"use_cpu_initialization": True})

    module.YarnRotaryEmbedding.__init__ = initialise


def say_that_any_key_is_taken(module: Any) -> None:
    """Give the class a signature with ``**further``, which Bridge looks for; transformers 5.8's has none."""
    any_key = inspect.Parameter("further", inspect.Parameter.VAR_KEYWORD)
    module.Qwen2_5_VLVisionConfig.__signature__ = inspect.Signature([any_key])


def prepare(_module: Any = None) -> None:
    """Replace what must be in place before a model is built; NeMo-RL's worker is already imported."""
    from nemo_grpo.engine.megatron.optimizer import install_adam

    install_adam()  # its state is a GPU host's; the distributed optimizer cannot resume torch's AdamW
    _use_local_layers()
    for name in WITHOUT_TRANSFORMER_ENGINE:
        module = importlib.import_module(name)
        _set(name, **{flag: False for flag in vars(module) if flag.startswith("HAVE_TE")})
    # megatron-core reaches CUDA's generator through torch's C interface
    _set(
        "megatron.core.tensor_parallel.random",
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
    )
    # token counts per expert rank: it converts only CUDA tensors to numbers
    _set("megatron.core.transformer.moe.token_dispatcher", maybe_move_tensor_to_cpu=_as_numbers)
    # no model here is quantised, so there is no state to save or restore
    _set("megatron.bridge.training.checkpointing", **dict.fromkeys(MODELOPT_FUNCTIONS, _nothing))
    quantization = types.ModuleType("modelopt.torch.quantization.utils")
    quantization.is_quantized = lambda *_: False  # type: ignore[attr-defined]
    sys.modules[quantization.__name__] = quantization
    # save synchronously, without a helper process per rank, which takes two seconds each
    _set("megatron.core.dist_checkpointing.strategies.filesystem_async", _results_queue=queue.Queue())


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _set(module: str, **names: Any) -> None:
    for name, new in names.items():
        setattr(importlib.import_module(module), name, new)


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _use_local_layers() -> None:
    """Put megatron-core's own layers, with attention for packed sequences, in place of other kernels."""
    module = "megatron.bridge.models.gpt_provider"
    provider = importlib.import_module(module).GPTModelProvider
    finalize = provider.finalize

    def finalize_without_kernels(self: Any) -> None:
        # Bridge sets these for some families, and the first conversion does not ask the recipe.
        self.moe_permute_fusion = self.moe_grouped_gemm = self.apply_rope_fusion = False
        finalize(self)

    _set(module, transformer_engine_layer_spec=local_layers)
    provider.finalize = finalize_without_kernels


def local_layers(config: Any) -> Any:
    """Make this pipeline stage's block of the embedded engine's layers."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nemo_grpo.engine.megatron.layers import local_block_spec

    block = local_block_spec(config)
    for layer in block.layer_specs:
        assert isinstance(layer, ModuleSpec)
        layer.submodules.self_attention.submodules.core_attention = packed_attention()
    return block


def packed_attention() -> type:
    """Make the embedded engine's attention for packed sequences in NeMo-RL's layout."""
    from megatron.core import parallel_state

    from nemo_grpo.engine.megatron.layers import CausalAttention
    from nemo_grpo.engine.megatron.packing import AttentionPlan, PaddedRows
    from nemo_grpo.engine.megatron.parallel import gather_sequence, zigzag_positions

    class PackedAttention(CausalAttention):
        """Concatenated sequences; context parallelism splits each one zigzag."""

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
            packed = named.pop("packed_seq_params", None)
            if packed is None:
                return super().forward(query, key, value, *rest, **named)
            starts = packed.cu_seqlens_q_padded
            starts = packed.cu_seqlens_q if starts is None else starts
            rows = PaddedRows.of((starts[1:] - starts[:-1]).long())
            ranks = range(self.context_size)
            places = [self._places(starts.tolist(), rank) for rank in ranks]
            gathered_as = [zigzag_positions(int(starts[-1]), len(ranks), rank) for rank in ranks]
            order = torch.cat(gathered_as)[torch.cat(places).argsort()]
            stream = [gather_sequence(x.flatten(0, -3), dim=0)[order] for x in (query, key, value)]
            laid_out = AttentionPlan(rows).prompts.lay_out
            whole = rows.collect(self._attend(*map(laid_out, stream)))
            return whole[places[parallel_state.get_context_parallel_rank()]].flatten(1)[:, None]

        def _places(self, starts: list[int], rank: int) -> Tensor:
            """Find a context-parallel rank's tokens in the whole stream."""
            size = self.context_size
            return torch.cat([a + zigzag_positions(b - a, size, rank) for a, b in pairwise(starts)])

    return PackedAttention
