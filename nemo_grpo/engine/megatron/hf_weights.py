"""Conversion between this rank's parameters and whole tensors with Hugging Face names, at any layout.

The names and shapes are translated by the converters' tables (`nemo_grpo.models`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from nemo_grpo.models import family_for
from nemo_grpo.models.family import local_name

# Ending of a parameter's name -> (dimension along which the tensor-parallel ranks cut the parameter, number
# of blocks that are stacked in it). Each block is cut separately: gate and up projections are two blocks.
_CUTS = {
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_qkv.bias": (0, 1),
    "linear_fc1.weight": (0, 2),
    "linear_proj.weight": (1, 1),
    "linear_fc2.weight": (1, 1),
    # LoRA's A (linear_in) is cut if the layer's input is, B (linear_out) if its output is.
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
        """Mark the parameters that are cut over the tensor-parallel ranks.

        The gradient norm counts a parameter without the mark on one rank only. megatron-core sets the mark
        while it initialises weights, which is skipped here.
        """
        for name, parameter in self.local_parameters():
            dim, blocks = cut_of(name)
            if dim is not None and not getattr(parameter, "tensor_model_parallel", False):
                # megatron-core's own setter refuses a parameter that already has one of the three attributes.
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim = dim  # type: ignore[attr-defined]
                parameter.partition_stride = blocks  # type: ignore[attr-defined]

    @torch.no_grad()
    def load(self, hf_tensors: Mapping[str, Tensor]) -> None:
        """Copy Hugging Face tensors into the parameters. Every rank calls it with all tensors."""
        whole_tensors = dict(self.family.to_megatron(hf_tensors))
        embedding = whole_tensors["embedding.word_embeddings.weight"]
        for name, parameter in self.local_parameters():
            # With tied weights the last pipeline stage's output layer is a copy of the embedding.
            whole = whole_tensors.get(local_name(name) or name, embedding)
            # The vocabulary is padded with rows of zeros, so that the ranks have equal numbers of rows.
            if _is_vocabulary(name):
                num_rows = parameter.shape[0] * parallel_state.get_tensor_model_parallel_world_size()
                whole = torch.nn.functional.pad(whole, (0, 0, 0, num_rows - whole.shape[0]))
            parameter.copy_(local_shard(name, whole))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face name and the whole tensor of every weight, on every rank.

        The tensors are views of the parameters where that is possible.
        """
        local = {name: parameter.detach() for name, parameter in self.local_parameters()}
        yield from self.family.to_hf(self.gather(local))

    def local_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the name and the parameter of this rank's part of the model.

        The name is megatron-core's, with the number of the layer in the whole model.
        """
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
        """Gather whole tensors from the parts on all ranks. All ranks of a replica call it together."""
        whole = {name: self._gather_tensor_parallel(name, part) for name, part in local.items()}
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return whole
        group = parallel_state.get_pipeline_model_parallel_group()
        stages: list[Any] = [None] * group.size()
        dist.all_gather_object(stages, {name: tensor.cpu() for name, tensor in whole.items()}, group=group)
        merged: dict[str, Tensor] = {}
        # The first stage is merged last, because its embedding must replace the last stage's copy.
        for stage in reversed(stages):
            merged |= stage
        if "output_layer.weight" in merged and self.model.share_embeddings_and_output_weights:
            del merged["output_layer.weight"]
        return merged

    def _gather_tensor_parallel(self, name: str, part: Tensor) -> Tensor:
        """Join the parts of a parameter on the tensor-parallel ranks, and remove the vocabulary's padding."""
        dim, blocks = cut_of(name)
        group = parallel_state.get_tensor_model_parallel_group()
        if dim is not None and group.size() > 1:
            parts = [torch.empty_like(part) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
            blocks_of_ranks = [rank_part.chunk(blocks, dim) for rank_part in parts]
            # The whole tensor has block after block, and each block has the parts of all ranks.
            shards = [rank_blocks[block] for block in range(blocks) for rank_blocks in blocks_of_ranks]
            part = torch.cat(shards, dim)
        if _is_vocabulary(name):
            part = part[: self.vocab_size]
        return part


def cut_of(name: str) -> tuple[int | None, int]:
    """Return the entry of `_CUTS` for a parameter; (None, 1) if every tensor-parallel rank has it whole."""
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
