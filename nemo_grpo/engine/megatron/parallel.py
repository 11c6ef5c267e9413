"""Process groups: which rank holds which part of the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Layout:
    """How the world is divided; data parallelism takes what is left.

    Attributes: tensor, pipeline, context: sizes of the model-parallel dimensions, 1 = off.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def ranks_per_model(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context


def initialize(layout: Layout, device: torch.device, seed: int) -> None:
    """Join the processes of this launch and form megatron-core's groups; groups of this layout are kept.

    Under torchrun or Slurm (RANK and WORLD_SIZE set) the world is theirs; otherwise it is this process.
    """
    if parallel_state.model_parallel_is_initialized() and _current_layout() != layout:
        shut_down()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _current_layout() -> Layout:
    return Layout(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )


def shut_down() -> None:
    """Leave the groups; safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_rank_zero() -> bool:
    """True on the process that logs and writes; also without process groups."""
    return not dist.is_initialized() or dist.get_rank() == 0
