"""Layers of a decoder: Transformer Engine's, or our own where it is not installed.

megatron-core takes both through its module specs. Their parameters differ in name, because Transformer Engine
has each norm inside the linear layer that follows it.
"""

import functools
import logging
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from nemo_grpo.engine.megatron.packing import AttentionPlan, PackedSequences
from nemo_grpo.engine.megatron.parallel import gather_sequence, zigzag
from nemo_grpo.support.distributed import is_rank_zero

log = logging.getLogger(__name__)


def transformer_engine_is_installed() -> bool:
    """True if megatron-core found Transformer Engine when it was imported."""
    return bool(gpt_layer_specs.HAVE_TE)


def transformer_impl(dtype: torch.dtype) -> str:
    """Choose the layers for this dtype on this machine: a value of `TransformerConfig.transformer_impl`.

    Transformer Engine's layers need CUDA, and their fused attention needs a 16-bit dtype.
    """
    fits_machine = torch.cuda.is_available() and dtype == torch.bfloat16
    return "transformer_engine" if fits_machine and transformer_engine_is_installed() else "local"


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the spec of this pipeline stage's layers, of the kind that ``config.transformer_impl`` names."""
    if config.transformer_impl == "transformer_engine":
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    if torch.cuda.is_available() and not transformer_engine_is_installed() and is_rank_zero():
        precision = "BF16" if config.bf16 else "FP32"
        log.warning("Transformer Engine is not installed: %s with the local layers", precision)
    return local_block_spec(config)


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm that also runs under sequence parallelism.

    megatron-core 0.16 to 0.19 refuses sequence parallelism in its wrapper of torch's norm
    (tests/unit/engine/test_upstream_faults.py).
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Under sequence parallelism each tensor-parallel rank sees a part of the sequence. With this mark
        # finalize_model_grads sums the weight's gradients over these ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., h]."""
        if x.is_cuda:
            return super().forward(x)
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return normed


class _RMSNorm(torch.autograd.Function):
    """RMS norm y = u w with u = x / rms(x), in few passes over memory, for a CPU.

    With g the gradient of y, the gradients are
        dw = sum over rows of g u
        dx = (g w - u mean(g w u)) / rms(x).

    torch has no CPU kernel for this norm, and autograd of its formula passes over x many times. Operations
    work in place where they can, because reading and writing the rows takes longer than the arithmetic.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        product = gradient * unit
        mean = (product @ weight.to(product.dtype))[..., None] / x.shape[-1]
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = product.flatten(0, -2).sum(0).to(weight.dtype)
        # `product` has been read, so its memory takes the gradient of x.
        x_gradient = torch.mul(gradient, weight, out=product)
        x_gradient.addcmul_(unit, mean, value=-1).mul_(scale)
        return x_gradient.to(x.dtype), weight_gradient, None


class CausalAttention(MegatronModule):
    """Causal scaled-dot-product attention by torch's fused kernel, with grouped key and value heads.

    Sequences are right-padded, so a real token never attends to padding, and no mask is needed. Under context
    parallelism each rank has two slices of the sequence (`parallel.zigzag`), gathers all keys and values, and
    masks by position. Only this class lays packed sequences (`packing`) out in padded rows. Under context
    parallelism every rank then computes the attention of the whole packed stream.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.context_size = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_unused: Any,
    ) -> Tensor:
        """Compute the attention of this rank's positions to all earlier positions of their sequence.

        Args:
            query: [S, B, H, D], with S positions on this rank.
            key: [S, B, G, D].
            value: [S, B, G, D].
            attention_mask: Not used; megatron-core passes it.
            packed_seq_params: Layout of the stream, if sequences are packed.

        Returns:
            [S, B, H x D].
        """
        if packed_seq_params is not None:
            assert packed_seq_params.attention is not None
            return self._packed(query, key, value, packed_seq_params.attention)
        mask = None
        if self.context_size > 1:
            length = query.shape[0] * self.context_size
            positions = zigzag(length, query.device)
            key = gather_sequence(key, dim=0)
            value = gather_sequence(value, dim=0)
            mask = positions[:, None] >= torch.arange(length, device=query.device)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return self._attend(q, k, v, mask).transpose(0, 1).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute the attention within a packed stream.

        Args:
            query: [T, 1, H, D]; megatron-core leaves the 1 out in the thd format.
            key: [T, 1, G, D].
            value: [T, 1, G, D].
            plan: Prompts and responses of the stream.

        Returns:
            [T, 1, H x D].
        """
        query, key, value = (gather_sequence(x.flatten(0, -3), dim=0) for x in (query, key, value))
        num_in_prompts, num_in_responses = plan.num_tokens()
        num_unused = len(query) - num_in_prompts - num_in_responses
        sizes = [num_in_prompts, num_in_responses, num_unused]
        q_prompt, q_response, padding = query.split(sizes)
        k_prompt, k_response, _ = key.split(sizes)
        v_prompt, v_response, _ = value.split(sizes)

        q, k, v = (plan.prompts.lay_out(x) for x in (q_prompt, k_prompt, v_prompt))
        outputs = [plan.prompts.collect(self._attend(q, k, v))]
        if plan.responses is not None:
            assert plan.prompt_of is not None
            q, response_k, response_v = (
                plan.responses.lay_out(x) for x in (q_response, k_response, v_response)
            )
            # Every response attends to a copy of its prompt's keys and values.
            k = torch.cat([k.index_select(0, plan.prompt_of), response_k], 1)
            v = torch.cat([v.index_select(0, plan.prompt_of), response_v], 1)
            outputs.append(plan.responses.collect(self._attend(q, k, v, plan.bias)))
        # The output of the unused tokens at the end is never read. It only has to be finite.
        whole = torch.cat([*outputs, padding])
        if self.context_size > 1:
            whole = whole[zigzag(len(whole), whole.device)]
        return whole.flatten(1)[:, None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the attention with torch's fused kernel.

        Args:
            q: [B, S, H, D].
            k: [B, L, G, D].
            v: [B, L, G, D].
            mask: Mask [S, L] bool, or bias [B, 1, S, L]. Without one the attention is causal.

        Returns:
            [B, S, H, D].
        """
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # torch's fused CUDA kernel with a mask does not support grouped heads, so they are repeated.
        if mask is not None and q.is_cuda:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        dtype = q.dtype
        # On a CPU the kernel's backward pass takes twice as long in BF16 as in FP32.
        if not q.is_cuda and dtype == torch.bfloat16:
            q, k, v = (x.float() for x in (q, k, v))
            if mask is not None and mask.is_floating_point():
                mask = mask.float()
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).to(dtype)


