"""Rules about NeMo-RL's checkpoints and exports: when, where, which are kept. See `cluster_rules`."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule


@rule(Scope.CLUSTER)
def lora_is_not_exported_at_every_save(recipe: Recipe) -> Iterator[str]:
    if recipe.nemo_grpo.export.at_every_save and recipe.policy.megatron_cfg.lora_in_use:
        yield (
            "nemo_grpo.export.at_every_save=true: adapters are merged with the base model's files, which "
            "only you know; set it to false and run nemo-grpo convert megatron-to-hf --lora merge"
        )


@rule(Scope.CLUSTER)
def number_of_checkpoints_is_set(recipe: Recipe) -> Iterator[str]:
    if recipe.checkpointing.keep_top_k is None:
        yield (
            "checkpointing.keep_top_k=null: NeMo-RL wants a number; for all, give as many as the run saves"
        )


@rule(Scope.CLUSTER)
def checkpoint_metric_has_a_prefix(recipe: Recipe) -> Iterator[str]:
    name = recipe.checkpointing.metric_name
    if name is not None and not name.startswith(("val:", "train:")):
        yield (
            f"checkpointing.metric_name={name} must start with val: or train:, or NeMo-RL stops at the first "
            f"save; use val:{name.rpartition('/')[2]}"
        )


@rule(Scope.CLUSTER)
def output_folders_are_set(recipe: Recipe) -> Iterator[str]:
    folders = {
        "checkpointing.checkpoint_dir": recipe.checkpointing.checkpoint_dir,
        "logger.log_dir": recipe.logger.log_dir,
    }
    for key, folder in folders.items():
        if folder is None:
            yield f"{key}=null: NeMo-RL needs a folder; name one that every node sees"


@rule(Scope.CLUSTER)
def checkpoints_are_saved_at_validations(recipe: Recipe) -> Iterator[str]:
    metric, save = recipe.checkpointing.metric_name, recipe.checkpointing.save_period
    val = recipe.grpo.val_period
    if metric is not None and metric.startswith("val:") and (val <= 0 or save % val):
        yield (
            f"checkpointing.save_period={save} is not a multiple of grpo.val_period={val}: a checkpoint "
            f"without {metric} ranks last and is deleted; make it one, or set checkpointing.metric_name to "
            "null or train:reward"
        )
