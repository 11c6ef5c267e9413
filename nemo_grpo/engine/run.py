"""Training of a recipe on this machine, from its checks to its report."""

import logging
from collections.abc import Sequence

from nemo_grpo.engine.checks import check
from nemo_grpo.engine.launch import launch
from nemo_grpo.engine.loop import train
from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.new_model import starting_model
from nemo_grpo.engine.saving import TrainingAborted
from nemo_grpo.engine.setup import set_up
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.signals import code_when_stopped
from nemo_grpo.tasks.retriever import RetrieverError
from nemo_grpo.tasks.scoring import RewardsFailed

log = logging.getLogger(__name__)


def run_recipe(recipe: Recipe, arguments: Sequence[str], *, resume: bool) -> int:
    """Train the recipe on as many ranks as it asks for, and draw its report.

    Args:
        recipe: Recipe to train.
        arguments: Arguments of this command, with which each rank's process is started.
        resume: True to continue from the newest checkpoint.

    Returns:
        Exit code of the process.
    """
    try:
        # The launching process checks, too, so that a refusal is printed only once. Each rank then checks its
        # own machine.
        start = check(recipe, resume=resume)
        if recipe.world_size > 1 and not parallel.is_launched():
            return launch(arguments, recipe.world_size)
        with starting_model(recipe, start.task) as source:
            run = set_up(recipe, source, start, resume=resume)
            finished = train(run)
    except (TrainingAborted, RewardsFailed, RetrieverError, FloatingPointError) as error:
        log.error("%s", error)
        return 1
    finally:
        parallel.shut_down()
    if run.recorder.folder.leads:
        draw_report(recipe)
        log.info("run folder: %s", recipe.run_dir)
    if finished:
        return 0
    has_checkpoints = recipe.checkpointing.enabled
    remedy = "add --resume to continue"
    return code_when_stopped(run.learner.state.step, has_checkpoints=has_checkpoints, remedy=remedy)


def draw_report(recipe: Recipe) -> None:
    """Draw the report of a run. If it cannot be written, that is logged, and the run still counts as done."""
    # Imported late: it loads the plotting library, which the other ranks do not need.
    from nemo_grpo.report.report import plot_run

    try:
        plot_run(recipe.run_dir)
    except OSError as error:
        log.warning("no report: %s; `nemo-grpo report %s` draws it", error, recipe.run_dir)
