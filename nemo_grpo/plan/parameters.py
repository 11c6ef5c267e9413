"""Parameters that one GPU holds: exact counts of the tensors that megatron-core builds.

Column- and row-parallel matrices and the vocabulary are divided by TP, experts by EP and expert TP, layers by
PP; norms, routers and the vision tower are on every rank of their stage. With tied embeddings and PP > 1 the
last stage keeps a copy of the embedding. (megatron/core: attention.py, mlp.py, experts.py, gpt_model.py.)
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_grpo.models import ModelSpec
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import LORA_LAYERS


@dataclass(frozen=True)
class Counts:
    """Parameters of one rank.

    Attributes:
        linear: parameters outside the experts that TP divides.
        embedding: embedding and output matrices.
        replicated: norms, routers, biases that TP does not divide, the vision tower.
        expert: parameters of the routed experts.
    """

    linear: int = 0
    embedding: int = 0
    replicated: int = 0
    expert: int = 0

    @property
    def dense(self) -> int:
        """Parameters outside the routed experts."""
        return self.linear + self.embedding + self.replicated

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.expert

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.linear + other.linear,
            self.embedding + other.embedding,
            self.replicated + other.replicated,
            self.expert + other.expert,
        )

    def __mul__(self, factor: int) -> Counts:
        return Counts(
            factor * self.linear, factor * self.embedding, factor * self.replicated, factor * self.expert
        )


def mixer_sizes(shape: ModelSpec) -> tuple[float, float]:
    """Return what `attention_sizes` does, averaged over all layers if some have linear attention."""
    divided, replicated = attention_sizes(shape)
    share = shape.attention_share
    if share == 1:
        return divided, replicated
    linear_divided, linear_replicated = shape.linear_sizes
    mean_divided = share * divided + (1 - share) * linear_divided
    mean_replicated = share * replicated + (1 - share) * linear_replicated
    return mean_divided, mean_replicated


def attention_sizes(shape: ModelSpec) -> tuple[int, int]:
    """Count (weights that TP divides, weights on every rank) of one layer's attention.

    Grouped queries, terms in brackets only where the model has them:
        divided      h (q + 2 kv) + q h + [q + 2 kv of biases] + [q h of a gate] + [heads of sinks]
        on every rank                 [2 head_dim of norms on q and k] + [h of the output's bias]

    Latent attention: the up-projections and the output are divided, the down-projections and their norms are
    not. Without a query rank the queries are projected from h directly.
    (megatron/core: attention.py, multi_latent_attention.py.)
    """
    if shape.key_value_rank:
        return _latent_attention_sizes(shape)
    h = shape.hidden_size
    qkv = shape.query_size + 2 * shape.key_value_size
    divided = h * qkv + shape.query_size * h
    if shape.has_qkv_bias:
        divided += qkv
    if shape.has_output_gate:
        divided += shape.query_size * h
    if shape.has_sinks:
        divided += shape.num_attention_heads
    replicated = 0
    if shape.has_qk_norm:
        replicated += 2 * shape.head_dim
    if shape.has_all_biases:
        replicated += h
    return divided, replicated


def _latent_attention_sizes(shape: ModelSpec) -> tuple[int, int]:
    h = shape.hidden_size
    num_heads = shape.num_attention_heads
    query_up = num_heads * (shape.head_dim + shape.rope_head_dim) * (shape.query_rank or h)
    key_value_up = num_heads * 2 * shape.head_dim * shape.key_value_rank
    output = num_heads * shape.head_dim * h
    down = h * (shape.query_rank + shape.key_value_rank + shape.rope_head_dim)
    norms = shape.query_rank + shape.key_value_rank
    return query_up + key_value_up + output, down + norms


def layer_counts(
    shape: ModelSpec, layout: Layout, *, is_dense: bool = False, is_linear: bool = False
) -> Counts:
    """Count the parameters of one transformer layer.

    Terms in brackets count only where the layer has them:
        linear     = (attention + [3 h f, dense] + [3 h f per shared expert]) / TP
        replicated = attention's replicated part + 2 h + [2 h of post norms] + [E h of the router]
                     + [E of the router's bias] + [h of the shared experts' gate]
        expert     = E / EP x (3 h f + [2 f + h of biases]) / ETP

    Args:
        shape: the model.
        layout: its split over ranks.
        is_dense: one of the dense layers of a model with experts.
        is_linear: a layer with linear attention.
    """
    h = shape.hidden_size
    f = shape.ffn_size
    divided, replicated = shape.linear_sizes if is_linear else attention_sizes(shape)
    replicated += (4 if shape.has_post_norms else 2) * h
    if not shape.num_experts or is_dense:
        width = shape.dense_ffn_size if is_dense else f
        return Counts(linear=(divided + 3 * h * width) // layout.tensor, replicated=replicated)
    expert_size = 3 * h * f
    if shape.has_all_biases:
        expert_size += 2 * f + h
    experts = shape.num_experts // layout.expert * expert_size // layout.expert_tensor
    divided += shape.num_shared_experts * 3 * h * f
    router = shape.num_experts * h
    if shape.has_all_biases or (shape.num_shared_experts and not shape.has_shared_gate):
        router += shape.num_experts
    if shape.has_shared_gate:
        router += h
    return Counts(divided // layout.tensor, 0, replicated + router, experts)


def dense_layers(shape: ModelSpec, layout: Layout, stage: int) -> int:
    """Count the dense layers of a stage, in a model whose other layers have experts."""
    layers_per_stage = layout.stage_layers(shape.num_layers)
    # The dense layers are the model's first ones.
    num_not_before = max(shape.num_dense_layers - sum(layers_per_stage[:stage]), 0)
    return min(num_not_before, layers_per_stage[stage])


def stage_counts(shape: ModelSpec, layout: Layout, stage: int) -> Counts:
    """Count the parameters of a pipeline stage.

    The first stage has the embedding besides its layers, and the last one the final norm and the output.

    Args:
        shape: the model.
        layout: its split over ranks.
        stage: 0 .. PP - 1.
    """
    is_first = stage == 0
    is_last = stage == layout.pipeline - 1
    layers_per_stage = layout.stage_layers(shape.num_layers)
    num_layers = layers_per_stage[stage]
    first_layer = sum(layers_per_stage[:stage])
    num_dense = dense_layers(shape, layout, stage)
    num_linear = len(
        [layer for layer in shape.linear_layers if first_layer <= layer < first_layer + num_layers]
    )
    counts = layer_counts(shape, layout) * (num_layers - num_dense - num_linear)
    counts += layer_counts(shape, layout, is_linear=True) * num_linear
    if num_dense:
        counts += layer_counts(shape, layout, is_dense=True) * num_dense
    matrix = shape.vocab_size * shape.hidden_size // layout.tensor
    if is_first:
        counts += Counts(embedding=matrix, replicated=shape.num_vision_parameters)
    if is_last:
        final_norm = shape.hidden_size
        # Tied embeddings are one tensor only where first and last stage are one.
        is_shared = shape.tied_embeddings and is_first
        counts += Counts(embedding=0 if is_shared else matrix, replicated=final_norm)
    return counts


def adapter_counts(
    shape: ModelSpec, layout: Layout, stage: int, dim: int, modules: tuple[str, ...]
) -> Counts:
    """Count the LoRA adapters of one stage, as Megatron-Bridge shards them.

    Per matrix [out, in]: A is [dim, in], B is [out, dim]. In a column-parallel layer A is divided by TP along
    dim and B along out; in a row-parallel layer A along in and B along out.
    """
    h = shape.hidden_size
    f = shape.ffn_size
    q = shape.query_size
    # Sum of a matrix's rows and columns, in + out.
    widths = {
        "linear_qkv": h + q + 2 * shape.key_value_size,
        "linear_proj": q + h,
        "linear_fc1": h + 2 * f,
        "linear_fc2": f + h,
    }
    adapted = [widths[name] for name in LORA_LAYERS if not modules or name in modules]
    per_layer = dim * sum(adapted) // layout.tensor
    return Counts(linear=per_layer * layout.stage_layers(shape.num_layers)[stage])


def model_parameters(shape: ModelSpec) -> int:
    """Count all parameters of the model, on one GPU."""
    return stage_counts(shape, Layout(), 0).total
