"""LoRA adapters as Megatron-Bridge trains them, written down once more as a check of the converters.

y = W x + (alpha / r) B A x;   rows of B lie as rows of the fused W:
linear_qkv: per group of query heads its queries, then a key, then a value;   linear_fc1: gate, then up
output_layer: the vocabulary, padded
"""

import json
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_grpo.rehearsal.stages import Failed

PARTS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
"""Megatron's adapted layer -> its parts in Hugging Face's models, in the order of `rows_of_parts`."""
OUTPUT = "output_layer"
STORED = re.compile(r"(?:decoder\.layers\.(.+)|(output_layer))\.adapter\.linear_(?:in|out)\.weight")


@dataclass(frozen=True)
class Adapter:
    """Of one layer: A [r, in], and the rows of B of each Hugging Face tensor by its name."""

    a: Tensor
    b: dict[str, Tensor]


@dataclass(frozen=True)
class Adapters:
    """All of a checkpoint; scale: alpha / r."""

    scale: float
    layers: list[Adapter]

    @property
    def updates(self):
        """Hugging Face tensor -> scale B A, float32."""
        return {
            name: self.scale * b.float() @ each.a.float()
            for each in self.layers
            for name, b in each.b.items()
        }

    def gradient_norm(self, gradients):
        """The norm of the adapters' gradients, given those of the merged weights.

        With W' = W + s B A:  dB = s dW' A^T,  dA = s B^T dW'
        """
        square = 0.0
        for each in self.layers:
            a, down = each.a.float(), torch.zeros(each.a.shape)
            for name, b in each.b.items():
                square += float((self.scale * gradients[name] @ a.T).double().square().sum())
                down += self.scale * b.float().T @ gradients[name]
            square += float(down.double().square().sum())
        return math.sqrt(square)


def adapters_of(checkpoint, megatron_cfg):
    """The adapters in a checkpoint ``step_N`` of NeMo-RL; its scale is the recipe's."""
    config = json.loads((checkpoint / "policy" / "tokenizer" / "config.json").read_text())
    stored = read(checkpoint)
    known = {match[1] or match[2] for name in stored if (match := STORED.fullmatch(name))}
    other = sorted({name for name in stored if not STORED.fullmatch(name)} | (known - {*PARTS, OUTPUT}))
    if other or not known:
        raise Failed(f"adapters that this check does not know: {other[:3] or 'none at all'}; {checkpoint}")
    layers = []
    if OUTPUT in known:
        a, b = (stored[f"{OUTPUT}.adapter.linear_{kind}.weight"] for kind in ("in", "out"))
        layers.append(Adapter(a, {"lm_head.weight": b[: config["vocab_size"]]}))
    for layer in sorted(known - {OUTPUT}):
        a, b = (stored[f"decoder.layers.{layer}.adapter.linear_{kind}.weight"] for kind in ("in", "out"))
        for index in range(len(a)):
            rows = rows_of_parts(layer, len(b[index]), config)
            names = [f"model.layers.{index}.{part}.weight" for part in PARTS[layer]]
            parts = {name: b[index][at] for name, at in zip(names, rows, strict=True)}
            layers.append(Adapter(a[index], parts))
    peft = megatron_cfg.lora_in_use
    return Adapters(peft.alpha / peft.dim, layers)


def rows_of_parts(layer, number, config):
    """Which rows of a fused layer belong to each of its `PARTS`."""
    rows = torch.arange(number)
    if layer == "mlp.linear_fc1":
        return list(rows.chunk(2))
    if layer != "self_attention.linear_qkv":
        return [rows]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    of_group = rows.reshape(groups, heads // groups + 2, size)
    return [of_group[:, :-2].flatten(), of_group[:, -2].flatten(), of_group[:, -1].flatten()]


def read(checkpoint):
    """Every tensor of an adapter, by torch's own reader."""
    from torch.distributed import checkpoint as dcp

    (weights,) = (checkpoint / "policy" / "weights").glob("iter_*")
    reader = dcp.FileSystemReader(weights)
    stored = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if ".adapter." in name
        and isinstance(entry, dcp.metadata.TensorStorageMetadata)
        and not name.startswith("optimizer.")
    }
    dcp.load(stored, storage_reader=reader, no_dist=True)
    return stored
