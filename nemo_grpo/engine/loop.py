"""The training loop: sample, learn, validate if due, record, save if due."""

import logging

from nemo_grpo.engine import validation
from nemo_grpo.engine.saving import TrainingAborted
from nemo_grpo.engine.setup import Run
from nemo_grpo.engine.step_metrics import note
from nemo_grpo.engine.steps import method_of
from nemo_grpo.report.runs import validation_note
from nemo_grpo.report.stuck import Watch
from nemo_grpo.run.signals import stop_on_signals
from nemo_grpo.run.trackers import Ended
from nemo_grpo.support import distributed
from nemo_grpo.support.distributed import from_first_rank

log = logging.getLogger(__name__)


def train(run: Run) -> bool:
    """Train until the last step, then export.

    Returns:
        True if the run is finished, False if a signal stopped it. In both cases the last step has a
        checkpoint, if the recipe saves checkpoints.

    Raises:
        TrainingAborted: The loss or gradient of too many steps in a row was not finite, or the run's folder
            cannot be written; in both cases a checkpoint was saved. Or the trained weights are not finite.
        RewardsFailed: Too many rewards of a step failed. A checkpoint was saved.
        RetrieverError: The search service failed. A checkpoint was saved.
    """
    recorder = run.recorder
    ended: Ended = "FAILED"
    try:
        finished = run_steps(run)
        ended = "FINISHED" if finished else "KILLED"
    except Exception:
        # Finishing a save waits for all ranks. With several ranks the others may not have failed, and this
        # rank would wait for them forever.
        if run.recipe.world_size == 1:
            recorder.saver.finish()
        raise
    finally:
        recorder.folder.close(ended)
        run.rollouts.scorer.close()
    if finished:
        recorder.export(run.learner)
    return finished


def run_steps(run: Run) -> bool:
    """Take the remaining steps.

    Returns:
        True at the end of the run, False if a signal stopped it before.
    """
    recipe = run.recipe
    rollouts = run.rollouts
    learner = run.learner
    recorder = run.recorder
    sample, learn = method_of(recipe)
    watch = Watch(recipe.grpo.max_num_steps, recipe.nemo_grpo.rewards)
    last_validation: dict[str, float] = {}
    stopping = False
    with stop_on_signals() as stop_request:
        record_start(run)
        with recorder.progress(learner.state.step) as advance:
            while not (learner.has_ended or stopping):
                # The progress bar shows the metrics of a validation until the next validation.
                if recorder.held_out:
                    last_validation = recorder.held_out

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

                # A signal or a full disk may reach one rank only, but all ranks must stop after the same
                # step.
                must_stop = bool(stop_request) or recorder.folder.failure is not None
                stopping = distributed.any_rank(must_stop, learner.policy.device)
                recorder.save_if_due(learner, stopping=stopping)
    recorder.saver.finish()
    failure = from_first_rank(lambda: recorder.folder.failure)
    if failure:
        saved_step = recorder.saver.saved
        raise TrainingAborted(f"{failure}; make room, then --resume continues from step {saved_step}")
    return learner.has_ended or not stopping


def record_start(run: Run) -> None:
    """Write the row of step 0, or the row that an earlier process of the run could not write."""
    grpo = run.recipe.grpo
    state = run.learner.state
    recorder = run.recorder
    if recorder.unwritten or (state.step == 0 and grpo.val_at_start):
        row = recorder.unwritten if recorder.unwritten else {"step": 0}
        # The checkpoint may have the metrics of these weights' validation, which is then not repeated.
        held_out = recorder.held_out if recorder.held_out else validate_if_due(run)
        row = recorder.write(row, held_out)
        state.reached_goal = state.step > 0 and validation.reached_goal(grpo, row)
    if state.step >= grpo.max_num_steps:
        message = "at step %d, grpo.max_num_steps=%d: nothing is left to train; raise it to go on"
        log.info(message, state.step, grpo.max_num_steps)


def validate_if_due(run: Run) -> dict[str, float]:
    """Validate if the recipe asks for it after this step, and return the metrics; else return {}."""
    state = run.learner.state
    recorder = run.recorder
    if not validation.is_due(run.recipe.grpo, state.step):
        return {}
    with recorder.saved_before_failure(state):
        held_out, samples = validation.validate(run.rollouts, run.learner)
        recorder.folder.append_samples(samples)
    log.info("step %d: %s", state.step, validation_note(held_out))
    return held_out
