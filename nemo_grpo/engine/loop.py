"""The training loop: step, validate, log, save."""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nemo_grpo.engine import validation
from nemo_grpo.engine.rollout import assemble
from nemo_grpo.engine.run_folder import versions
from nemo_grpo.engine.saving import TrainingAborted, export_policy
from nemo_grpo.engine.setup import DTYPES, Parts
from nemo_grpo.engine.signals import stop_on_signals
from nemo_grpo.engine.step_metrics import note
from nemo_grpo.engine.steps import reinforce, supervise
from nemo_grpo.engine.trackers import Ended
from nemo_grpo.report.runs import validation_note
from nemo_grpo.report.stuck import Watch
from nemo_grpo.support import distributed, machine
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.support.model_card import Training
from nemo_grpo.support.progress import Advance, progress

log = logging.getLogger(__name__)


def train(parts: Parts) -> bool:
    """Train until the last step, then export.

    Returns: True when the run is finished; False when a signal stopped it, with a checkpoint saved if the
             recipe has any.
    Raises:  TrainingAborted: the loss or gradient of too many steps in a row was not finite, or the run's
             folder cannot be written (a checkpoint was saved); or the trained weights are not finite.
             RewardsFailed, RetrieverError: a checkpoint was saved.
    """
    ended: Ended = "FAILED"
    try:
        finished = run_steps(parts)
        ended = "FINISHED" if finished else "KILLED"
    except Exception:
        if parts.recipe.world_size == 1:  # of several ranks the others may never come to it
            parts.saver.finish()
        raise
    finally:
        parts.folder.close(ended)
        parts.scorer.close()
    if finished:
        export(parts)
    return finished


def run_steps(parts: Parts) -> bool:
    """Take the steps that are left; False: a signal stopped the run before its end."""
    recipe, state, folder = parts.recipe, parts.state, parts.folder
    step = supervise if recipe.loss_fn.learns_from_demonstrations else reinforce
    watch = Watch(recipe.grpo.max_num_steps, recipe.nemo_grpo.rewards)
    stopping, held_out = False, dict[str, Any]()
    with stop_on_signals() as stop:
        if parts.pending or (state.step == 0 and recipe.grpo.val_at_start):
            record(parts, parts.pending or {"step": 0})
        if state.step >= recipe.grpo.max_num_steps:
            message = "at step %d, grpo.max_num_steps=%d: nothing is left to train; raise it to go on"
            log.info(message, state.step, recipe.grpo.max_num_steps)
        with progress_of(parts) as advance:
            while not (parts.has_ended or stopping):
                row = step(parts)
                parts.saver.finish_if_written()
                held_out, parts.validated = parts.validated or held_out, {}
                record(parts, row)
                advance(note(held_out | row))
                for sentence in watch(row):
                    log.warning("%s", sentence)
                stopping = distributed.any_rank(bool(stop) or folder.failure is not None, parts.policy.device)
                save_if_due(parts, stopping=stopping)
    parts.saver.finish()
    if failure := from_first_rank(lambda: folder.failure):
        raise TrainingAborted(f"{failure}; make room, then --resume continues from step {parts.saver.saved}")
    if parts.has_ended or not stopping:
        return True
    if recipe.checkpointing.enabled:
        log.warning("stopped at step %d; add --resume to continue", state.step)
    else:
        log.error("stopped at step %d without a checkpoint: checkpointing.enabled=false", state.step)
    return False


def record(parts: Parts, row: dict[str, Any]) -> None:
    """Validate if that is due, and write a step's metrics."""
    grpo, step = parts.recipe.grpo, parts.state.step
    parts.pending = row
    if not parts.validated and (validation.is_due(grpo, step) if step else grpo.val_at_start):
        with parts.saved_before_failure():
            parts.validated = validate(parts)
        log.info("step %d: %s", step, validation_note(parts.validated))
    row |= parts.validated
    parts.folder.append_metrics(row)
    parts.pending = row if parts.folder.failure else {}
    parts.state.reached_goal = step > 0 and validation.reached_goal(grpo, row)


def validate(parts: Parts) -> dict[str, float]:
    """Measure greedy, avg@k, pass@k and rewards on the held-out problems, as ``validation/*``.

    A supervised run has its loss per token on their demonstrations, too.
    """
    machine.release_freed_memory()
    start, metrics = time.monotonic(), dict[str, float]()
    if parts.demonstrations is not None:
        step = assemble([parts.demonstrations.held_out(problem) for problem in parts.problems])
        logprobs = parts.learner.score(step, with_entropies=False).logprobs
        metrics["validation/val_loss"] = float(-logprobs[step.token_mask].double().mean())
    found, samples = validation.validate(
        parts.recipe,
        parts.generator,
        parts.policy.named_tensors(),
        parts.tokenizer,
        parts.scorer,
        parts.problems,
        parts.validation_sampling,
    )
    parts.folder.append_samples([{"step": parts.state.step} | row for row in samples])
    return metrics | found | {"time/validation": time.monotonic() - start}


def save_if_due(parts: Parts, *, stopping: bool) -> None:
    """Save after a step that the recipe names, and before the run ends."""
    checkpointing, state = parts.recipe.checkpointing, parts.state
    limit = parts.recipe.nemo_grpo.engine.max_consecutive_skipped_steps
    abort = state.skipped_in_a_row >= limit
    if checkpointing.enabled and (
        stopping or abort or parts.has_ended or state.step % checkpointing.save_period == 0
    ):
        parts.save()
    if abort:
        parts.saver.finish()
        raise TrainingAborted(
            f"{limit} steps in a row had a non-finite loss or gradient (last at step {state.step}); look at "
            "metrics.jsonl, then start another nemo_grpo.run_name with a lower "
            "policy.megatron_cfg.optimizer.lr, or try these steps again with --resume"
        )


def export(parts: Parts) -> None:
    """Export the model and, with LoRA, its adapters."""
    machine.release_freed_memory()
    wanted = parts.recipe.nemo_grpo.export
    if wanted.hf:
        training = Training(parts.recipe.to_dict(), parts.state.step, parts.validated, versions())
        dtype = None if wanted.dtype is None else DTYPES[wanted.dtype]
        export_policy(parts.policy, parts.source, parts.folder, dtype, training)
    distributed.barrier()


def progress_of(parts: Parts) -> AbstractContextManager[Advance]:
    """Return the progress bar of the whole run; ranks but the first have none."""
    name = f"{parts.recipe.loss_fn.variant} {parts.recipe.nemo_grpo.run_name}"
    if not parts.folder.leads:
        return nullcontext(lambda note="", amount=1: None)
    return progress(name, parts.recipe.grpo.max_num_steps, done=parts.state.step)
