"""One model's table with its sizes: weights in memory both ways, and the units that converters stream."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any

from nemo_grpo.core.lazy import Tensor
from nemo_grpo.models.family_spec import FamilySpec
from nemo_grpo.models.ops import ONE_BELOW_THE_OTHER, Op
from nemo_grpo.models.refusals import check_tied, refuse_shape, refuse_unmatched, remedy_of_packed
from nemo_grpo.models.shared_mappings import (
    EMBEDDING,
    HF_LAYER,
    HF_OUTPUT,
    OUTPUT,
    Entry,
    by_tensor,
    is_piece,
    whole_name,
    whole_shape,
)
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.models.units import Storage, Unit

log = logging.getLogger(__name__)

_IGNORED_HF = re.compile(r".*\.rotary_emb\.inv_freq$")
"""Buffers of old exports, which transformers computes from the config."""
_IGNORED_MEGATRON = re.compile(r".*\._extra_state(/.*)?$")
"""Scales of Transformer Engine's FP8; no weights."""


class Family:
    """The two-way mapping of one model.

    Attributes:
        config: content of config.json.
        spec: the model's sizes and settings.
        entries: rows of the family's table.
        dims: sizes by letter, as `dims_of` returns them.
        settings: settings of Megatron-Bridge's provider that only this family has.
        aliases: prefixes of Hugging Face names that transformers also writes -> prefixes in the table.
        num_layers: number of layers of the decoder.
        tied: the output layer is the embedding.
        stacks_layers: a checkpoint stacks the layers of a tensor.
        lost_settings: keys and values of config.json that no setting of the provider expresses.
    """

    def __init__(self, config: dict[str, Any], spec: ModelSpec, declaration: FamilySpec) -> None:
        assert declaration.table is not None
        self.config = config
        self.spec = spec
        self.entries = declaration.table(spec)
        self.dims = dims_of(spec)
        config_with_defaults = {**declaration.defaults, **config}
        self.settings = declaration.settings(config_with_defaults, spec) if declaration.settings else {}
        self.aliases = declaration.aliases
        self.num_layers = spec.num_layers
        self.tied = spec.tied_embeddings
        self.stacks_layers = declaration.stacks_layers
        self.lost_settings = {key: config[key] for key in declaration.lost_keys if config.get(key)}

    @cached_property
    def prefix(self) -> str:
        """Prefix of the decoder's Megatron names; empty unless the decoder is a part of the model."""
        return self._embedding.megatron.removesuffix(EMBEDDING)

    @cached_property
    def _embedding(self) -> Entry:
        (embedding,) = (entry for entry in self.entries if entry.megatron.endswith(EMBEDDING))
        return embedding

    @property
    def hf_embedding(self) -> str:
        return self._embedding.hf[0][0]

    @property
    def tied_by(self) -> str:
        """Say where config.json ties the embeddings."""
        # Configs with a vision tower have the key at the top, in the text's section, or in both.
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
        """Convert a model in memory to Megatron's tensors; they share memory with ``hf`` where possible.

        Args: hf: every tensor of the model by its Hugging Face name.
        Yields: (name in megatron-core's local layer spec, with global layer numbers; full tensor).
        """
        self.check_hf({name: tuple(tensor.shape) for name, tensor in hf.items()})
        if self.tied and HF_OUTPUT in hf:
            check_tied(hf[self.hf_embedding], hf[HF_OUTPUT], self.tied_by)
        for entry, numbers in self._instances():
            names = [name.format(**numbers) for name, _ in entry.hf]
            yield entry.megatron.format(**numbers), entry.op.join([hf[name] for name in names], self.dims)

    def to_hf(self, megatron: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Convert a model in memory to Hugging Face's tensors; they are views of the input where possible.

        Args: megatron: full tensors with global layer numbers, under local-spec or Transformer Engine names.
            Padded rows of the vocabulary are cut off.
        Yields: (Hugging Face name, tensor).
        """
        names = self._names_by_local_name(megatron)
        embedding, output = self.tied_names
        if self.tied and output in names:
            check_tied(megatron[embedding], megatron[output], self.tied_by)
        # A model in memory has one dtype; numbers that were computed come in a wider one.
        model_dtype = megatron[names[embedding]].dtype
        for entry, numbers in self._instances():
            name = names[entry.megatron.format(**numbers)]
            whole = megatron[name]
            shapes = [self.shape(letters) for _, letters in entry.hf]
            expected = entry.op.megatron_shape(shapes)
            if entry.padded:
                # Rows that Megatron added to divide the vocabulary by tensor-parallel ranks.
                whole = whole[: expected[0]]
            if tuple(whole.shape) != expected:
                refuse_shape(name, megatron[name].shape, expected)
            parts = entry.op.split(whole, [shape[0] for shape in shapes], self.dims)
            for (hf_name, _), part in zip(entry.hf, parts, strict=True):
                tensor = part.to(model_dtype) if entry.op.computes else part
                yield hf_name.format(**numbers), tensor

    def _names_by_local_name(self, names: Iterable[str]) -> dict[str, str]:
        """Match Megatron names with the table.

        Args: names: names under either layer spec.
        Returns: local-spec name -> the name among ``names``.
        """
        names_by_local_name = {}
        for name in self.converted(names):
            local = local_name(name)
            if local is not None:
                names_by_local_name[local] = name
        expected = {entry.megatron.format(**numbers) for entry, numbers in self._instances()}
        extra = set(names_by_local_name) - expected
        if self.tied:
            # On the last pipeline stage Megatron keeps the tied embedding as an output layer.
            extra.discard(self.tied_names[1])
        absent_names = expected - set(names_by_local_name)
        refuse_unmatched("Megatron", absent_names, {names_by_local_name[local] for local in extra})
        return names_by_local_name

    def units(self) -> Iterator[Unit]:
        """Yield every unit of the model, layer by layer."""
        for entry, numbers in self._instances():
            if not entry.op.contiguous:
                yield self._unit(entry, numbers, entry.hf, 0, entry.op)
                continue
            row = 0
            for part in entry.hf:
                # A part that is a block of rows is a unit of its own: workers convert parts side by side.
                unit = self._unit(entry, numbers, (part,), row, ONE_BELOW_THE_OTHER)
                yield unit
                row += unit.shape[0]

    def _unit(
        self, entry: Entry, numbers: dict[str, int], parts: tuple[tuple[str, str], ...], row: int, op: Op
    ) -> Unit:
        """Make a unit of an entry's tensor.

        Args:
            entry: row of the table.
            numbers: numbers of the layer and the expert.
            parts: (name, shape) of the Hugging Face tensors that make up the unit.
            row: first row of the unit in the Megatron tensor.
            op: operation that joins the parts.
        """
        hf_shapes = tuple(self.shape(letters) for _, letters in parts)
        tensor_shape = entry.op.megatron_shape([self.shape(letters) for _, letters in entry.hf])
        return Unit(
            megatron=entry.megatron.format(**numbers),
            storage=self._storage(entry, numbers),
            tensor_rows=tensor_shape[0],
            row=row,
            shape=op.megatron_shape(hf_shapes),
            hf=tuple(name.format(**numbers) for name, _ in parts),
            hf_shapes=hf_shapes,
            op=op,
            padded=entry.padded,
            keeps_dtype=entry.keeps_dtype,
        )

    def _storage(self, entry: Entry, numbers: dict[str, int]) -> Storage:
        """Find the places of an entry's tensor of one layer and expert in checkpoints."""
        twins = [] if entry.twin is None else [entry.twin]
        # The first name is the one that is written. Checkpoints have Transformer Engine's where it differs,
        # whatever the layers were built of.
        stored_names = [entry.fused or entry.megatron, entry.megatron, *twins]
        lengths = {"layer": self.num_layers, "expert": self.dims["e"]}
        stacked_axes = [axis for axis in numbers if axis == "expert" or self.stacks_layers]
        layer = "."
        if "layer" in numbers and not self.stacks_layers:
            layer = f".{numbers['layer']}."
        stacked_keys = tuple(_stacked(name, layer) for name in stored_names)
        return Storage(
            key=stacked_keys[0],
            index=tuple(numbers[axis] for axis in stacked_axes),
            stack=tuple(lengths[axis] for axis in stacked_axes),
            twins=tuple(_stacked(name, layer) for name in twins),
            stacked_keys=stacked_keys,
            unstacked_keys=tuple(name.format(**numbers) for name in stored_names),
        )

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return the shape that letters such as ``"q h"`` stand for."""
        return tuple(self.dims[letter] for letter in letters.split())

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, or piece of one, by its Hugging Face name, in the order of the layers."""
        shapes: dict[str, tuple[int, ...]] = {}
        for unit in self.units():
            shapes.update(zip(unit.hf, unit.hf_shapes, strict=True))
        return shapes

    @cached_property
    def pieces(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the pieces among `hf_shapes`."""
        return {name: shape for name, shape in self.hf_shapes.items() if is_piece(name)}

    def check_hf(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes of a Hugging Face checkpoint with the table.

        Args: shapes: shape of each tensor or piece by its name.
        """
        expected = self.hf_shapes
        for tensor, pieces in by_tensor(self.pieces.items()):
            if tensor in shapes:
                # The reader takes a tensor apart if its shape is right; this one is still whole.
                piece_names, piece_shapes = zip(*pieces, strict=True)
                refuse_shape(tensor, shapes[tensor], whole_shape(piece_names, piece_shapes))
        extra = self.converted(shapes) - set(expected)
        extra = {name for name in extra if not _IGNORED_HF.match(name)}
        if self.tied:
            extra.discard(HF_OUTPUT)
        absent_names = {whole_name(name) for name in set(expected) - set(shapes)}
        refuse_unmatched("Hugging Face", absent_names, extra, remedy_of_packed(extra))
        for name, shape in expected.items():
            if shapes[name] != shape:
                refuse_shape(name, shapes[name], shape)

    def converted(self, names: Iterable[str]) -> set[str]:
        """Remove the names of heads for multi-token prediction, which are not converted, and log them."""
        # DeepSeek-V3's and GLM's heads follow the last layer and are numbered like layers. A config may say 0
        # beside weights that still have one, so a family that has the key is taken to have one at least.
        count = self.config.get("num_nextn_predict_layers")
        num_heads = 0 if count is None else max(count, 1)
        head_numbers = range(self.num_layers, self.num_layers + num_heads)
        prefixes = ("mtp.", *(HF_LAYER.format(layer=number) for number in head_numbers))
        left_out = sorted(name for name in names if name.startswith(prefixes))
        if left_out:
            log.warning(
                "%d tensors for multi-token prediction (%s, ...) are left out", len(left_out), left_out[0]
            )
        return set(names) - set(left_out)

    def _instances(self) -> Iterator[tuple[Entry, dict[str, int]]]:
        """Yield each entry once for every layer and expert that has it, with their numbers."""
        # Embeddings, final norm and output layer come first, before all layers.
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
    """Return a model's sizes by the letters that the tables use.

    ``groups`` is the number of key-value heads. A family may have further letters for its own tensors.
    """
    return {
        "h": spec.hidden_size,
        "q": spec.query_size,
        "kv": spec.key_value_size,
        "d": spec.head_dim,
        "f": spec.ffn_size,
        "v": spec.vocab_size,
        "e": spec.num_experts,
        "groups": spec.num_key_value_heads,
        **spec.sizes,
    }


def local_name(name: str) -> str | None:
    """Translate a name of Transformer Engine's layers to megatron-core's local layer spec.

    Transformer Engine holds the norms within the linear layers that follow them. A name of the local layer
    spec is returned unchanged.

    Returns: the name, or None for something that is not a weight.
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
    """Make the torch_dist key of a tensor whose experts are stacked along a leading axis.

    Args:
        name: the tensor's name in the table.
        layer: text in place of ``.{layer}.``: ``.`` if layers are stacked, too, else a number as in ``.3.``.
    """
    return name.replace(".{layer}.", layer).replace(".local_experts.{expert}.", ".experts.")
