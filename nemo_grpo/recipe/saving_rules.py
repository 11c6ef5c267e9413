"""Rules about NeMo-RL's checkpoints and exports: when, where, which are kept. See `cluster_rules`."""

from collections.abc import Iterator

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.support.errors import did_you_mean

TRAINING_METRICS = (
    *("loss", "grad_norm", "lr", "wd", "reward", "mean_prompt_length", "total_num_tokens"),
    *("advantages/mean", "advantages/max", "advantages/min", "global_valid_seqs", "global_valid_toks"),
    *("mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "mean_total_tokens_per_sample"),
)
"""Metrics of each training step of NeMo-RL: algorithms/grpo.py, experience/rollouts.py of both versions."""


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


@rule(Scope.ADVICE)
def training_metric_is_one_of_every_run(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL raises an error at the first save if the step has no such metric (algorithms/grpo.py)."""
    name = recipe.checkpointing.metric_name or ""
    metric = name.removeprefix("train:")
    if recipe.nemo_grpo.target == "cluster" and metric != name and metric not in TRAINING_METRICS:
        yield (
            f"checkpointing.metric_name={name} is not a metric of every run, and NeMo-RL stops at the first "
            f"save if a step lacks it{did_you_mean(metric, TRAINING_METRICS)}"
        )


@rule(Scope.EMBEDDED)
def checkpoints_are_ranked_by_a_validation(recipe: Recipe) -> Iterator[str]:
    name = recipe.checkpointing.metric_name or ""
    if name.startswith("train:"):
        yield (
            f"checkpointing.metric_name={name}: the embedded engine ranks checkpoints by validation metrics "
            "only; use val:accuracy, or null"
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


@rule(Scope.CARE)
def checkpoints_are_saved_at_validations(recipe: Recipe) -> Iterator[str]:
    metric, save = recipe.checkpointing.metric_name, recipe.checkpointing.save_period
    val = recipe.grpo.val_period
    if not recipe.checkpointing.enabled:
        return
    if metric is not None and metric.startswith("val:") and (val <= 0 or save % val):
        yield (
            f"checkpointing.save_period={save} is not a multiple of grpo.val_period={val}: a checkpoint "
            f"without {metric} ranks last and is deleted; make it one, or set checkpointing.metric_name to "
            "null or train:reward"
        )
