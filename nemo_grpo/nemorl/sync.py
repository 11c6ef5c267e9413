"""NeMo-RL's GRPO trainers in the driver: synchronous, also on the data plane, and asynchronous.

They run unchanged, with the variant's loss, estimator, sampling and policy in place of NeMo-RL's own.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.checkpoints import SideFiles, carried_statistics
from nemo_grpo.nemorl.exit_status import finished_steps, last_step
from nemo_grpo.nemorl.host_api import GRPO, GRPO_SYNC
from nemo_grpo.nemorl.loss import loss_of
from nemo_grpo.nemorl.policy import policy_factory
from nemo_grpo.nemorl.sampling import dynamic_sampling_for
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.nemorl.trainer import Training, rollout_data, trained_environments, validation_sets
from nemo_grpo.run.diagnostics import StepDiagnostics
from nemo_grpo.run.folder import RunFolder
from nemo_grpo.support.dotted import value_of

if TYPE_CHECKING:
    from nemo_grpo.nemorl.compat import Parts
    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.nemorl.trainer import Started


def set_up(run: ClusterRun, started: Started) -> Training:
    """Let NeMo-RL set up its workers, and put our parts into its trainer."""
    recipe = run.recipe
    data = rollout_data(run, started)
    dataset, val_dataset, *_ = data
    context = StepContext()
    result = compat.import_name(f"{GRPO}:setup")(
        run.master_config,
        started.tokenizer,
        dataset,
        val_dataset,
        processor=started.processor,
        policy_factory=policy_factory(run, context),
    )
    parts = compat.unpack_setup(result)
    last = last_step(run, parts)
    estimator = None
    if not recipe.loss_fn.is_stock:
        parts = parts._replace(loss_fn=loss_of(run))
        estimator = install(run, context, parts, started.tokenizer)
    environments = trained_environments(run, data, parts)
    return Training(
        parts=parts,
        train=partial(train, run, parts, environments, started.tokenizer, started.processor),
        environments=environments,
        side_files=SideFiles(started.encoder, started.hf_config, estimator),
        last_step=last,
        validation_sets=validation_sets(run, started, data),
    )


def install(run: ClusterRun, context: StepContext, parts: Parts, tokenizer: Any) -> VariantEstimator:
    """Put the variant's estimator and sampling where NeMo-RL's trainers look for theirs.

    Returns:
        The estimator.
    """
    recipe = run.recipe
    period = recipe.nemo_grpo.engine.diagnostics_period
    estimator = VariantEstimator.of(
        recipe,
        context,
        step=finished_steps(parts),
        diagnostics=StepDiagnostics(RunFolder(recipe.run_dir), period, tokenizer.decode),
        folds=recipe.uses_data_plane,
        carried=carried_statistics(recipe.loss_fn, parts.checkpointer),
    )

    def create_advantage_estimator(_master_config: Any) -> VariantEstimator:
        return estimator

    sample = dynamic_sampling_for(recipe.loss_fn, context)
    compat.rebind("estimator", lambda _original: create_advantage_estimator)
    compat.rebind("sampling", lambda _original: sample)
    return estimator


def train(
    run: ClusterRun, parts: Parts, environments: list[Any], tokenizer: Any, processor: Any = None
) -> None:
    """Run NeMo-RL's trainer.

    Args:
        run: chooses the trainer.
        parts: the objects that NeMo-RL's set-up returned, with our loss in place of its own.
        environments: {task: environment} of training and of validation.
        tokenizer: the model's.
        processor: the model's; None without images.
    """
    name = f"{GRPO}:grpo_train"
    further: dict[str, Any] = {}
    if run.is_async:
        name = f"{GRPO}:async_grpo_train"
        max_age = value_of(run.master_config, "grpo.async_grpo.max_trajectory_age_steps", 1)
        further = {
            "max_trajectory_age_steps": max_age,
            "teacher_worker_groups": parts.teacher_worker_groups,
            "alias_to_group_alias": parts.alias_to_group_alias,
        }
    if run.recipe.uses_data_plane:
        name = f"{GRPO_SYNC}:grpo_train_sync"
    trainer = compat.import_name(name)
    # 0.7.0's trainers have no processor.
    if processor is not None and "processor" in inspect.signature(trainer).parameters:
        further["processor"] = processor
    trainer(
        parts.policy,
        parts.policy_generation,
        parts.dataloader,
        parts.val_dataloader,
        tokenizer,
        parts.loss_fn,
        *environments,
        parts.logger,
        parts.checkpointer,
        parts.grpo_save_state,
        parts.master_config,
        **further,
    )
