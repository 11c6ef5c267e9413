"""``bridge_conversions.py import|export|logits MODEL CHECKPOINT [OUTPUT]``: what Megatron-Bridge does itself.

A separate process, because Bridge needs a rehearsal's hooks. Real: Bridge, its providers, mappings and files,
megatron-core. Stand-ins: Transformer Engine's layers and CUDA.
"""

import importlib
import re
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "nemo_grpo" / "rehearsal" / "site"))

import rehearsal_hooks

NUM_TOKENS = 20


def main(direction, model, checkpoint, output=""):
    """Write ``checkpoint`` from the Hugging Face folder ``model``, or ``output`` from both.

    That is a folder, or a file with the logits that megatron-core's model computes for the ids 3, 4, 5, ...
    """
    rehearsal_hooks.install()
    importlib.import_module("megatron.core")
    importlib.import_module("nemo_grpo.rehearsal.megatron").prepare()
    _use_no_extensions(importlib.import_module("megatron.bridge.models.gpt_provider").GPTModelProvider)
    _use_no_extensions(importlib.import_module("megatron.bridge.models.mla_provider").MLAModelProvider)
    from megatron.bridge import AutoBridge

    _use_local_gemma_layers()
    _use_local_layers_of_two_kinds()
    _use_local_attention_with_sinks()
    _use_local_gated_delta_nets()
    _map_single_experts()
    from megatron.bridge.training.model_load_save import temporary_distributed_context
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    bridge = AutoBridge.from_hf_pretrained(model)
    with temporary_distributed_context(backend="gloo"):
        model_parallel_cuda_manual_seed(0)
        if direction == "import":
            provider = bridge.to_megatron_provider(load_weights=True)
            provider.finalize()
            bridge.save_megatron_model(provider.provide_distributed_model(wrap_with_ddp=False), checkpoint)
            return
        built = bridge.load_megatron_model(checkpoint, skip_temp_dist_context=True)
        if direction == "export":
            bridge.save_hf_pretrained(built, output, strict=True)
        else:
            _save_logits(built[0], output)


def _save_logits(model, output):
    import torch

    ids = torch.arange(3, 3 + NUM_TOKENS)[None]
    places, later = torch.arange(NUM_TOKENS)[None], torch.ones(NUM_TOKENS, NUM_TOKENS).triu(1).bool()
    with torch.no_grad():
        torch.save(model.eval()(ids, places, later[None, None]), output)


def _use_local_gemma_layers():
    """Gemma's layers under Transformer Engine's names, made of megatron-core's own."""
    from megatron.core.tensor_parallel import RowParallelLinear

    from nemo_grpo.engine.megatron.layers import RMSNorm
    from nemo_grpo.rehearsal.megatron import local_layers

    class TERowParallelLinearLayerNorm(RowParallelLinear):
        def __init__(self, input_size, output_size, *, config, **settings):
            super().__init__(input_size, output_size, config=config, **settings)
            self.post_layernorm = RMSNorm(config, output_size)

        def sharded_state_dict(self, prefix="", *rest, **further):
            own = super().sharded_state_dict(prefix, *rest, **further)
            offsets = rest[0] if rest else further.get("sharded_offsets", ())
            norm = make_sharded_tensors_for_checkpoint(
                self.post_layernorm.state_dict(), f"{prefix}post_layernorm.", {}, offsets
            )
            return own | norm

    def layers(config):
        block = local_layers(config)
        parts = block.layer_specs[0].submodules
        parts.self_attention.submodules.linear_proj = TERowParallelLinearLayerNorm
        parts.mlp.keywords["submodules"].linear_fc2 = TERowParallelLinearLayerNorm
        return block

    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    importlib.import_module("megatron.bridge.models.gemma.gemma3_provider").gemma3_layer_spec = layers


