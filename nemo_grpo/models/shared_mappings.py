"""Table rows that several model families share, and names of the pieces of tensors.

An `Entry` ties one Megatron tensor to the Hugging Face tensors it is made of. Names hold ``{layer}`` and
``{expert}``; shapes are letters of `family.dims_of`: h hidden, q all queries, kv all keys, d head, f MLP,
v vocabulary, e experts, and a family's own. A Hugging Face tensor x may be converted in pieces: ``x[0]``,
``x[1]``, ... are its slices along the leading axis; ``x[a]``, ``x[b]``, ... blocks of its rows, in the order
of the table.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self, TypeVar

from nemo_grpo.models.ops import GROUPED_QKV, ONE_BELOW_THE_OTHER, Op
from nemo_grpo.models.spec import ModelSpec

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
HF_EMBEDDING, HF_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Entry:
    """One row of a family's table.

    Attributes:
        megatron: name in megatron-core's local layer spec.
        hf: (name, shape) of every Hugging Face tensor it is made of, in the op's order.
        op: how they are joined.
        fused: the name under which Transformer Engine's layers and every torch_dist checkpoint keep it, where
            that differs.
        twin: a second name, where the layer spec decides which one a checkpoint has; both are written.
        padded: the rows are the vocabulary, which Megatron may pad.
        layers: those that have it; None: all.
        keeps_dtype: ``--dtype`` does not round it.
    """

    megatron: str
    hf: tuple[tuple[str, str], ...]
    op: Op = ONE_BELOW_THE_OTHER
    fused: str | None = None
    twin: str | None = None
    padded: bool = False
    layers: Collection[int] | None = None
    keeps_dtype: bool = False

    def within(self, prefix: str) -> Self:
        """Put a prefix before the Megatron names, for a decoder that is a part of a model."""
        fused, twin = (prefix + name if name else None for name in (self.fused, self.twin))
        return replace(self, megatron=prefix + self.megatron, fused=fused, twin=twin)


def copy(megatron: str, hf: str, shape: str, fused: str | None = None, padded: bool = False) -> Entry:
    """Map a tensor that only changes its name."""
    return Entry(megatron, ((hf, shape),), fused=fused, padded=padded)


def layer_copy(megatron: str, hf: str, shape: str, fused: str | None = None) -> Entry:
    """Map a decoder layer's tensor that only changes its name."""
    return copy(LAYER + megatron, HF_LAYER + hf, shape, LAYER + fused if fused else None)


def embeddings(tied: bool) -> tuple[Entry, ...]:
    """Map the token embedding, the final norm and, unless it is tied, the output layer."""
    output = copy(OUTPUT, HF_OUTPUT, "v h", padded=True)
    return (
        copy(EMBEDDING, HF_EMBEDDING, "v h", padded=True),
        copy("decoder.final_layernorm.weight", "model.norm.weight", "h"),
        *(() if tied else (output,)),
    )


def _qkv(kind: str, columns: str) -> Entry:
    parts = (("q_proj", "q"), ("k_proj", "kv"), ("v_proj", "kv"))
    hf = tuple((f"{HF_LAYER}self_attn.{name}.{kind}", rows + columns) for name, rows in parts)
    return Entry(f"{LAYER}self_attention.linear_qkv.{kind}", hf, GROUPED_QKV)


def attention(qkv_bias: bool = False, qk_norm: bool = False) -> tuple[Entry, ...]:
    """Map the input norm, grouped-query attention and output projection."""
    norms = tuple(
        layer_copy(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", "d") for x in "qk"
    )
    fused = "self_attention.linear_qkv.layer_norm_weight"
    return (
        layer_copy("input_layernorm.weight", "input_layernorm.weight", "h", fused),
        _qkv("weight", " h"),
        *((_qkv("bias", ""),) if qkv_bias else ()),
        *(norms if qk_norm else ()),
        layer_copy("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h q"),
    )


def gated(megatron: str, hf: str, width: str = "f") -> tuple[Entry, ...]:
    """Map the three matrices of a gated MLP.

    Args: megatron, hf: their prefix after the layer's name.  width: letter of their width.
    """
    gate_up = tuple((f"{HF_LAYER}{hf}{name}_proj.weight", f"{width} h") for name in ("gate", "up"))
    return (
        Entry(f"{LAYER}{megatron}linear_fc1.weight", gate_up),
        layer_copy(f"{megatron}linear_fc2.weight", f"{hf}down_proj.weight", f"h {width}"),
    )


def gated_mlp(norm: str = "post_attention_layernorm.weight", width: str = "f") -> tuple[Entry, ...]:
    """Map norm and matrices of a gated MLP. Args: norm: its Hugging Face name.  width: see `gated`."""
    return (
        layer_copy("pre_mlp_layernorm.weight", norm, "h", fused="mlp.linear_fc1.layer_norm_weight"),
        *gated("mlp.", "mlp.", width),
    )


def routed_experts() -> tuple[Entry, ...]:
    """Map the router and one gated MLP per expert."""
    return (
        layer_copy("mlp.router.weight", "mlp.gate.weight", "e h"),
        *gated("mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}."),
    )


def gated_experts() -> tuple[Entry, ...]:
    """Map the norm, the router and one gated MLP per expert."""
    return norm_before_experts(), *routed_experts()


def norm_before_experts() -> Entry:
    """Map the norm before experts in layers that are all alike."""
    norm = layer_copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "h")
    twin = f"{LAYER}mlp.linear_fc1.layer_norm_weight"  # megatron-core's local spec, even with experts
    return replace(norm, twin=twin)


def decoder_table(spec: ModelSpec) -> tuple[Entry, ...]:
    """Map every tensor of a decoder that consists of the parts above."""
    return (
        *embeddings(spec.tied_embeddings),
        *attention(spec.has_qkv_bias, spec.has_qk_norm),
        *(gated_experts() if spec.num_experts else gated_mlp()),
    )


Named = TypeVar("Named", bound=tuple[Any, ...])


def whole_name(name: str) -> str:
    """Return the name of the tensor to which a piece belongs; a whole tensor's own."""
    return name.partition("[")[0]


def is_piece(name: str) -> bool:
    """True for a slice or a block of a tensor."""
    return "[" in name


def is_numbered(name: str) -> bool:
    """True for a slice along the leading axis, False for a block of rows."""
    return name.partition("[")[2][:-1].isdigit()


def grouped(named: Iterable[Named]) -> Iterator[tuple[str, list[Named]]]:
    """Yield tensors with their pieces, from tuples that begin with a tensor's or a piece's name."""
    for whole, group in groupby(named, key=lambda one: whole_name(one[0])):
        yield whole, list(group)


def whole_shape(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the tensor that consists of these pieces."""
    if not is_piece(names[0]):
        return shapes[0]
    if is_numbered(names[0]):
        return len(names), *shapes[0]
    return sum(shape[0] for shape in shapes), *shapes[0][1:]
