"""The model's parameters under their Hugging Face names, at any layout, by the converters' tables."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from nemo_grpo.models import family_for
from nemo_grpo.models.family import local_name

# How each parallel layer's parameter is cut over the tensor-parallel ranks: the dimension, and into how many
# blocks the whole tensor falls first (gate and up projections are stacked, and each is cut by itself).
_CUTS = {
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_qkv.bias": (0, 1),
    "linear_fc1.weight": (0, 2),
    "linear_proj.weight": (1, 1),
    "linear_fc2.weight": (1, 1),
    # LoRA: A (in) is cut where the layer's input is, B (out) where its output is
    "linear_qkv.adapter.linear_out.weight": (0, 1),
    "linear_fc1.adapter.linear_out.weight": (0, 2),
    "linear_proj.adapter.linear_in.weight": (1, 1),
    "linear_fc2.adapter.linear_in.weight": (1, 1),
}


class HFWeights:
    """Loads weights into this rank's part of the model, and gathers them from all ranks.

    The model's parameters may have the names of megatron-core's local layers or Transformer Engine's.
    """

    def __init__(self, hf_config: dict[str, Any], model: GPTModel) -> None:
        self.family = family_for(hf_config)
        self.model = model
        self._mark_sharded_parameters()
        self.vocab_size = int(hf_config["vocab_size"])

    def _mark_sharded_parameters(self) -> None:
        """Mark sharded parameters; the gradient norm counts the others on one rank only.

        megatron-core does it while it initialises weights, which is skipped here.
        """
        for name, parameter in self.local_parameters():
            dim, blocks = cut_of(name)
            if dim is not None and not getattr(parameter, "tensor_model_parallel", False):
                # not through megatron-core's setter: that refuses parameters on which one of the three is set
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim = dim  # type: ignore[attr-defined]
                parameter.partition_stride = blocks  # type: ignore[attr-defined]

    @torch.no_grad()
    def load(self, hf_tensors: Mapping[str, Tensor]) -> None:
        """Copy Hugging Face tensors into the parameters; every rank calls it with all tensors."""
        full = dict(self.family.to_megatron(hf_tensors))
        for name, parameter in self.local_parameters():
            # Pipeline stages other than the first hold a tied output layer as a copy of the embedding.
            source = full.get(local_name(name) or name, full["embedding.word_embeddings.weight"])
            if _is_vocabulary(name):  # padded with rows of zeros to what the ranks divide
                rows = parameter.shape[0] * parallel_state.get_tensor_model_parallel_world_size()
                source = torch.nn.functional.pad(source, (0, 0, 0, rows - source.shape[0]))
            parameter.copy_(own_part(name, source))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of every weight, whole, on every rank; views where possible."""
        yield from self.family.to_hf(self.gather({name: p.detach() for name, p in self.local_parameters()}))

    def local_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (megatron name with the layer's number in the whole model, parameter) of this rank's part."""
        layers = self.model.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in self.model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + offset)
            yield ".".join(parts), parameter

    @torch.no_grad()
    def gather(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors from every rank's parts; all ranks of a replica call it together."""
        whole = {name: self._gather_tensor_parallel(name, part) for name, part in local.items()}
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return whole
        group = parallel_state.get_pipeline_model_parallel_group()
        stages: list[Any] = [None] * group.size()
        dist.all_gather_object(stages, {name: t.cpu() for name, t in whole.items()}, group=group)
        merged: dict[str, Tensor] = {}
        for stage in reversed(stages):  # the first stage's embedding wins over the last stage's copy
            merged |= stage
        if "output_layer.weight" in merged and self.model.share_embeddings_and_output_weights:
            del merged["output_layer.weight"]
        return merged

    def _gather_tensor_parallel(self, name: str, part: Tensor) -> Tensor:
        dim, blocks = cut_of(name)
        group = parallel_state.get_tensor_model_parallel_group()
        if dim is not None and group.size() > 1:
            parts = [torch.empty_like(part) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
            pieces = [p.chunk(blocks, dim) for p in parts]
            part = torch.cat([piece[block] for block in range(blocks) for piece in pieces], dim)
        if _is_vocabulary(name):
            part = part[: self.vocab_size]
        return part


def cut_of(name: str) -> tuple[int | None, int]:
    """Return (dimension, blocks) of `_CUTS`; (None, 1): every tensor-parallel rank has it whole."""
    return next((cut for end, cut in _CUTS.items() if name.endswith(end)), (None, 1))


def _is_vocabulary(name: str) -> bool:
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


def own_part(name: str, full: Tensor) -> Tensor:
    """Cut this tensor-parallel rank's part out of a whole tensor."""
    dim, blocks = cut_of(name)
    size = parallel_state.get_tensor_model_parallel_world_size()
    if dim is None or size == 1:
        return full
    rank = parallel_state.get_tensor_model_parallel_rank()
    return torch.cat([block.chunk(size, dim)[rank] for block in full.chunk(blocks, dim)], dim)
