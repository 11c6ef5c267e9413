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
    """Add `NEWER_NAMES` as empty classes, of which nothing here is an instance.

    Upstream: none known; NeMo-RL pins a commit of Megatron-LM that has them.
    Versions: NeMo-RL 7ea279abf with megatron-core 0.19 or older.
    Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rl_imports_names_of_an_unreleased_megatron_core
    """
    for name in NEWER_NAMES:
        if not hasattr(module, name):
            setattr(module, name, type(name, (), {}))


def compute_yarn_here(module: Any) -> None:
    """Avoid ``torch.device(current_device())``, which torch refuses without a GPU."""
    initialise = module.YarnRotaryEmbedding.__init__

    def initialise_on_cpu(self: Any, *arguments: Any, **named: Any) -> None:
        named["use_cpu_initialization"] = True
        initialise(self, *arguments, **named)

    module.YarnRotaryEmbedding.__init__ = initialise_on_cpu


def say_that_any_key_is_taken(module: Any) -> None:
    """Give the class a signature with ``**further``.

    Megatron-Bridge drops the keys of a saved configuration that the signature does not name, unless it has
    ``**``; the class itself takes any key.

    Upstream: none known; Megatron-Bridge issue 2318 is the move to transformers 5.
    Versions: Megatron-Bridge 0.6 with transformers 5.8.
    Needed while: tests/nemo_rl/test_workarounds.py::test_the_vision_configuration_hides_that_it_takes_any_key
    """
    any_key = inspect.Parameter("further", inspect.Parameter.VAR_KEYWORD)
    module.Qwen2_5_VLVisionConfig.__signature__ = inspect.Signature([any_key])


def prepare(_module: Any = None) -> None:
    """Patch megatron-core and Megatron-Bridge before a model is built, after NeMo-RL's worker is imported."""
    from nemo_grpo.engine.megatron.optimizer import install_adam

    # The embedded engine's Adam has the same state as the fused Adam of a GPU host. Without either,
    # megatron-core uses torch's AdamW, which the distributed optimizer cannot resume.
    install_adam()
    _use_local_layers()
    for name in WITHOUT_TRANSFORMER_ENGINE:
        flags = [flag for flag in vars(importlib.import_module(name)) if flag.startswith("HAVE_TE")]
        _set(name, **dict.fromkeys(flags, False))
    # megatron-core reaches CUDA's generator through torch's C interface, which `cuda` does not replace.
    _set(
        "megatron.core.tensor_parallel.random",
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
    )
    # The dispatcher needs token counts of expert ranks as numbers, but converts only CUDA tensors.
    _set("megatron.core.transformer.moe.token_dispatcher", maybe_move_tensor_to_cpu=_as_numbers)
    # No model here is quantised, so there is no state to save or restore.
    _set("megatron.bridge.training.checkpointing", **dict.fromkeys(MODELOPT_FUNCTIONS, _nothing))
    quantization = types.ModuleType("modelopt.torch.quantization.utils")
    quantization.is_quantized = lambda *_: False  # type: ignore[attr-defined]
    sys.modules[quantization.__name__] = quantization
    # Save synchronously: the helper process of each rank would take two seconds to start.
    _set("megatron.core.dist_checkpointing.strategies.filesystem_async", _results_queue=queue.Queue())


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _set(module: str, **names: Any) -> None:
    """Set names of a module that may not have been imported yet."""
    for name, value in names.items():
        setattr(importlib.import_module(module), name, value)


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _use_local_layers() -> None:
    """Put megatron-core's own layers, with attention for packed sequences, in place of other kernels."""
    module = "megatron.bridge.models.gpt_provider"
    provider = importlib.import_module(module).GPTModelProvider
    finalize = provider.finalize

    def finalize_without_kernels(self: Any) -> None:
        # Bridge sets these for some families, and the first conversion does not read the recipe's overrides.
        self.moe_permute_fusion = False
        self.moe_grouped_gemm = False
        self.apply_rope_fusion = False
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
    """Make a class that computes the embedded engine's attention on sequences packed by NeMo-RL."""
    from megatron.core import parallel_state

    from nemo_grpo.engine.megatron.layers import CausalAttention
    from nemo_grpo.engine.megatron.packing import AttentionPlan, PaddedRows
    from nemo_grpo.engine.megatron.parallel import gather_sequence, zigzag_positions

    class PackedAttention(CausalAttention):
        """Attention within each of several concatenated sequences.

        Context parallelism splits each sequence zigzag: a rank holds two of its 2 * CP equal parts.
        """

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Tensor:
            packed = named.pop("packed_seq_params", None)
            if packed is None:
                return super().forward(query, key, value, *arguments, **named)
            # The offsets with the padding that NeMo-RL adds to each sequence; None if it adds none.
            starts = packed.cu_seqlens_q_padded
            if starts is None:
                starts = packed.cu_seqlens_q
            rows = PaddedRows.of((starts[1:] - starts[:-1]).long())
            positions_by_rank = [self._positions(starts.tolist(), rank) for rank in range(self.context_size)]
            order = self._order_of_gathered(int(starts[-1]), positions_by_rank)
            lay_out = AttentionPlan(rows).prompts.lay_out
            # Attend to whole sequences: gather all ranks' tokens, sort them by position, and pad to rows.
            padded = []
            for local in (query, key, value):
                stream = gather_sequence(local.flatten(0, -3), dim=0)[order]
                padded.append(lay_out(stream))
            attended = rows.collect(self._attend(*padded))
            # Return only this rank's tokens, in the order in which they came.
            local_positions = positions_by_rank[parallel_state.get_context_parallel_rank()]
            return attended[local_positions].flatten(1)[:, None]

        def _positions(self, starts: list[int], rank: int) -> Tensor:
            """Return the positions of a context-parallel rank's tokens in the whole stream."""
            positions = []
            for start, end in pairwise(starts):
                positions.append(start + zigzag_positions(end - start, self.context_size, rank))
            return torch.cat(positions)

        def _order_of_gathered(self, length: int, positions_by_rank: list[Tensor]) -> Tensor:
            """Return the index that sorts a gathered stream by position.

            `gather_sequence` assumes that one zigzag splits the whole stream, as in the embedded engine, and
            orders the tokens by it. NeMo-RL splits each sequence by a zigzag of its own, so the gathered
            tokens are not yet in order.

            Args:
                length: tokens in the whole stream.
                positions_by_rank: for each rank, the true positions of its tokens.
            """
            gathered_at = []
            for rank in range(self.context_size):
                gathered_at.append(zigzag_positions(length, self.context_size, rank))
            # Token number i of all ranks together has the true position positions[i], and `gather_sequence`
            # has put it at index[i].
            positions = torch.cat(positions_by_rank)
            index = torch.cat(gathered_at)
            return index[positions.argsort()]

    return PackedAttention
