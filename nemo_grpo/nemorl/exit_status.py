"""Exit code of the driver: NeMo-RL's trainers return without saying why, so `Ending` notes the reasons.

A signal acts like NeMo-RL's own time limit, at which it saves and returns. The asynchronous trainer also
returns after errors, which it only prints, so a return alone does not mean success.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_grpo.nemorl.callbacks import Callback
from nemo_grpo.nemorl.compat import Parts, rebound
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.recipe.sections import GRPOSection
from nemo_grpo.run.signals import StopRequest, code_when_stopped, stop_on_signals
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

log = logging.getLogger(__name__)

LAST_PREFIX = "timing/train"
"""Prefix of every trainer's last metrics of a step."""
ENDLESS = ("grpo.async_grpo.enabled", "data.use_multiple_dataloader")
"""Keys with which NeMo-RL goes through the data again until grpo.max_num_steps."""
SEVERAL = "with grpo.use_dynamic_sampling a step takes several batches"
SPARE = "async_rl.rollout_failure kept prompts in reserve, or dropped some"
"""Reasons for which the data may end early without an error; the single controller raises its errors."""


class Ending(Callback):
    """Reasons for which the trainer may have returned, and its progress.

    Attributes: request: a signal.  happened: the trainer was told to save and return, by a signal or by
        checkpoint_must_save_by.  reached_threshold: validation reached stop_at_validation_threshold.
        last_step: the newest step that was trained, saved and logged.
    """

    def __init__(self, request: StopRequest, grpo: GRPOSection) -> None:
        self.request, self.grpo = request, grpo
        self.happened = self.reached_threshold = False
        self.last_step = 0

    def on_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        """Note the end of a step, and a validation that reaches the threshold."""
        if prefix == LAST_PREFIX:
            self.last_step = step
        if prefix == "validation":
            row = {f"{prefix}/{name}": value for name, value in metrics.items()}
            self.reached_threshold |= self.grpo.is_goal(row)


@contextmanager
def stop_after_step(grpo: GRPOSection) -> Iterator[Ending]:
    """Within the block SIGUSR1, SIGTERM and SIGINT end the training after its step, with a checkpoint.

    Every trainer asks `TimeoutChecker.check_save` once per step, saves if it says so, and returns.

    Args:   grpo: the recipe's section.
    Yields: a callback for NeMo-RL's logger.
    """

    def asked(theirs: Callable[..., Any]) -> Callable[..., bool]:
        def check_save(*arguments: Any, **named: Any) -> bool:
            due = bool(theirs(*arguments, **named)) or (bool(ending.request) and not ending.happened)
            ending.happened |= due
            return due

        return check_save

    with stop_on_signals() as request, rebound("stop", asked):
        ending = Ending(request, grpo)
        yield ending


def finished_steps(parts: Parts) -> int:
    """Count the steps already done in the checkpoint that NeMo-RL resumes from.

    Synchronous training counts them in total_steps, asynchronous training in current_step alone.
    """
    state = parts.grpo_save_state
    return max(int(value_of(state, name, 0)) for name in ("total_steps", "current_step"))


def last_step(run: ClusterRun, parts: Parts) -> int:
    """Find the step at which training is complete: max_num_steps, or the end of NeMo-RL's own data."""
    grpo, state, config = run.recipe.grpo, parts.grpo_save_state, parts.master_config
    if any(value_of(config, key, False) for key in ENDLESS):
        return grpo.max_num_steps
    num_epochs, epoch = value_of(config, "grpo.max_num_epochs", 1), int(value_of(state, "current_epoch", 0))
    left = grpo.max_num_steps - finished_steps(parts)
    if run.recipe.has_single_controller:  # whose current_step counts all steps
        epoch = 0
    possible = (num_epochs - epoch) * len(parts.dataloader) - int(value_of(state, "current_step", 0))
    if possible < left and run.recipe.nemo_grpo.task is None:
        log.info("grpo.max_num_epochs=%s ends training after %d more steps", num_epochs, max(possible, 0))
        return grpo.max_num_steps - left + max(possible, 0)
    if possible < left:
        end = finished_steps(parts) + max(possible, 0)
        raise UserError(
            f"grpo.max_num_epochs={num_epochs}: {left} steps remain until grpo.max_num_steps="
            f"{grpo.max_num_steps}, but the data ends after {max(possible, 0)} ({len(parts.dataloader)} per "
            f"epoch, {epoch} epochs done); raise it, or set the steps to {end}"
        )
    return grpo.max_num_steps


def exit_code(run: ClusterRun, parts: Parts, wanted: int, ending: Ending) -> int:
    """Choose the driver's exit code.

    An asynchronous trainer that returns early without a known reason has printed its error.

    Args: wanted: the step at which training is complete.
    """
    done = max(finished_steps(parts), ending.last_step)
    if done >= wanted:
        return 0
    if ending.reached_threshold:
        log.info("stopped after step %d: validation reached grpo.stop_at_validation_threshold", done)
        return 0
    grpo = run.recipe.grpo
    takes_more = grpo.use_dynamic_sampling and not grpo.is_async
    if not ending.happened and (takes_more or run.recipe.has_single_controller):
        log.warning(
            "the data ended after step %d of %d: %s, and grpo.max_num_epochs=%s are over; raise it to train "
            "on. Steps after the newest checkpoint are lost",
            *(done, wanted, SEVERAL if takes_more else SPARE),
            value_of(parts.master_config, "grpo.max_num_epochs", 1),
        )
        return 0 if done else 1
    if not ending.happened:
        log.error("the trainer returned after step %d of %d; its own messages give the reason", done, wanted)
        return 1
    has_checkpoints = run.recipe.checkpointing.enabled
    return code_when_stopped(done, has_checkpoints=has_checkpoints, remedy="start it again to resume")
