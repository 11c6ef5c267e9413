"""Parameters that one GPU holds: exact counts of the tensors that megatron-core builds.

Column- and row-parallel matrices and the vocabulary are divided by TP, experts by EP and expert TP, layers by
PP; norms, routers and the vision tower are on every rank of their stage. With tied embeddings and PP > 1 the
last stage keeps a copy of the embedding. (megatron/core: attention.py, mlp.py, experts.py, gpt_model.py.)
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from nemo_grpo.models import ModelSpec
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import LORA_LAYERS


@dataclass(frozen=True)
class Counts:
    """Parameters of one rank.

    Attributes: linear: dense ones that TP divides.  embedding: embedding and output matrices.
                replicated: norms, routers, biases of no shard, vision.  expert: of the experts.
    """

    linear: int = 0
    embedding: int = 0
    replicated: int = 0
    expert: int = 0

    @property
    def dense(self) -> int:
        return self.linear + self.embedding + self.replicated

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: int) -> Counts:
        return Counts(*(factor * number for number in astuple(self)))


def mixer_sizes(shape: ModelSpec) -> tuple[float, float]:
    """Return `attention_sizes`, or the mean over all layers if some have linear attention."""
    share, sizes = shape.attention_share, attention_sizes(shape)
    if share == 1:
        return sizes
    divided, replicated = (
        share * one + (1 - share) * other for one, other in zip(sizes, shape.linear_sizes, strict=True)
    )
    return divided, replicated


def attention_sizes(shape: ModelSpec) -> tuple[int, int]:
    """Count (weights that TP divides, weights on every rank) of one layer's attention.

    Grouped queries: h (q + 2 kv) + [q + 2 kv if biased] + q h + [heads of sinks] + [q h for a gate], and
    [2 head_dim if q and k are normed] + [h if the output is biased].
    Latent attention: the up-projections and the output are divided, the down-projections and their norms are
    not; queries without a rank come from h. (megatron/core: attention.py, multi_latent_attention.py.)
    """
    h = shape.hidden_size
    if shape.key_value_rank:
        heads, width = shape.num_attention_heads, shape.head_dim
        up = heads * (width + shape.rope_head_dim) * (shape.query_rank or h)
        up += heads * 2 * width * shape.key_value_rank
        down = h * (shape.query_rank + shape.key_value_rank + shape.rope_head_dim)
        return up + heads * width * h, down + shape.query_rank + shape.key_value_rank
    qkv = shape.query_size + 2 * shape.key_value_size
    norms = 2 * shape.head_dim if shape.has_qk_norm else 0
    norms += h if shape.has_all_biases else 0
    sinks = shape.num_attention_heads if shape.has_sinks else 0
    outputs = (2 if shape.has_output_gate else 1) * shape.query_size * h
    return h * qkv + (qkv if shape.has_qkv_bias else 0) + outputs + sinks, norms


def layer_counts(
    shape: ModelSpec, layout: Layout, *, is_dense: bool = False, is_linear: bool = False
) -> Counts:
    """Count the parameters of one transformer layer.

    linear     = (attention + [3 h f if dense] + [3 h f per shared expert]) / TP
    replicated = attention's + 2 h + [2 h if post norms] + [E h if experts]
                 + [E for a bias of the router, or h for a gate of the shared experts]
    expert     = E / EP x (3 h f + [2 f + h of biases]) / ETP

    Args: is_dense: one of the dense layers of a model with experts.  is_linear: with linear attention.
    """
    h, f = shape.hidden_size, shape.ffn_size
    divided, replicated = shape.linear_sizes if is_linear else attention_sizes(shape)
    replicated += (4 if shape.has_post_norms else 2) * h
    if not shape.num_experts or is_dense:
        width = shape.dense_ffn_size if is_dense else f
        return Counts(linear=(divided + 3 * h * width) // layout.tensor, replicated=replicated)
    biases = 2 * f + h if shape.has_all_biases else 0
    experts = shape.num_experts // layout.expert * (3 * h * f + biases) // layout.expert_tensor
    divided += shape.num_shared_experts * 3 * h * f
    is_biased = shape.has_all_biases or (shape.num_shared_experts and not shape.has_shared_gate)
    router = shape.num_experts * (h + (1 if is_biased else 0)) + (h if shape.has_shared_gate else 0)
    return Counts(divided // layout.tensor, 0, replicated + router, experts)


def dense_layers(shape: ModelSpec, layout: Layout, stage: int) -> int:
    """Count a stage's layers without experts in a model that has experts in the others."""
    dealt = layout.stage_layers(shape.num_layers)
    return min(max(shape.num_dense_layers - sum(dealt[:stage]), 0), dealt[stage])


def stage_counts(shape: ModelSpec, layout: Layout, stage: int) -> Counts:
    """Count the parameters of a pipeline stage: its layers, and at the ends embedding, norm and output.

    Args: stage: 0 .. PP - 1.
    """
    first, last = stage == 0, stage == layout.pipeline - 1
    dealt = layout.stage_layers(shape.num_layers)
    begin = sum(dealt[:stage])
    num_dense = dense_layers(shape, layout, stage)
    num_linear = sum(begin <= layer < begin + dealt[stage] for layer in shape.linear_layers)
    counts = layer_counts(shape, layout) * (dealt[stage] - num_dense - num_linear)
    counts += layer_counts(shape, layout, is_linear=True) * num_linear
    if num_dense:
        counts += layer_counts(shape, layout, is_dense=True) * num_dense
    matrix = shape.vocab_size * shape.hidden_size // layout.tensor
    if first:
        counts += Counts(embedding=matrix, replicated=shape.num_vision_parameters)
    if last:
        shared = shape.tied_embeddings and first
        counts += Counts(embedding=0 if shared else matrix, replicated=shape.hidden_size)
    return counts


def adapter_counts(
    shape: ModelSpec, layout: Layout, stage: int, dim: int, modules: tuple[str, ...]
) -> Counts:
    """Count the LoRA adapters of one stage, as Megatron-Bridge shards them.

    Per matrix [out, in]: A is [dim, in], B is [out, dim]. In a column-parallel layer A is divided by TP along
    dim and B along out; in a row-parallel layer A along in and B along out.
    """
    h, f, q = shape.hidden_size, shape.ffn_size, shape.query_size
    sizes = {
        "linear_qkv": (h, q + 2 * shape.key_value_size),
        "linear_proj": (q, h),
        "linear_fc1": (h, 2 * f),
        "linear_fc2": (f, h),
    }
    chosen = [sizes[name] for name in LORA_LAYERS if not modules or name in modules]
    layer = sum(dim * (into + out) for into, out in chosen) // layout.tensor
    return Counts(linear=layer * layout.stage_layers(shape.num_layers)[stage])


def model_parameters(shape: ModelSpec) -> int:
    """Count all parameters of the model, on one GPU."""
    return stage_counts(shape, Layout(), 0).total
