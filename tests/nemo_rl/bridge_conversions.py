"""``bridge_conversions.py import|export MODEL CHECKPOINT [OUTPUT]``: Megatron-Bridge's own conversions.

A separate process, because Bridge needs a rehearsal's hooks. Real: Bridge, its providers, mappings and files,
megatron-core. Stand-ins: Transformer Engine's layers and CUDA.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "nemo_grpo" / "rehearsal" / "site"))

import rehearsal_hooks


def main(direction: str, model: str, checkpoint: str, output: str = "") -> None:
    """Write ``checkpoint`` from the Hugging Face folder ``model``, or ``output`` from both."""
    rehearsal_hooks.install()
    importlib.import_module("megatron.core")
    importlib.import_module("nemo_grpo.rehearsal.megatron").prepare()
    quantization = types.ModuleType("modelopt.torch.quantization.utils")
    quantization.is_quantized = lambda *_: False
    sys.modules[quantization.__name__] = quantization
    _use_no_extensions(importlib.import_module("megatron.bridge.models.gpt_provider").GPTModelProvider)
    from megatron.bridge import AutoBridge

    _use_local_gemma_layers()
    from megatron.bridge.training.model_load_save import temporary_distributed_context
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    bridge = AutoBridge.from_hf_pretrained(model)
    with temporary_distributed_context(backend="gloo"):
        model_parallel_cuda_manual_seed(0)
        if direction == "import":
            provider = bridge.to_megatron_provider(load_weights=True)
            provider.finalize()
            bridge.save_megatron_model(provider.provide_distributed_model(wrap_with_ddp=False), checkpoint)
        else:
            bridge.save_hf_pretrained(
                bridge.load_megatron_model(checkpoint, skip_temp_dist_context=True), output, strict=True
            )


def _use_local_gemma_layers() -> None:
    """Gemma's layers under Transformer Engine's names, made of megatron-core's own."""
    from megatron.core.tensor_parallel import RowParallelLinear

    from nemo_grpo.engine.megatron.layers import RMSNorm
    from nemo_grpo.rehearsal.megatron import local_layers

    class TERowParallelLinearLayerNorm(RowParallelLinear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **settings: Any) -> None:
            super().__init__(input_size, output_size, config=config, **settings)
            self.post_layernorm = RMSNorm(config, output_size)

        def sharded_state_dict(self, prefix: str = "", *rest: Any, **further: Any) -> dict[str, Any]:
            own = super().sharded_state_dict(prefix, *rest, **further)
            offsets = rest[0] if rest else further.get("sharded_offsets", ())
            norm = make_sharded_tensors_for_checkpoint(
                self.post_layernorm.state_dict(), f"{prefix}post_layernorm.", {}, offsets
            )
            return own | norm

    def layers(config: Any) -> Any:
        block = local_layers(config)
        parts = block.layer_specs[0].submodules
        parts.self_attention.submodules.linear_proj = TERowParallelLinearLayerNorm
        parts.mlp.keywords["submodules"].linear_fc2 = TERowParallelLinearLayerNorm
        return block

    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    importlib.import_module("megatron.bridge.models.gemma.gemma3_provider").gemma3_layer_spec = layers


def _use_no_extensions(provider: type) -> None:
    """Bridge asks for compiled kernels of APEX unless a training's recipe says otherwise."""
    finalize = provider.finalize

    def finalize_without_them(self: Any) -> None:
        self.gradient_accumulation_fusion = False
        finalize(self)

    provider.finalize = finalize_without_them


if __name__ == "__main__":
    main(*sys.argv[1:])
