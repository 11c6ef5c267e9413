"""Sizes and settings of a model for converters, planner, engine and decoder, from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXTENDING = ("dynamic", "linear", "yarn")
"""Kinds of rotary scaling whose factor multiplies the positions of a model."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama family, dense or with experts, with a vision tower or without.

    Attributes:
        name: the model's name, for messages.
        model_type: the family's name in config.json.
        hidden_size: width of the residual stream.
        num_layers: layers of the decoder.
        num_attention_heads: query heads.
        num_key_value_heads: heads of keys and values, one per group of query heads.
        ffn_size: width of the gated feed-forward layer; of one expert where num_experts > 0.
        vocab_size: rows of the embedding.
        max_position_embeddings: positions as config.json states them; see `longest_sequence`.
        tied_embeddings: the output layer is the embedding.
        head_dim: width of a head, which need not be hidden_size / num_attention_heads.
        has_qkv_bias: biases on the projections to q, k and v.
        has_qk_norm: norms on q and k.
        has_post_norms: norms after attention and feed-forward layer, too.
        has_all_biases: biases on the output projection, the router and the experts, too.
        has_sinks: an attention sink for each head.
        num_experts: routed experts of a layer; 0: the model is dense.
        num_experts_per_token: routed experts that a token passes.
        num_shared_experts: shared experts of width ffn_size, which every token passes.
        has_shared_gate: the shared experts have a gate, and the router has no bias.
        has_output_gate: the queries' projection also makes a gate on attention's output.
        linear_layers: numbers of the layers with linear attention.
        linear_sizes: (weights that TP divides, weights on every rank) of a layer's linear attention.
        num_dense_layers: number of layers before the first one with experts.
        dense_ffn_size: width of the feed-forward layer in these dense layers.
        query_rank: width of the queries' latent in multi-head latent attention (DeepSeek-V2, 2405.04434); 0:
            queries come from the input.
        key_value_rank: width of the latent of keys and values; 0: the attention is not latent.
        rope_head_dim: in latent attention, columns of a head that are rotated by position. They come in
            addition to the head_dim columns that are not.
        num_vision_parameters: parameters of the vision tower and its merger.
        norm_eps: number that RMS norms add to the mean square.
        hidden_act: activation of the feed-forward layer.
        rope: rotary parameters; ``rope_type`` and ``rope_theta`` are always there.
        sliding_window: positions that some layers' attention is limited to; None: no layer has a window.
        sizes: sizes by the letters of the family's own tensors.
        is_bridged: Megatron-Bridge, which loads models for NeMo-RL, knows the family.
    """

    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    ffn_size: int
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool
    head_dim: int
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    has_all_biases: bool = False
    has_sinks: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    has_shared_gate: bool = False
    has_output_gate: bool = False
    linear_layers: tuple[int, ...] = ()
    linear_sizes: tuple[int, int] = (0, 0)
    num_dense_layers: int = 0
    dense_ffn_size: int = 0
    query_rank: int = 0
    key_value_rank: int = 0
    rope_head_dim: int = 0
    num_vision_parameters: int = 0
    norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sliding_window: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    is_bridged: bool = True

    @property
    def longest_sequence(self) -> int:
        """Longest sequence that the model can take, in tokens.

        Scaled rotary parameters multiply the length that the model was trained for. vLLM computes the same
        from config.json (`_get_and_verify_max_len`). Gemma 3's max_position_embeddings is scaled already.
        """
        rope_type = self.rope.get("rope_type")
        factor = self.rope.get("factor")
        if rope_type not in EXTENDING or factor is None or self.model_type.startswith("gemma3"):
            return self.max_position_embeddings
        original = self.rope.get("original_max_position_embeddings") or self.max_position_embeddings
        return max(self.max_position_embeddings, int(factor * original))

    @property
    def num_sparse_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention_share(self) -> float:
        return 1 - len(self.linear_layers) / self.num_layers

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads; the value heads' is the same."""
        return self.num_key_value_heads * self.head_dim
