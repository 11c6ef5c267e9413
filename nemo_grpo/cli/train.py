"""``nemo-grpo train``."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from nemo_grpo.cli.recipe import Overrides

log = logging.getLogger(__name__)


def train(
    recipe: Annotated[Path, typer.Argument(help="As recipes/quickstart.yaml.", show_default=False)],
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run from its newest checkpoint.")
    ] = False,
) -> None:
    """Train a policy on this machine.

    Everything of the run goes into runs/<nemo_grpo.run_name>/: metrics, samples, plots, checkpoints, and at
    the end the model as a Hugging Face folder.

    Examples:

      nemo-grpo train recipes/quickstart.yaml

      nemo-grpo train recipes/quickstart.yaml loss_fn.variant=gpg nemo_grpo.run_name=gpg grpo.max_num_steps=20

    Exit codes: 0 finished; 2 the input was refused and nothing was created; 75 stopped by SIGINT, SIGTERM or
    SIGUSR1 with a checkpoint saved, run again with --resume; 1 anything else.
    """
    from nemo_grpo.recipe import advice, load_recipe

    loaded = load_recipe(recipe, overrides or [])  # before the imports below, which take seconds
    for sentence in advice(loaded):
        log.warning("%s", sentence)

    from nemo_grpo.engine.run import run_recipe

    sys.exit(run_recipe(loaded, sys.argv[1:], resume=resume))
