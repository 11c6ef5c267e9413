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

# Parameter of a parallel layer -> (dimension along which the tensor-parallel ranks cut it, number of blocks
# that are stacked in it). Each block is cut by itself: gate and up projections are two.
_CUTS = {
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_qkv.bias": (0, 1),
    "linear_fc1.weight": (0, 2),
    "linear_proj.weight": (1, 1),
    "linear_fc2.weight": (1, 1),
    # LoRA: A (in) is cut where the layer's input is, B (out) where its output is.
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
                # Not through megatron-core's setter, which refuses a parameter that has one of the three.
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim = dim  # type: ignore[attr-defined]
                parameter.partition_stride = blocks  # type: ignore[attr-defined]

    @torch.no_grad()
    def load(self, hf_tensors: Mapping[str, Tensor]) -> None:
        """Copy Hugging Face tensors into the parameters; every rank calls it with all tensors."""
        whole_tensors = dict(self.family.to_megatron(hf_tensors))
        embedding = whole_tensors["embedding.word_embeddings.weight"]
        for name, parameter in self.local_parameters():
            # Pipeline stages other than the first hold a tied output layer as a copy of the embedding.
            whole = whole_tensors.get(local_name(name) or name, embedding)
            # The vocabulary is padded with rows of zeros, so that the ranks have equal numbers of rows.
            if _is_vocabulary(name):
                num_rows = parameter.shape[0] * parallel_state.get_tensor_model_parallel_world_size()
                whole = torch.nn.functional.pad(whole, (0, 0, 0, num_rows - whole.shape[0]))
            parameter.copy_(local_shard(name, whole))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of every weight, whole, on every rank; views where possible."""
        yield from self.family.to_hf(self.gather({name: p.detach() for name, p in self.local_parameters()}))

    def local_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (megatron name with the layer's number in the whole model, parameter) of this rank's part."""
        layers = self.model.decoder.layers
        # megatron-core numbers layers from 1 in the whole model, and parameters from 0 in this stage.
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in self.model.named_parameters():
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(int(words[2]) + first_layer)
            yield ".".join(words), parameter

    @torch.no_grad()
    def gather(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors from every rank's parts; all ranks of a replica call it together."""
        whole = {name: self._gather_tensor_parallel(name, part) for name, part in local.items()}
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return whole
        group = parallel_state.get_pipeline_model_parallel_group()
        stages: list[Any] = [None] * group.size()
        dist.all_gather_object(stages, {name: tensor.cpu() for name, tensor in whole.items()}, group=group)
        merged: dict[str, Tensor] = {}
        # From the last stage to the first, whose embedding replaces the last stage's copy.
        for stage in reversed(stages):
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
            blocks_of_ranks = [rank_part.chunk(blocks, dim) for rank_part in parts]
            # Block after block, each joined from all ranks.
            shards = [rank_blocks[block] for block in range(blocks) for rank_blocks in blocks_of_ranks]
            part = torch.cat(shards, dim)
        if _is_vocabulary(name):
            part = part[: self.vocab_size]
        return part


def cut_of(name: str) -> tuple[int | None, int]:
    """Return (dimension, blocks) of `_CUTS`; (None, 1): every tensor-parallel rank has it whole."""
    for ending, cut in _CUTS.items():
        if name.endswith(ending):
            return cut
    return None, 1


def _is_vocabulary(name: str) -> bool:
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


def local_shard(name: str, whole: Tensor) -> Tensor:
    """Cut this tensor-parallel rank's part out of a whole tensor."""
    dim, num_blocks = cut_of(name)
    num_ranks = parallel_state.get_tensor_model_parallel_world_size()
    if dim is None or num_ranks == 1:
        return whole
    rank = parallel_state.get_tensor_model_parallel_rank()
    blocks = whole.chunk(num_blocks, dim)
    return torch.cat([block.chunk(num_ranks, dim)[rank] for block in blocks], dim)
