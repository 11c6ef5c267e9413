"""megatron-core's data-parallel wrapper, optimizer and schedule, from the recipe's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_grpo.engine.megatron.adam import FusedLayoutAdam

# What Megatron-Bridge and NeMo-RL pass: optimizer state that any later layout can load.
SHARDING = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and its schedule, in optimizer steps.

    Attributes: names and meaning as in the recipe's policy.megatron_cfg.optimizer and .scheduler.
    """

    lr: float
    min_lr: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = True
    lr_decay_style: str = "constant"
    lr_decay_iters: int = 1000
    lr_warmup_iters: int = 0
    lr_warmup_init: float = 0.0


def with_optimizer(
    model: GPTModel, config: TransformerConfig, settings: OptimizerSettings
) -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """Wrap a model that has its weights, and build the optimizer on its trainable parameters.

    Returns: (wrapped model, megatron-core's optimizer, its schedule).
    """
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=settings.use_distributed_optimizer, grad_reduce_in_fp32=True
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        use_distributed_optimizer=settings.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], use_gloo_process_groups=False)
    _fill_adam_state(optimizer)
    return wrapped, optimizer, _schedule(optimizer, settings)


def _schedule(optimizer: Any, settings: OptimizerSettings) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_iters,
        lr_decay_style=settings.lr_decay_style,
        override_opt_param_scheduler=True,  # on resume the recipe's schedule holds, not the checkpoint's
        use_checkpoint_opt_param_scheduler=False,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.lr_decay_iters,
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