def local_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the spec of layers without Transformer Engine: megatron-core's, with our norm and attention."""
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm
    )


_plain_rotary = rope_utils._apply_rotary_pos_emb_bshd


def rotate(heads: Tensor, angles: Tensor, *flags: Any, mscale: float = 1.0, **options: Any) -> Tensor:
    """Apply the rotary embedding: x cos + (-x2, x1) sin, with x = (x1, x2) the two halves of a head.

    It replaces megatron-core's plain embedding, which computes cosines and sines of the same angles again in
    every layer, for queries and for keys, and whose operations each store tensors for autograd. Whatever is
    not plain is left to megatron-core's function: set flags and options, another mscale, and angles for a
    part of a head.

    Args:
        heads: [S, B, H, D].
        angles: [S, 1, 1, D] radians, equal in both halves.
        flags: Flags of megatron-core's function.
        mscale: Factor of cosines and sines.
        options: Further flags of megatron-core's function, by name.

    Returns:
        [S, B, H, D] in the dtype of ``heads``.
    """
    has_options = any(flags) or any(options.values()) or mscale != 1
    turns_a_part = angles.shape[-1] != heads.shape[-1]
    if has_options or turns_a_part:
        by_megatron: Tensor = _plain_rotary(heads, angles, *flags, mscale=mscale, **options)
        return by_megatron
    cos, signed_sin = _cos_and_signed_sin(angles, heads.dtype)
    turned: Tensor = _Rotate.apply(heads, cos, signed_sin)
    return turned


def use_own_rotary() -> None:
    """Make megatron-core use `rotate` in place of its plain rotary embedding. Its fused kernels stay."""
    rope_utils._apply_rotary_pos_emb_bshd = rotate


# All layers of a forward pass use the same tensor of angles, and tensors hash by identity. One entry is
# enough, because the next microbatch has other angles.
@functools.lru_cache(maxsize=1)
def _cos_and_signed_sin(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines, and sines with a negative first half, for which (-x2, x1) sin = (x2, x1) signed_sin."""
    signed_sin = angles.sin()
    signed_sin[..., : signed_sin.shape[-1] // 2].neg_()
    return angles.cos().to(dtype), signed_sin.to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotation x cos + (x2, x1) signed_sin. Its gradient is the rotation by the negative angles."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * cos, swapped, signed_sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, signed_sin = ctx.saved_tensors
        swapped = gradient.roll(gradient.shape[-1] // 2, -1)
        return torch.addcmul(gradient * cos, swapped, signed_sin, value=-1), None, None
