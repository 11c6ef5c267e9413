"""Table rows that several model families share, and names of parts of tensors.

An `Entry` ties one Megatron tensor to the Hugging Face tensors it is made of. Names hold ``{layer}`` and
``{expert}``. Shapes are letters of `family.dims_of`: h hidden, q all queries, kv all keys, d head, f MLP,
v vocabulary, e experts, and a family's own.

A table may name a part of a Hugging Face tensor, where each part makes a Megatron tensor of its own:

    mlp.experts.down_proj[2]            slice 2 along the leading axis (gpt-oss: one expert)
    linear_attn.conv1d.weight[query]    a block of rows, next to the table's other blocks (Qwen3.5)

`piece_name` makes such a name; `whole_name`, `is_piece` and `is_slice` read it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self, TypeVar

from nemo_grpo.models.ops import GROUPED_QKV, ONE_BELOW_THE_OTHER, Op
from nemo_grpo.models.spec import ModelSpec

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"
LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Entry:
    """One row of a family's table.

    Attributes:
        megatron: name in megatron-core's local layer spec.
        hf: (name, shape) of every Hugging Face tensor it is made of, in the op's order.
        op: operation that joins the Hugging Face tensors.
        fused: name in Transformer Engine's layers and in every torch_dist checkpoint; None: the same name.
        twin: second name in checkpoints, if the layer spec decides which one they have. Both are written.
        padded: the rows are the vocabulary, which Megatron may pad.
        layers: numbers of the layers that have the tensor; None: all layers.
        keeps_dtype: the tensor keeps its dtype, whatever ``--dtype`` says.
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
        fused = None if self.fused is None else prefix + self.fused
        twin = None if self.twin is None else prefix + self.twin
        return replace(self, megatron=prefix + self.megatron, fused=fused, twin=twin)


def copy(megatron: str, hf: str, shape: str, fused: str | None = None, padded: bool = False) -> Entry:
    """Map a tensor that only changes its name."""
    return Entry(megatron, ((hf, shape),), fused=fused, padded=padded)


def layer_copy(megatron: str, hf: str, shape: str, fused: str | None = None) -> Entry:
    """Map a decoder layer's tensor that only changes its name."""
    fused_name = None if fused is None else LAYER + fused
    return copy(LAYER + megatron, HF_LAYER + hf, shape, fused_name)


def embeddings(tied: bool) -> tuple[Entry, ...]:
    """Map the token embedding, the final norm and, unless it is tied, the output layer."""
    entries = [
        copy(EMBEDDING, HF_EMBEDDING, "v h", padded=True),
        copy("decoder.final_layernorm.weight", "model.norm.weight", "h"),
    ]
    if not tied:
        entries.append(copy(OUTPUT, HF_OUTPUT, "v h", padded=True))
    return tuple(entries)


def _qkv(kind: str, columns: str) -> Entry:
    """Map the query, key and value projections to Megatron's fused one.

    Args:
        kind: ``weight`` or ``bias``.
        columns: letters of the shape after the rows; none for a bias.
    """
    parts = (
        (f"{HF_LAYER}self_attn.q_proj.{kind}", f"q{columns}"),
        (f"{HF_LAYER}self_attn.k_proj.{kind}", f"kv{columns}"),
        (f"{HF_LAYER}self_attn.v_proj.{kind}", f"kv{columns}"),
    )
    return Entry(f"{LAYER}self_attention.linear_qkv.{kind}", parts, GROUPED_QKV)


def attention(qkv_bias: bool = False, qk_norm: bool = False) -> tuple[Entry, ...]:
    """Map the input norm, grouped-query attention and output projection."""
    fused_norm = "self_attention.linear_qkv.layer_norm_weight"
    entries = [
        layer_copy("input_layernorm.weight", "input_layernorm.weight", "h", fused_norm),
        _qkv("weight", " h"),
    ]
    if qkv_bias:
        entries.append(_qkv("bias", ""))
    if qk_norm:
        entries.append(layer_copy("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "d"))
        entries.append(layer_copy("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "d"))
    entries.append(layer_copy("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h q"))
    return tuple(entries)


def gated(megatron: str, hf: str, width: str = "f") -> tuple[Entry, ...]:
    """Map the three matrices of a gated MLP.

    Args:
        megatron: prefix of the Megatron names, after the layer's name.
        hf: the same of the Hugging Face names.
        width: letter of the MLP's width.
    """
    gate_and_up = (
        (f"{HF_LAYER}{hf}gate_proj.weight", f"{width} h"),
        (f"{HF_LAYER}{hf}up_proj.weight", f"{width} h"),
    )
    return (
        Entry(f"{LAYER}{megatron}linear_fc1.weight", gate_and_up),
        layer_copy(f"{megatron}linear_fc2.weight", f"{hf}down_proj.weight", f"h {width}"),
    )


def gated_mlp(norm: str = "post_attention_layernorm.weight", width: str = "f") -> tuple[Entry, ...]:
    """Map norm and matrices of a gated MLP.

    Args:
        norm: Hugging Face name of the norm, after the layer's name.
        width: letter of the MLP's width.
    """
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
    return (norm_before_experts(), *routed_experts())


def norm_before_experts() -> Entry:
    """Map the norm before experts in layers that are all alike."""
    norm = layer_copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "h")
    # megatron-core's local layer spec stores the norm under the dense layers' name even with experts, its
    # Transformer Engine spec under the norm's own. A checkpoint that both can load has it twice.
    return replace(norm, twin=f"{LAYER}mlp.linear_fc1.layer_norm_weight")


def decoder_table(spec: ModelSpec) -> tuple[Entry, ...]:
    """Map every tensor of a decoder that consists of the parts above."""
    feed_forward = gated_experts() if spec.num_experts else gated_mlp()
    return (
        *embeddings(spec.tied_embeddings),
        *attention(spec.has_qkv_bias, spec.has_qk_norm),
        *feed_forward,
    )


def piece_name(tensor: str, piece: str) -> str:
    """Name a part of a Hugging Face tensor: a slice by its number, a block of rows by a word."""
    return f"{tensor}[{piece}]"


def whole_name(name: str) -> str:
    """Return the name of the tensor to which a piece belongs. A whole tensor's name stays as it is."""
    return name.partition("[")[0]


def is_piece(name: str) -> bool:
    """Return True for the name of a slice or of a block of a tensor."""
    return "[" in name


def is_slice(name: str) -> bool:
    """Return True for the name of a slice along the leading axis, False for that of a block of rows."""
    piece = name.partition("[")[2].removesuffix("]")
    return piece.isdigit()


Named = TypeVar("Named", bound=tuple[Any, ...])


def by_tensor(named: Iterable[Named]) -> Iterator[tuple[str, list[Named]]]:
    """Yield each tensor's name with the tuples of its pieces; every tuple begins with a piece's name.

    Pieces of a tensor follow each other, as they do in the tables.
    """
    for tensor, pieces in groupby(named, key=lambda named_piece: whole_name(named_piece[0])):
        yield tensor, list(pieces)


def whole_shape(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the tensor that consists of these pieces."""
    if not is_piece(names[0]):
        return shapes[0]
    if is_slice(names[0]):
        return (len(names), *shapes[0])
    num_rows = sum(shape[0] for shape in shapes)
    return (num_rows, *shapes[0][1:])
