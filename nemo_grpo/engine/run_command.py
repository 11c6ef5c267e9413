"""What ``nemo-grpo train`` does once the recipe is read."""

from __future__ import annotations

import logging

from nemo_grpo.diagnostics.report import plot_run
from nemo_grpo.engine.signals import EXIT_INTERRUPTED
from nemo_grpo.engine.trainer import Trainer
from nemo_grpo.recipe import Recipe

log = logging.getLogger(__name__)


def run_recipe(recipe: Recipe, *, resume: bool) -> int:
    """Train the recipe and draw its report.

    Returns: the process's exit code.
    Raises:  UserError: the machine's state is refused; nothing was created then.
    """
    for sentence in recipe.advice():
        log.warning("%s", sentence)
    finished = Trainer(recipe, resume=resume).train()
    plot_run(recipe.run_dir)
    log.info("run folder: %s", recipe.run_dir)
    return 0 if finished else EXIT_INTERRUPTED
