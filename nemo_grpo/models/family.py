"""One model's table with its sizes: weights in memory both ways, and the units that converters stream."""

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NoReturn

from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.models.family_spec import FamilySpec
from nemo_grpo.models.ops import ONE_BELOW_THE_OTHER, Dims, Op, Rows
from nemo_grpo.models.shared_mappings import (
    EMBEDDING,
    HF_LAYER,
    HF_OUTPUT,
    OUTPUT,
    Entry,
    grouped,
    is_piece,
    whole_name,
    whole_shape,
)
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError, listed

log = logging.getLogger(__name__)

_IGNORED_HF = re.compile(r".*\.rotary_emb\.inv_freq$")  # buffers in old exports; recomputed from the config
_IGNORED_MEGATRON = re.compile(r".*\._extra_state(/.*)?$")  # Transformer Engine's FP8 scales; no weights


_PACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class Unit:
    """The smallest piece that converts by itself: a block of rows of one Megatron tensor.

    Attributes:
        megatron: its name, layer and expert filled in.
        key: its torch_dist key.  index, stack: position on the key's stacked axes, layers and experts, and
            the lengths of those axes.
        twins: further keys under which it is written.
        stacked_keys: every key under which it may be found stacked, ``key`` first.
        layer_keys: keys under which it may be found by itself, in checkpoints that stack nothing.
        row, shape: first row within the tensor, and the block's shape.
        rows: rows of the whole Megatron tensor.
        hf, hf_shapes: the Hugging Face tensors it is made of.
        padded: the rows are the vocabulary.  keeps_dtype: ``--dtype`` does not round it.
    """

    megatron: str
    key: str
    index: tuple[int, ...]
    stack: tuple[int, ...]
    twins: tuple[str, ...]
    stacked_keys: tuple[str, ...]
    layer_keys: tuple[str, ...]
    row: int
    shape: tuple[int, ...]
    rows: int
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    op: Op
    padded: bool
    keeps_dtype: bool

    def pieces(self, dims: Dims, num_values: int) -> Iterator[Rows]:
        """Yield its rows in their order in the Megatron tensor, at most ``num_values`` numbers at a time."""
        most = max(1, num_values // math.prod(self.shape[1:]))
        return self.op.blocks([shape[0] for shape in self.hf_shapes], dims, most)


class Family:
    """The two-way mapping of one model.

    Attributes: config: config.json's content.  spec: its sizes and settings.  dims: sizes by letter.
                entries: the table.  settings: of Megatron-Bridge's provider, the family's own.
                unsaid: keys and values of config.json that no setting of the provider says.
    """

    def __init__(self, config: dict[str, Any], spec: ModelSpec, declaration: FamilySpec) -> None:
        assert declaration.table is not None
        self.config, self.spec, self.entries = config, spec, declaration.table(spec)
        stated = {**declaration.defaults, **config}
        self.settings = declaration.settings(stated, spec) if declaration.settings else {}
        self.dims, self.aliases = dims_of(spec), declaration.aliases
        self.num_layers, self.tied = spec.num_layers, spec.tied_embeddings
        self.stacks_layers = declaration.stacks_layers
        self.unsaid = {key: config[key] for key in declaration.unsaid if config.get(key)}

    @cached_property
    def prefix(self) -> str:
        """Prefix of the decoder's Megatron names; empty unless the decoder is a part of the model."""
        return self._embedding.megatron.removesuffix(EMBEDDING)

    @cached_property
    def _embedding(self) -> Entry:
        (found,) = (entry for entry in self.entries if entry.megatron.endswith(EMBEDDING))
        return found

    @property
    def hf_embedding(self) -> str:
        return self._embedding.hf[0][0]

    @property
    def tied_by(self) -> str:
        """Say where config.json ties the embeddings."""
        key = "tie_word_embeddings"
        if self.config.get(key):
            return f"config.json has {key}=true"
        if self.config.get("text_config", {}).get(key):
            return f"config.json has text_config.{key}=true"
        return f"config.json has no {key}, which {self.spec.model_type} takes for true"

    @property
    def tied_names(self) -> tuple[str, str]:
        return self.prefix + EMBEDDING, self.prefix + OUTPUT

    def to_megatron(self, hf: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (local-spec name, full tensor) with global layer numbers; shares memory where it can.

        Args: hf: every tensor of the model by its Hugging Face name.
        """
        self.check_hf({name: tuple(tensor.shape) for name, tensor in hf.items()})
        if self.tied and HF_OUTPUT in hf:
            check_tied(hf[self.hf_embedding], hf[HF_OUTPUT], self.tied_by)
        for entry, numbers in self._instances():
            names = [name.format(**numbers) for name, _ in entry.hf]
            yield entry.megatron.format(**numbers), entry.op.join([hf[name] for name in names], self.dims)

    def to_hf(self, megatron: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor); views of the input where possible.

        Args: megatron: full tensors with global layer numbers, under local-spec or Transformer Engine
              names; padded vocabulary rows are cut off.
        """
        names = {local: name for name in self.converted(megatron) if (local := local_name(name))}
        wanted = {entry.megatron.format(**numbers) for entry, numbers in self._instances()}
        embedding, output = self.tied_names
        extra = set(names) - wanted - ({output} if self.tied else set())
        refuse_unmatched("Megatron", wanted - set(names), {names[name] for name in extra})
        if self.tied and output in names:
            check_tied(megatron[embedding], megatron[output], self.tied_by)
        for entry, numbers in self._instances():
            name = names[entry.megatron.format(**numbers)]
            whole = megatron[name]
            shapes = [self.shape(letters) for _, letters in entry.hf]
            expected = entry.op.megatron_shape(shapes)
            if entry.padded:
                whole = whole[: expected[0]]
            if tuple(whole.shape) != expected:
                refuse_shape(name, megatron[name].shape, expected)
            parts = entry.op.split(whole, [shape[0] for shape in shapes], self.dims)
            for (hf_name, _), part in zip(entry.hf, parts, strict=True):
                # A model in memory has one dtype; numbers that were computed come in a wider one.
                narrow = part.to(megatron[names[embedding]].dtype) if entry.op.computes else part
                yield hf_name.format(**numbers), narrow

    def units(self) -> Iterator[Unit]:
        """Yield every unit of the model, layer by layer; contiguous parts are units of their own."""
        for entry, numbers in self._instances():
            names = tuple(name.format(**numbers) for name, _ in entry.hf)
            shapes = tuple(self.shape(letters) for _, letters in entry.hf)
            rows = entry.op.megatron_shape(shapes)[0]
            if not entry.op.contiguous:
                yield self._unit(entry, numbers, 0, rows, names, shapes, entry.op)
                continue
            row = 0
            for name, shape in zip(names, shapes, strict=True):
                yield self._unit(entry, numbers, row, rows, (name,), (shape,), ONE_BELOW_THE_OTHER)
                row += shape[0]

    def _unit(
        self,
        entry: Entry,
        numbers: dict[str, int],
        row: int,
        rows: int,
        names: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        op: Op,
    ) -> Unit:
        twins = (entry.twin,) if entry.twin else ()
        on_disk = (entry.fused or entry.megatron, entry.megatron, *twins)
        lengths = {"layer": self.num_layers, "expert": self.dims["e"]}
        axes = [axis for axis in numbers if axis == "expert" or self.stacks_layers]
        layer = "." if self.stacks_layers or "layer" not in numbers else f".{numbers['layer']}."
        stacked = tuple(_stacked(name, layer) for name in on_disk)
        return Unit(
            megatron=entry.megatron.format(**numbers),
            key=stacked[0],
            index=tuple(numbers[axis] for axis in axes),
            stack=tuple(lengths[axis] for axis in axes),
            twins=tuple(_stacked(name, layer) for name in twins),
            stacked_keys=stacked,
            layer_keys=tuple(name.format(**numbers) for name in on_disk),
            row=row,
            shape=op.megatron_shape(shapes),
            rows=rows,
            hf=names,
            hf_shapes=shapes,
            op=op,
            padded=entry.padded,
            keeps_dtype=entry.keeps_dtype,
        )

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return the shape that letters such as ``"q h"`` stand for."""
        return tuple(self.dims[letter] for letter in letters.split())

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, or piece of one, by its Hugging Face name, in the order of the layers."""
        return {n: shape for unit in self.units() for n, shape in zip(unit.hf, unit.hf_shapes, strict=True)}

    @cached_property
    def pieces(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the pieces among `hf_shapes`."""
        return {name: shape for name, shape in self.hf_shapes.items() if is_piece(name)}

    def check_hf(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes of a Hugging Face checkpoint with the table."""
        expected = self.hf_shapes
        for whole, group in grouped(self.pieces.items()):
            if whole in found:  # not taken apart
                refuse_shape(whole, found[whole], whole_shape(*zip(*group, strict=True)))
        extra = {name for name in self.converted(found) - set(expected) if not _IGNORED_HF.match(name)}
        if self.tied:
            extra -= {HF_OUTPUT}
        missing = {whole_name(name) for name in set(expected) - set(found)}
        refuse_unmatched("Hugging Face", missing, extra, _remedy_of_packed(extra))
        for name, shape in expected.items():
            if found[name] != shape:
                refuse_shape(name, found[name], shape)

    def converted(self, names: Iterable[str]) -> set[str]:
        """Leave out names of heads for multi-token prediction, which no table has, and log them."""
        count = self.config.get("num_nextn_predict_layers")
        behind = range(self.num_layers, self.num_layers + (0 if count is None else max(count, 1)))
        heads = ("mtp.", *(HF_LAYER.format(layer=layer) for layer in behind))
        left_out = sorted(name for name in names if name.startswith(heads))
        if left_out:
            what = "%d tensors for multi-token prediction (%s, ...) are left out"
            log.warning(what, len(left_out), left_out[0])
        return set(names) - set(left_out)

    def _instances(self) -> Iterator[tuple[Entry, dict[str, int]]]:
        """Yield the entries with the layer and expert numbers that they stand for, layer by layer."""
        for entry in self.entries:
            if "{layer}" not in entry.megatron:
                yield entry, {}
        layered = [entry for entry in self.entries if "{layer}" in entry.megatron]
        for layer, entry in product(range(self.num_layers), layered):
            if entry.layers is not None and layer not in entry.layers:
                continue
            if "{expert}" not in entry.megatron:
                yield entry, {"layer": layer}
                continue
            for expert in range(self.dims["e"]):
                yield entry, {"layer": layer, "expert": expert}


def dims_of(spec: ModelSpec) -> dict[str, int]:
    """Return sizes by the letters of the tables, plus ``groups`` (key-value heads) and the family's own."""
    return {
        "h": spec.hidden_size, "q": spec.query_size, "kv": spec.key_value_size, "d": spec.head_dim,
        "f": spec.ffn_size, "v": spec.vocab_size, "e": spec.num_experts, "groups": spec.num_key_value_heads,
        **spec.sizes,
    }  # fmt: skip


def check_tied(embedding: Tensor, output: Tensor, tied_by: str) -> None:
    """Refuse an output layer that differs from the embedding to which it is tied."""
    if embedding.data_ptr() != output.data_ptr() and not torch.equal(embedding, output):
        refuse_untied(tied_by)


def refuse_untied(tied_by: str) -> NoReturn:
    """Say that embeddings which should be tied are not. Args: tied_by: `Family.tied_by`."""
    raise UserError(
        f"{tied_by}, but the output layer differs from the embedding, and transformers would drop it; are "
        "the weights and config.json of the same model?"
    )


def refuse_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> NoReturn:
    """Say that a tensor has another shape than config.json says."""
    raise UserError(
        f"{name} is {list(found)}, config.json says {list(expected)}; are the weights and config.json of the "
        "same model?"
    )


def refuse_unmatched(side: str, missing: set[str], extra: set[str], remedy: str = "") -> None:
    """Raise if a name has no partner."""
    lists = {"missing": missing, "not known": extra}
    problems = [f"{what}: {listed(names)}" for what, names in lists.items() if names]
    if problems:
        raise UserError(f"the {side} tensors do not fit config.json; {'; '.join(problems)}{remedy}")


def _remedy_of_packed(extra: set[str]) -> str:
    """Name the remedy where a layer's experts are one tensor, as transformers holds them in memory."""
    if not any(name.endswith(_PACKED) for name in extra):
        return ""
    return (
        "; the experts are packed: load the model with transformers and save it with "
        "save_pretrained(FOLDER, save_original_format=True)"
    )


def local_name(name: str) -> str | None:
    """Return a parameter's local-spec name for it or for Transformer Engine's name; None: not a weight.

    Transformer Engine's layers hold the norms within the linear layers that follow them.
    """
    if _IGNORED_MEGATRON.match(name):
        return None
    name = name.replace(".self_attention.linear_qkv.layer_norm_weight", ".input_layernorm.weight")
    name = name.replace(".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight")
    name = re.sub(r"\.linear_(q|kv)_up_proj\.layer_norm_weight$", r".\1_layernorm.weight", name)
    return re.sub(
        r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".experts.local_experts.\3.\1.\2", name
    )


def _stacked(name: str, layer: str) -> str:
    """Name a tensor's torch_dist key, where experts are a leading axis. Args: layer: ".", or ".N."."""
    return name.replace(".{layer}.", layer).replace(".local_experts.{expert}.", ".experts.")