def _use_local_layers_of_two_kinds():
    """DeepSeek's and GLM's layers, made of megatron-core's own and stored under Transformer Engine's names.

    Without a query rank megatron-core 0.19 puts a norm into the projection to the queries, which neither the
    model nor Bridge's mappings have and 0.16 does not build; here it is left out.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention as latent
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    from nemo_grpo.engine.megatron.layers import CausalAttention, RMSNorm

    build = gpt_layer_specs.get_gpt_decoder_block_spec
    of_latent_attention = {
        f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
        for x in ("q", "kv")
    }
    of_attention = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}

    def layers(config, use_transformer_engine, vp_stage=None):
        block = build(config, use_transformer_engine=False, vp_stage=vp_stage)
        for layer, has_experts in zip(block.layer_specs, config.moe_layer_freq, strict=True):
            parts, attention = layer.submodules, layer.submodules.self_attention.submodules
            parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
            attention.core_attention = CausalAttention
            if config.multi_latent_attention:
                attention.kv_layernorm = RMSNorm
                attention.q_layernorm = RMSNorm if config.q_lora_rank else IdentityOp
            elif config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
            stored = of_latent_attention if config.multi_latent_attention else of_attention
            fused = {} if has_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
            parts.sharded_state_dict_keys_map = stored | fused
        block.layer_norm = RMSNorm
        return block

    QKNormConfigResolver._mla_fused_linear_or_default = lambda self, linear, name: linear
    latent.YarnRotaryEmbedding = partial(latent.YarnRotaryEmbedding, use_cpu_initialization=True)
    gpt_layer_specs.get_gpt_decoder_block_spec = layers
    for bridge in ("deepseek.deepseek_v3_bridge", "glm.glm45_bridge"):
        importlib.import_module(f"megatron.bridge.models.{bridge}").get_gpt_decoder_block_spec = layers


def _use_local_attention_with_sinks():
    """gpt-oss' attention, megatron-core's own; rotary angles without CUDA."""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    provider = importlib.import_module("megatron.bridge.models.gpt_provider")
    build = provider.transformer_engine_layer_spec

    def layers(config):
        block = build(config)
        if config.softmax_type == "learnable":
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = DotProductAttention
                layer.submodules.sharded_state_dict_keys_map = {
                    "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
                }
        return block

    provider.transformer_engine_layer_spec = layers
    on_gpu = gpt_model.YarnRotaryEmbedding
    gpt_model.YarnRotaryEmbedding = lambda *sizes, **further: on_gpu(
        *sizes, **further | {"use_cpu_initialization": True}
    )


def _use_local_gated_delta_nets():
    """Qwen3.5's layers, made of megatron-core's own; in place of flash-linear-attention its torch code."""
    import torch
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from nemo_grpo.engine.megatron.layers import CausalAttention

    def normed(x, weight, eps):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + weight, eps)

    class Norm(torch.nn.Module):
        def __init__(self, config, hidden_size, eps, **_further):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps
            self.to(config.params_dtype)

        def forward(self, x):
            return normed(x, self.weight, self.eps)

    class NormedLinear(ColumnParallelLinear):
        def __init__(self, input_size, output_size, *, config, **settings):
            super().__init__(input_size, output_size, config=config, **settings)
            self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))

        def forward(self, x, *rest, **further):
            x = normed(x, self.layer_norm_weight, self.config.layernorm_epsilon)
            return super().forward(x, *rest, **further)

    class Layers(LocalSpecProvider):
        fuse_layernorm_and_linear = staticmethod(lambda: True)
        column_parallel_layer_norm_linear = staticmethod(lambda: NormedLinear)
        layer_norm = staticmethod(lambda **_kind: Norm)

    def attention(config, backend):
        layer = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        found = layer.submodules.self_attention
        parts = found.submodules
        parts.linear_qkv, parts.core_attention = NormedLinear, CausalAttention
        parts.q_layernorm = parts.k_layernorm = Norm
        found.metainfo["fuse_input_layernorm"] = True
        return found

    def unit_length(x, *_, eps=1e-6, **__):
        return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()

    specs._get_backend_spec_provider = lambda **_: Layers()
    specs._get_self_attention_module_spec = attention
    common.HAVE_FLA, common.l2norm = True, unit_length
    provider = importlib.import_module("megatron.bridge.models.gpt_provider").GPTModelProvider
    finalize = provider.finalize

    def finalize_without_kernels(self):
        self.deterministic_mode = self.experimental_attention_variant == "gated_delta_net"
        finalize(self)

    provider.finalize = finalize_without_kernels


def _map_single_experts():
    """Bridge's mapping of GLM knows Transformer Engine's experts, all in one module; here each is its own."""
    glm = importlib.import_module("megatron.bridge.models.glm.glm45_bridge")
    registry = glm.GLM45Bridge.mapping_registry
    together, single = re.compile(r"experts\.(linear_fc\d)\.weight\*$"), r"experts.local_experts.*.\1.weight"

    def with_single_experts(self):
        mappings = registry(self).mappings
        for one in [one for one in mappings if together.search(one.megatron_param)]:
            hf, name = one.hf_param, together.sub(single, one.megatron_param)
            mappings.append(type(one)(name, **hf) if isinstance(hf, dict) else type(one)(name, hf))
        return glm.MegatronMappingRegistry(*mappings)

    glm.GLM45Bridge.mapping_registry = with_single_experts


def _use_no_extensions(provider):
    """Bridge asks for compiled kernels of APEX unless a training's recipe says otherwise."""
    finalize = provider.finalize

    def finalize_without_them(self):
        self.gradient_accumulation_fusion = self.moe_shared_expert_overlap = False
        self.moe_permute_fusion = self.moe_grouped_gemm = False
        finalize(self)

    provider.finalize = finalize_without_them


if __name__ == "__main__":
    main(*sys.argv[1:])
