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
"""Reason for which the data may end early, with dynamic sampling."""
SPARE = "async_rl.rollout_failure kept prompts in reserve, or dropped some"
"""Reason for which the data may end early, with the single controller, which raises its errors."""


class Ending(Callback):
    """Reasons for which the trainer may have returned, and its progress.

    Attributes:
        request: true once the driver has received a signal.
        grpo: the recipe's section.
        happened: the trainer was told to save and return, by a signal or by checkpoint_must_save_by.
        reached_threshold: validation reached stop_at_validation_threshold.
        last_step: the newest step that was trained, saved and logged.
    """

    def __init__(self, request: StopRequest, grpo: GRPOSection) -> None:
        self.request = request
        self.grpo = grpo
        self.happened = False
        self.reached_threshold = False
        self.last_step = 0

    def on_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        """Note the end of a step, and a validation that reaches the threshold."""
        if prefix == LAST_PREFIX:
            self.last_step = step
        if prefix == "validation":
            full_names = {f"{prefix}/{name}": value for name, value in metrics.items()}
            if self.grpo.is_goal(full_names):
                self.reached_threshold = True


@contextmanager
def stop_after_step(grpo: GRPOSection) -> Iterator[Ending]:
    """Let SIGUSR1, SIGTERM and SIGINT end the training after its step, with a checkpoint, within the block.

    Every trainer asks `TimeoutChecker.check_save` once per step, saves if it says so, and returns.

    Args:
        grpo: the recipe's section.

    Yields:
        A callback for NeMo-RL's logger.
    """

    def also_at_signals(check_time: Callable[..., Any]) -> Callable[..., bool]:
        def check_save(*arguments: Any, **named: Any) -> bool:
            is_time_over = bool(check_time(*arguments, **named))
            # A signal counts once, like NeMo-RL's own time limit.
            is_signalled = bool(ending.request) and not ending.happened
            is_due = is_time_over or is_signalled
            if is_due:
                ending.happened = True
            return is_due

        return check_save

    with stop_on_signals() as request, rebound("stop", also_at_signals):
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
    max_num_steps = run.recipe.grpo.max_num_steps
    state = parts.grpo_save_state
    config = parts.master_config
    if any(value_of(config, key, False) for key in ENDLESS):
        return max_num_steps
    num_finished = finished_steps(parts)
    num_remaining = max_num_steps - num_finished
    num_epochs = value_of(config, "grpo.max_num_epochs", 1)
    # The single controller has no epochs in its state: its current_step counts all steps.
    epoch = 0 if run.recipe.has_single_controller else int(value_of(state, "current_epoch", 0))
    num_done_in_epoch = int(value_of(state, "current_step", 0))
    num_until_data_ends = (num_epochs - epoch) * len(parts.dataloader) - num_done_in_epoch
    if num_until_data_ends >= num_remaining:
        return max_num_steps
    num_possible = max(num_until_data_ends, 0)
    end = num_finished + num_possible
    if run.recipe.nemo_grpo.task is None:
        # With NeMo-RL's own data the epochs are a limit of the recipe like its steps.
        log.info("grpo.max_num_epochs=%s ends training after %d more steps", num_epochs, num_possible)
        return end
    raise UserError(
        f"grpo.max_num_epochs={num_epochs}: {num_remaining} steps remain until grpo.max_num_steps="
        f"{max_num_steps}, but the data ends after {num_possible} ({len(parts.dataloader)} per "
        f"epoch, {epoch} epochs done); raise it, or set the steps to {end}"
    )


def exit_code(run: ClusterRun, parts: Parts, final_step: int, ending: Ending) -> int:
    """Choose the driver's exit code.

    An asynchronous trainer that returns early without a known reason has printed its error.

    Args:
        run: tells which trainers may run out of data.
        parts: hold the trainer's own count of steps.
        final_step: the step at which training is complete.
        ending: reasons for which the trainer may have returned.
    """
    step = max(finished_steps(parts), ending.last_step)
    if step >= final_step:
        return 0
    if ending.reached_threshold:
        log.info("stopped after step %d: validation reached grpo.stop_at_validation_threshold", step)
        return 0
    if ending.happened:
        has_checkpoints = run.recipe.checkpointing.enabled
        return code_when_stopped(step, has_checkpoints=has_checkpoints, remedy="start it again to resume")
    grpo = run.recipe.grpo
    takes_several_batches = grpo.use_dynamic_sampling and not grpo.is_async
    if takes_several_batches or run.recipe.has_single_controller:
        log.warning(
            "the data ended after step %d of %d: %s, and grpo.max_num_epochs=%s are over; raise it to train "
            "on. Steps after the newest checkpoint are lost",
            step,
            final_step,
            SEVERAL if takes_several_batches else SPARE,
            value_of(parts.master_config, "grpo.max_num_epochs", 1),
        )
        return 0 if step else 1
    log.error("the trainer returned after step %d of %d; its own messages give the reason", step, final_step)
    return 1
