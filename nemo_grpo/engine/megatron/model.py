"""megatron-core's GPT model, built from a model's spec."""

import warnings
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from nemo_grpo.engine.megatron.layers import block_spec, transformer_impl, use_own_rotary
from nemo_grpo.engine.megatron.packing import SHARED, PackedSequences
from nemo_grpo.models import ModelSpec, refuse_uncomputed
from nemo_grpo.recipe.layout import Layout

# These fusions need CUDA kernels of Apex, or call torch.compile, which compiles again for every length of a
# microbatch.
_NO_FUSIONS = dict.fromkeys(
    (
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
    ),
    False,
)

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of a config with the numbers of Llama 3's rotary scaling."""


def transformer_config(
    spec: ModelSpec, layout: Layout, dtype: torch.dtype, **overrides: Any
) -> TransformerConfig:
    """Build megatron-core's configuration of a dense decoder.

    Args:
        spec: Shape of the model, whose family the engine must support.
        layout: Sizes of model parallelism.
        dtype: Precision of the parameters.
        overrides: Further fields of TransformerConfig, which replace those here.
    """
    refuse_uncomputed(spec)
    fields: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_key_value_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.has_qkv_bias,
        "qk_layernorm": spec.has_qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "transformer_impl": transformer_impl(dtype),
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Initial weights would be wasted, because all weights are loaded afterwards.
        "perform_initialization": False,
        "variable_seq_lengths": True,
        # megatron-core 0.16 to 0.19 refuse variable_seq_lengths with the default, even without experts
        # (tests/unit/engine/test_upstream_faults.py).
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        **_NO_FUSIONS,
    }
    fields |= overrides
    # Transformer Engine's layers get packed sequences in the thd format, in which megatron-core's plain
    # rotary embedding waits for the GPU in every layer. The fused one does not.
    fields.setdefault("apply_rope_fusion", fields["transformer_impl"] == "transformer_engine")
    with warnings.catch_warnings():
        # megatron-core 0.16 warns about the default of an option that is not used here, and recommends
        # another one (tests/unit/engine/test_upstream_faults.py).
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        warnings.filterwarnings("ignore", message="If you are using transformer_engine")
        return TransformerConfig(**fields)


class PackableGPTModel(GPTModel):
    """GPTModel without its output layer, which also accepts packed sequences that share their prompts."""

    def _preprocess(
        self, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Preprocess like the base class, but choose each token's rotary embedding by its position.

        In a stream with shared prompts several tokens have the same position.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != SHARED:
            return super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        # The base class does not know the format of packed_seq_params, so it must not get them.
        decoder_input, _rotary_by_place, *further_inputs = super()._preprocess(*args, **kwargs)
        positions = packed_seq_params.positions[packed_seq_params.local_places]
        rotary = self.rotary_pos_emb.get_emb(packed_seq_params.max_seqlen_q)[positions]
        return (decoder_input, rotary, *further_inputs)

    def _postprocess(
        self,
        hidden_states: Tensor,
        *_unused: Any,
        packed_seq_params: PackedSequences | None = None,
        **__: Any,
    ) -> Tensor:
        """Return hidden states [B, S, h] on the last stage instead of logits.

        `output_layer` computes the logits part by part. For packed sequences the result is [1, N, h], with
        only the tokens whose logits are needed.
        """
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        if packed_seq_params is not None:
            hidden_states = hidden_states.index_select(0, packed_seq_params.predicting)
        hidden_states = hidden_states.transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            return hidden_states
        # Each rank has a part of the vocabulary, and the backward pass sums the gradients of these parts. The
        # tensor must be contiguous: otherwise megatron-core 0.16 reduces a copy and returns the tensor
        # unreduced (NVIDIA/Megatron-LM#5337, fixed in 0.19.2; tests/unit/engine/test_upstream_faults.py).
        return copy_to_tensor_model_parallel_region(hidden_states)

    @property
    def output_weight(self) -> Tensor:
        """This tensor-parallel rank's rows of the output layer's weight [V, h], on the last stage."""
        weight: Tensor
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        return weight


def build_model(spec: ModelSpec, config: TransformerConfig) -> PackableGPTModel:
    """Build this rank's part of the model, with uninitialised weights."""
    use_own_rotary()
    # The vocabulary is padded, so that all tensor-parallel ranks have the same number of rows.
    vocab_size = spec.vocab_size + -spec.vocab_size % config.tensor_model_parallel_size
    model = PackableGPTModel(
        config,
        block_spec(config),
        vocab_size=vocab_size,
        max_sequence_length=spec.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.rope["rope_theta"],
    )
    if spec.rope["rope_type"] == "llama3":
        # The constructor of megatron-core 0.16 to 0.19 takes only the factor, and uses Llama 3.1's values for
        # the other numbers (tests/unit/engine/test_upstream_faults.py).
        embedding = model.rotary_pos_emb
        scaling = {name: spec.rope[name] for name in _LLAMA3}
        embedding.inv_freq = embedding._apply_scaling(embedding.inv_freq, **scaling)
    return model
