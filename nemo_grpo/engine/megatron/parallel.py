"""Process groups of a parallel model, and collectives over them."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from nemo_grpo.engine.megatron import cpu
from nemo_grpo.engine.megatron.optimizer import install_adam
from nemo_grpo.recipe.layout import Layout

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time that a rank waits for the others in a collective. After that the run ends with an error."""


def is_launched() -> bool:
    """True in a process that torchrun, Slurm or `engine.launch` started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def initialize(layout: Layout, device: torch.device, seed: int) -> None:
    """Connect the processes of this launch, and form megatron-core's process groups.

    With RANK and WORLD_SIZE in the environment, as under torchrun or Slurm, all launched processes join.
    Otherwise this process is alone. Groups of the same layout that exist already are kept.
    """
    cpu.install()
    install_adam()
    if device.type == "cuda":
        # megatron-core allocates on the current device.
        torch.cuda.set_device(device)
        # cuDNN's attention makes a new plan for every length, which takes longer than the attention itself.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if parallel_state.model_parallel_is_initialized():
        # A process may build policies of several layouts one after the other.
        current_sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
        )
        if current_sizes != layout.sizes:
            shut_down()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        # One process alone needs no port: it uses a store in memory.
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        world = {} if is_launched() else alone
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **world)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            # The engine does not use gloo groups besides those of NCCL.
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shut_down() -> None:
    """Leave all process groups. A second call does nothing."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def zigzag(length: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of a sequence that this context-parallel rank computes, [length / CP] int64.

    The sequence is cut into 2 CP slices. Rank r has slices r and 2 CP - 1 - r, so that causal attention costs
    every rank the same. megatron-core's rotary embedding uses the same order.

    Args:
        length: Length of the sequence, a multiple of `zigzag_multiple`.
        device: Device of the result.
    """
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    return zigzag_positions(length, size, rank, device)


def zigzag_multiple() -> int:
    """Return the multiple to which context-parallel ranks pad a sequence."""
    size = parallel_state.get_context_parallel_world_size()
    return 2 * size if size > 1 else 1


def zigzag_positions(length: int, size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of `zigzag` for a given rank of a context-parallel group of this size."""
    if size == 1:
        return torch.arange(length, device=device)
    slices = torch.arange(length, device=device).view(2 * size, -1)
    return torch.cat([slices[rank], slices[2 * size - 1 - rank]])


class _GatherSequence(torch.autograd.Function):
    """Join the slices of all context-parallel ranks in sequence order. See `gather_sequence`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sum_gradients: bool) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        length = x.shape[dim] * size
        positions = torch.cat([zigzag_positions(length, size, rank, x.device) for rank in range(size)])
        ctx.dim = dim
        ctx.sum_gradients = sum_gradients
        ctx.local_positions = zigzag(length, x.device)
        return torch.cat(parts, dim).index_select(dim, positions.argsort())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sum_gradients:
            # The sum is in place, so it needs a copy: autograd may use the same tensor elsewhere.
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        return gradient.index_select(ctx.dim, ctx.local_positions), None, None


def gather_sequence(x: Tensor, dim: int, *, replicated: bool = False) -> Tensor:
    """Gather the whole sequence along ``dim`` from the `zigzag` shares of all context-parallel ranks.

    Args:
        x: This rank's share.
        dim: Dimension of the sequence.
        replicated: True if all ranks compute the same from the result, such as a loss. Each rank's gradient
            is then complete. Otherwise the gradients are summed over the ranks.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return x
    return _GatherSequence.apply(x, dim, not replicated)


class _SumOverContext(torch.autograd.Function):
    """Sum over the context-parallel ranks, whose gradient is not summed. See `sum_over_context_parallel`."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def sum_over_context_parallel(x: Tensor) -> Tensor:
    """Sum a tensor over the context-parallel ranks.

    All ranks must compute the same from the result, so each rank's gradient is already complete.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return x
    return _SumOverContext.apply(x)


def sum_of_last_stages(x: Tensor) -> None:
    """Sum the tensors of the last pipeline stages over the data-parallel ranks, in place, for all stages.

    Context-parallel ranks have the same results already, so the sum leaves them out.
    """
    # Only the last stage has results. The broadcast replaces the zeros of the other stages.
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(x, source, group=parallel_state.get_pipeline_model_parallel_group())
    if parallel_state.get_data_parallel_world_size() > 1:
        dist.all_reduce(x, group=parallel_state.get_data_parallel_group())
