"""megatron-core's data-parallel wrapper, optimizer and schedule, from the recipe's sections."""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_grpo.engine.megatron.adam import FusedLayoutAdam
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer, MegatronScheduler

# What Megatron-Bridge and NeMo-RL pass: optimizer state that any later layout can load.
SHARDING = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def with_optimizer(
    model: GPTModel, config: TransformerConfig, section: MegatronOptimizer, schedule: MegatronScheduler
) -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """Wrap a model that has its weights, and build the optimizer on its trainable parameters.

    Args:    section, schedule: the recipe's; ``lr_decay_iters`` is a number.
    Returns: (wrapped model, megatron-core's optimizer, its schedule).
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
    _fill_adam_state(optimizer)
    return wrapped, optimizer, _schedule(optimizer, section, schedule)


def clip_and_step(optimizer: Any, grad_norm: float) -> None:
    """Finish the optimizer's step after `prepare_grads`, without computing the norm once more."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grads.clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm)
    optimizer.step_with_ready_grads()


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
        override_opt_param_scheduler=True,  # on resume the recipe's schedule holds, not the checkpoint's
        use_checkpoint_opt_param_scheduler=False,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=schedule.lr_decay_iters,
        wd_incr_style="constant",
    )


def _fill_adam_state(optimizer: Any) -> None:
    """Zero moments for every parameter, so that a checkpoint before the first update has them too."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if not isinstance(inner, FusedLayoutAdam):
            continue
        for group in inner.param_groups:
            group.setdefault("step", 0)
            for parameter in group["params"]:
                for moment in ("exp_avg", "exp_avg_sq"):
                    inner.state[parameter].setdefault(moment, torch.zeros_like(parameter))
