"""megatron-core's data-parallel wrapper, optimizer and schedule, from the recipe's sections."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, clip_grads, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.optim.adamw import adamw

from nemo_grpo.recipe.megatron_sections import MegatronOptimizer, MegatronScheduler

# Optimizer state that is saved with these settings can be loaded at any layout. Megatron-Bridge and NeMo-RL
# pass the same ones.
SHARDING = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def with_optimizer(
    model: GPTModel, config: TransformerConfig, section: MegatronOptimizer, schedule: MegatronScheduler
) -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """Wrap a model for data parallelism, and build the optimizer of its trainable parameters.

    Args:
        model: Model with its weights loaded: the optimizer of a 16-bit model copies them to float32.
        config: megatron-core's configuration of the model.
        section: Section of the recipe for the optimizer.
        schedule: Section of the recipe for the schedule, with a number for ``lr_decay_iters``.

    Returns:
        (wrapped model, megatron-core's optimizer, its schedule).
    """
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=section.use_distributed_optimizer, grad_reduce_in_fp32=True
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.adam_beta1,
        adam_beta2=section.adam_beta2,
        adam_eps=section.adam_eps,
        clip_grad=section.clip_grad,
        bf16=config.bf16,
        use_distributed_optimizer=section.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], use_gloo_process_groups=False)
    for part in _parts(optimizer):
        if isinstance(part.optimizer, FusedLayoutAdam):
            # The state must exist even for a checkpoint before the first update.
            part.optimizer.fill_state()
    return wrapped, optimizer, _schedule(optimizer, section, schedule)


def clip_and_step(optimizer: Any, grad_norm: float) -> None:
    """Clip the gradients and step, after `prepare_grads`. The known norm is not computed again.

    Args:
        optimizer: megatron-core's optimizer.
        grad_norm: Norm of the gradients before clipping.
    """
    for part in _parts(optimizer):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grads.clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm)
    optimizer.step_with_ready_grads()


def _parts(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that megatron-core's optimizer consists of, which may be itself alone."""
    yield from getattr(optimizer, "chained_optimizers", [optimizer])


def _schedule(
    optimizer: Any, section: MegatronOptimizer, schedule: MegatronScheduler
) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=schedule.lr_decay_iters,
        lr_decay_style=schedule.lr_decay_style,
        # On resume the recipe's schedule replaces the checkpoint's, because a resumed run may become longer.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=schedule.lr_decay_iters,
        wd_incr_style="constant",
    )


def install_adam() -> None:
    """Make megatron-core use this module's Adam, norm and scaling if it found no GPU library for them."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.Adam = FusedLayoutAdam
    distrib_optimizer.Adam = FusedLayoutAdam
    # `FusedLayoutAdam` has the same state as Apex's Adam, so megatron-core must save and load it like that.
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    clip_grads.l2_norm_impl = _l2_norm
    clip_grads.multi_tensor_scale_impl = _scale
    megatron_optimizer.optimizer.multi_tensor_scale_impl = _scale


def _l2_norm(
    _chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    """Compute the norm of all tensors, [1], without megatron-core's wait for the GPU at every tensor."""
    return torch.stack(torch._foreach_norm(tensors[0])).norm()[None], None


def _scale(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], factor: float | Tensor) -> None:
    """Write the first list of tensors times a factor into the second list, without megatron-core's copy."""
    sources, targets = tensors
    with torch.no_grad():
        # The two lists may be the same one: clipping scales gradients in place.
        torch._foreach_copy_(targets, sources)
        if factor != 1:
            torch._foreach_mul_(targets, factor)


class FusedLayoutAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019), by torch's kernel.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    The state is that of Transformer Engine's and Apex's FusedAdam: an integer step in the parameter group,
    and two moments per parameter. megatron-core's distributed optimizer saves and loads this form, and fails
    on torch.optim.AdamW, which has a step tensor per parameter. So checkpoints are the same with and without
    a GPU.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_fused_kernel_options: Any,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode=False: only decoupled weight decay is implemented; use True")
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings | {"bias_correction": True})

    def fill_state(self) -> None:
        """Set the moments of every parameter that has none to zero."""
        for group in self.param_groups:
            group.setdefault("step", 0)
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state:
                state[moment] = torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, in one pass over it. The result is reproducible."""
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step") or 0) + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            # adamw increments the steps that it gets, so they are one behind. torch.tensor would wait for the
            # GPU, torch.full does not.
            steps = [torch.full((), group["step"] - 1.0, device=p.device) for p in parameters]
            # Only amsgrad has maxima of the second moments.
            max_second_moments: list[Tensor] = []
            beta1, beta2 = group["betas"]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                max_second_moments,
                steps,
                fused=True,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
