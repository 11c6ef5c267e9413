"""What may differ between a run and its continuation."""

from pathlib import Path

from nemo_grpo.dotted import leaves
from nemo_grpo.engine.checkpoint import CheckpointStore
from nemo_grpo.engine.inputs import check_inputs, data_files
from nemo_grpo.errors import UserError
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.training.run_folder import own_copy

PLACES = (
    "checkpointing.",
    "cluster.",
    "logger.",
    "nemo_grpo.engine.",
    "nemo_grpo.evaluation.",
    "nemo_grpo.export.",
    "nemo_grpo.max_failed_rewards",
    "nemo_grpo.run_name",
    "nemo_grpo.runs_dir",
    "nemo_grpo.warm_start.cache_dir",
    "policy.generation_batch_size",
    "policy.logprob_batch_size",
    "policy.make_sequence_length_divisible_by",
    "policy.megatron_cfg.activation_checkpointing",
    "policy.megatron_cfg.checkpoint.",
    "policy.megatron_cfg.context_parallel_size",
    "policy.megatron_cfg.num_layers_in_",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.sequence_parallel",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.sequence_packing.",
    "policy.train_micro_batch_size",
)
"""Keys, or beginnings of keys: where and how a run goes on, not what it computes or measures."""

MAY_CHANGE = (
    *PLACES,
    "grpo.max_num_steps",
    "grpo.max_val_samples",
    "grpo.stop_at_",
    "grpo.val_",
    "policy.generation.val_",
    "policy.megatron_cfg.scheduler.lr_decay_iters",
)
"""What else `train --resume` may change: how long a run trains, and how it is validated."""
ANOTHER_RUN = "start another nemo_grpo.run_name"


def check_same_run(
    recipe: Recipe,
    resolved: Path,
    may_change: tuple[str, ...] = MAY_CHANGE,
    remedy: str = ANOTHER_RUN,
) -> Recipe | None:
    """Refuse to continue a run with a recipe that computes something else.

    Args:    resolved: the run's recipe.resolved.yaml; nothing is checked if it is not there.
             may_change: keys, or beginnings of keys.  remedy: other than undoing the change.
    Returns: what it holds.
    Raises:  UserError: naming the keys with both values, or the file of data or own code that has changed; or
             the checkpoints are where the run does not look.
    """
    if not resolved.exists():
        return None
    first = recipe if resolved.read_text() == recipe.to_yaml() else load_recipe(resolved)
    before, now = dict(leaves(first.written())), dict(leaves(recipe.written()))
    if now["policy.precision"] == "auto":
        del before["policy.precision"], now["policy.precision"]  # the run keeps its own
    changed = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(may_change)
    ]
    if changed:
        raise UserError(
            f"another recipe than {resolved.parent} was trained with: {'; '.join(changed)}; undo that, or "
            f"{remedy}"
        )
    for name, text in recipe.own_files.items():
        copy = own_copy(resolved.parent, name)
        if copy.is_file() and copy.read_text(encoding="utf-8") != text:
            raise UserError(
                f"another {name} than {resolved.parent} was trained with, which {copy} holds; undo the "
                f"change, or {remedy}"
            )
    check_inputs(resolved.parent, data_files(recipe), remedy)
    left = CheckpointStore(first.checkpoint_dir).latest()
    if left is not None and CheckpointStore(recipe.checkpoint_dir).latest() is None:
        raise UserError(
            f"--resume: checkpointing.checkpoint_dir={recipe.checkpoint_dir} has no checkpoint, "
            f"{first.checkpoint_dir} has {left.name}; move them, or undo that"
        )
    return first
