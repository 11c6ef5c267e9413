"""The training loop: sample, learn, validate if due, record, save if due."""

import logging
import time

from nemo_grpo.engine import validation
from nemo_grpo.engine.learning import Learner
from nemo_grpo.engine.recorder import Recorder
from nemo_grpo.engine.rollout import Rollouts
from nemo_grpo.engine.saving import TrainingAborted
from nemo_grpo.engine.setup import Run
from nemo_grpo.engine.step_metrics import note
from nemo_grpo.engine.steps import method_of
from nemo_grpo.report.runs import validation_note
from nemo_grpo.report.stuck import Watch
from nemo_grpo.run.groups import assemble
from nemo_grpo.run.signals import stop_on_signals
from nemo_grpo.run.trackers import Ended
from nemo_grpo.support import distributed, machine
from nemo_grpo.support.distributed import from_first_rank

log = logging.getLogger(__name__)


def train(run: Run) -> bool:
    """Train until the last step, then export.

    Returns: True when the run is finished; False when a signal stopped it, with a checkpoint saved if the
             recipe has any.
    Raises:  TrainingAborted: the loss or gradient of too many steps in a row was not finite, or the run's
             folder cannot be written (a checkpoint was saved); or the trained weights are not finite.
             RewardsFailed, RetrieverError: a checkpoint was saved.
    """
    recorder = run.recorder
    ended: Ended = "FAILED"
    try:
        finished = run_steps(run)
        ended = "FINISHED" if finished else "KILLED"
    except Exception:
        if run.recipe.world_size == 1:  # of several ranks the others may never come to it
            recorder.saver.finish()
        raise
    finally:
        recorder.folder.close(ended)
        run.rollouts.scorer.close()
    if finished:
        recorder.export(run.learner)
    return finished


def run_steps(run: Run) -> bool:
    """Take the steps that are left; False: a signal stopped the run before its end."""
    recipe = run.recipe
    rollouts = run.rollouts
    learner = run.learner
    recorder = run.recorder
    sample, learn = method_of(recipe)
    watch = Watch(recipe.grpo.max_num_steps, recipe.nemo_grpo.rewards)
    last_validation: dict[str, float] = {}
    stopping = False
    with stop_on_signals() as stop:
        record_start(run)
        with recorder.progress(learner.state.step) as advance:
            while not (learner.has_ended or stopping):
                if recorder.held_out:
                    last_validation = recorder.held_out  # the progress bar shows it until the next one
                with recorder.saved_before_failure(learner.state):
                    sampled = sample(rollouts, learner)
                row = learn(learner, sampled, recorder.diagnostics)
                recorder.saver.finish_if_written()
                recorder.begin(row, sampled.groups, rollouts.tokenizer)

                held_out = validate_if_due(run)

                row = recorder.write(row, held_out)
                learner.state.reached_goal = validation.reached_goal(recipe.grpo, row)
                advance(note(last_validation | row))
                for sentence in watch(row):
                    log.warning("%s", sentence)

                is_asked = bool(stop) or recorder.folder.failure is not None
                stopping = distributed.any_rank(is_asked, learner.policy.device)
                recorder.save_if_due(learner, stopping=stopping)
    recorder.saver.finish()
    if failure := from_first_rank(lambda: recorder.folder.failure):
        saved = recorder.saver.saved
        raise TrainingAborted(f"{failure}; make room, then --resume continues from step {saved}")
    return learner.has_ended or not stopping


def record_start(run: Run) -> None:
    """Record the weights before the first step, or a row that an earlier process could not write."""
    grpo = run.recipe.grpo
    state = run.learner.state
    recorder = run.recorder
    if recorder.unwritten or (state.step == 0 and grpo.val_at_start):
        row = recorder.unwritten if recorder.unwritten else {"step": 0}
        recorder.unwritten = row
        # What a checkpoint brings of the validation of these weights is not measured again.
        held_out = recorder.held_out if recorder.held_out else validate_if_due(run)
        row = recorder.write(row, held_out)
        state.reached_goal = state.step > 0 and validation.reached_goal(grpo, row)
    if state.step >= grpo.max_num_steps:
        message = "at step %d, grpo.max_num_steps=%d: nothing is left to train; raise it to go on"
        log.info(message, state.step, grpo.max_num_steps)


def validate_if_due(run: Run) -> dict[str, float]:
    """Return the metrics of a validation after this step; empty: none is due."""
    grpo = run.recipe.grpo
    state = run.learner.state
    is_due = validation.is_due(grpo, state.step) if state.step > 0 else grpo.val_at_start
    if not is_due:
        return {}
    with run.recorder.saved_before_failure(state):
        held_out = validate(run.rollouts, run.learner, run.recorder)
    log.info("step %d: %s", state.step, validation_note(held_out))
    return held_out


def validate(rollouts: Rollouts, learner: Learner, recorder: Recorder) -> dict[str, float]:
    """Measure greedy, avg@k, pass@k and rewards on the held-out problems, as ``validation/*``.

    A supervised run has its loss per token on their demonstrations, too.
    """
    machine.release_freed_memory()
    start = time.monotonic()
    metrics: dict[str, float] = {}
    if rollouts.demonstrations is not None:
        step = assemble([rollouts.demonstrations.held_out(problem) for problem in rollouts.problems])
        logprobs = learner.score(step, with_entropies=False).logprobs
        metrics["validation/val_loss"] = float(-logprobs[step.token_mask].double().mean())
    rewards, samples = validation.validate(rollouts, learner.policy.named_tensors())
    recorder.folder.append_samples([{"step": learner.state.step} | row for row in samples])
    return metrics | rewards | {"time/validation": time.monotonic() - start}
