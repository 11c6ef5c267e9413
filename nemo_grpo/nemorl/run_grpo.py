"""``python -m nemo_grpo.nemorl.run_grpo --config RECIPE [key=value ...]``: train a cluster recipe on NeMo-RL.

The driver of a Ray cluster. It chooses NeMo-RL's trainer (`TRAINERS`), lets its module set it up, and runs it
with our callbacks.
"""

import argparse
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nemo_grpo.nemorl import compat, sft, single_controller, sync
from nemo_grpo.nemorl.added_metrics import DrawnRollouts, RolloutCheck, ValidationSets
from nemo_grpo.nemorl.callbacks import Callback, RunRecord, calling_back, locked_run_folders
from nemo_grpo.nemorl.compat import Parts
from nemo_grpo.nemorl.config import ClusterRun, load_run
from nemo_grpo.nemorl.exit_status import exit_code, stop_after_step
from nemo_grpo.nemorl.host_api import GRPO
from nemo_grpo.nemorl.rewards import RewardMetrics
from nemo_grpo.nemorl.stall import StallDump
from nemo_grpo.nemorl.trainer import Training, start
from nemo_grpo.nemorl.workarounds.ray_reconnect import forbid_reconnects
from nemo_grpo.support.errors import EXIT_USAGE, UserError

log = logging.getLogger(__name__)

TRAINERS = {"sync": sync.set_up, "sft": sft.set_up, "single_controller": single_controller.set_up}
"""`ClusterRun.trainer` -> the function that sets it up."""


def main(argv: list[str] | None = None) -> int:
    """Run the driver.

    Returns:
        0 if training finished; 1 if it failed; 2 if the recipe is refused; 75 if it was told to stop and
        saved a checkpoint: start it again to resume.
    """
    parser = argparse.ArgumentParser(prog="python -m nemo_grpo.nemorl.run_grpo", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="recipe with nemo_grpo.target: cluster")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        with ExitStack() as until_the_end:
            try:
                compat.check()
                run = load_run(arguments.config, arguments.overrides)
                until_the_end.enter_context(locked_run_folders(run.recipe))
                # Inside this `try`, because it also refuses recipes: for a missing file or too few problems.
                training = set_up(run)
            except UserError as error:
                sys.stderr.write(f"error: {error}\n")
                return EXIT_USAGE
            return train(run, training)
    except Exception:
        # Exit code 1 lets a job try again, because the error may not recur. It is caught here, not by the
        # interpreter: its traceback keeps NeMo-RL's workers alive, and freeing them after Ray has shut down
        # hangs.
        log.exception("the driver failed")
        return 1


def set_up(run: ClusterRun) -> Training:
    """Set up the trainer that the recipe asks for."""
    return TRAINERS[run.trainer](run, start(run))


def train(run: ClusterRun, training: Training) -> int:
    """Train to the end or to a requested stop; returns the exit code."""
    recipe = run.recipe
    parts = training.parts
    logs = Path(run.master_config.logger["log_dir"])
    callbacks: list[Callback] = [
        DrawnRollouts(),
        RolloutCheck(recipe),
        RewardMetrics(training.environments),
        ValidationSets(training.validation_sets, logs, recipe.grpo.val_num_generations_per_prompt),
    ]
    try:
        with ExitStack() as until_the_end:
            if not training.watches_itself:
                stalls = StallDump()
                callbacks.append(stalls)
                until_the_end.enter_context(stalls.watching())
            ending = until_the_end.enter_context(stop_after_step(recipe.grpo))
            callbacks += [RunRecord(recipe), training.side_files, ending]
            until_the_end.enter_context(calling_back(callbacks, parts.logger, parts.checkpointer))
            training.train()
    finally:
        close(parts, training.environments)
    return exit_code(run, parts, training.last_step, ending)


def close(parts: Parts, environments: list[Any]) -> None:
    """Wait for the last checkpoint, then end environments and generation, as NeMo-RL's own driver does."""
    # 0.7.0 saves synchronously, so its checkpoint manager has nothing to wait for.
    if hasattr(parts.checkpointer, "shutdown"):
        parts.checkpointer.shutdown()
    if compat.has_name(f"{GRPO}:shutdown_environments"):
        compat.import_name(f"{GRPO}:shutdown_environments")(*environments)
    try:
        parts.policy_generation.shutdown()
    except Exception:
        log.exception("generation did not shut down")


if __name__ == "__main__":
    forbid_reconnects()
    sys.exit(main())
