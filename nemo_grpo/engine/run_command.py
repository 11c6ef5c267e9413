"""What ``nemo-grpo train`` does once the recipe is read."""

import logging
from collections.abc import Sequence

from nemo_grpo.engine.launch import launch
from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.saving import TrainingAborted
from nemo_grpo.engine.supervised import SupervisedTrainer
from nemo_grpo.engine.trainer import Trainer, check
from nemo_grpo.recipe import Recipe
from nemo_grpo.tasks.retriever import RetrieverError
from nemo_grpo.tasks.scoring import RewardsFailed
from nemo_grpo.training.signals import EXIT_INTERRUPTED

log = logging.getLogger(__name__)


def run_recipe(recipe: Recipe, arguments: Sequence[str], *, resume: bool) -> int:
    """Train the recipe on as many ranks as it asks for, and draw its report.

    Args:    arguments: this command line, for the ranks.

    Returns: the process's exit code.
    Raises:  UserError: the machine's state is refused; nothing was created then.
    """
    if recipe.world_size > 1 and not parallel.is_launched():
        check(recipe, resume=resume)  # once, before any rank starts
        return launch(arguments, recipe.world_size)
    kind = SupervisedTrainer if recipe.loss_fn.learns_from_demonstrations else Trainer
    trainer = kind(recipe, resume=resume)
    try:
        finished = trainer.train()
    except (TrainingAborted, RewardsFailed, RetrieverError, FloatingPointError) as error:
        log.error("%s", error)
        return 1
    finally:
        parallel.shut_down()
    if trainer.run.leads:
        from nemo_grpo.diagnostics.report import plot_run  # draws, which the other ranks need not load

        try:
            plot_run(recipe.run_dir)
        except OSError as error:
            log.warning("no report: %s; `nemo-grpo report %s` draws it", error, recipe.run_dir)
        log.info("run folder: %s", recipe.run_dir)
    if finished:
        return 0
    return EXIT_INTERRUPTED if recipe.checkpointing.enabled else 1  # nothing to go on from
