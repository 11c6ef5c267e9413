"""Recorder of a run: writes rows and samples, checkpoints and exports, and shows the progress bar."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nemo_grpo.engine import validation
from nemo_grpo.engine.checkpoint_store import WEIGHTS, read_info
from nemo_grpo.engine.learning import Learner, TrainingState
from nemo_grpo.engine.megatron.policy_checkpoint import load_policy
from nemo_grpo.engine.saving import Saver, TrainingAborted, export_policy
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.diagnostics import StepDiagnostics
from nemo_grpo.run.folder import RunFolder, versions
from nemo_grpo.run.groups import Group
from nemo_grpo.run.samples import sample_rows
from nemo_grpo.support import distributed, machine
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_card import Training
from nemo_grpo.support.progress import Advance, progress
from nemo_grpo.tasks.retriever import RetrieverError
from nemo_grpo.tasks.scoring import RewardsFailed

log = logging.getLogger(__name__)

Row = dict[str, Any]
ON_EVERY_RANK = (RewardsFailed, RetrieverError, UserError)
"""Kinds of errors that all ranks raise together."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Recorder:
    """Writes the records of a run.

    Attributes:
        recipe: Recipe of the run.
        folder: Folder of the run.
        saver: Writer of checkpoints.
        diagnostics: Writer of the diagnostics of tokens.
        held_out: Metrics of a validation of the current weights; empty if they were not validated.
        unwritten: Row of the last step, as long as metrics.jsonl lacks it. A checkpoint keeps it.
    """

    recipe: Recipe
    folder: RunFolder
    saver: Saver
    diagnostics: StepDiagnostics
    held_out: dict[str, float] = field(default_factory=dict)
    unwritten: Row = field(default_factory=dict)

    def begin(self, row: Row, groups: list[Group], tokenizer: Any) -> None:
        """Write some samples of a step, and keep its row until `write`, because a validation may follow."""
        self.unwritten = row
        self.held_out = {}
        # A supervised step has no samples.
        if self.recipe.loss_fn.learns_from_demonstrations:
            return
        num_samples = self.recipe.nemo_grpo.engine.log_samples
        self.folder.append_samples(sample_rows(row["step"], groups, num_samples, tokenizer))

    def write(self, row: Row, held_out: dict[str, float]) -> Row:
        """Write the row of a step together with the metrics of its validation, and return the whole row."""
        self.held_out = held_out
        whole_row = row | held_out
        self.folder.append_metrics(whole_row)
        self.unwritten = whole_row if self.folder.failure else {}
        return whole_row

    def restore(self, checkpoint: Path, learner: Learner) -> None:
        """Load the policy, the learner's state and the unwritten row from a checkpoint."""
        info = read_info(checkpoint)
        load_policy(learner.policy, checkpoint / WEIGHTS)
        # The recipe may have another goal now, so the checkpoint's reached_goal is computed again.
        reached_goal = validation.reached_goal(self.recipe.grpo, info["metrics"])
        # The count of skipped steps in a row starts at 0, or the run would abort again at once.
        learner.state = replace(TrainingState(**info["state"]), reached_goal=reached_goal, skipped_in_a_row=0)
        self.held_out = info["metrics"]
        self.unwritten = info.get("unlogged", {})
        self.saver.saved = learner.state.step
        log.info("resuming from %s", checkpoint)

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint of the current state. With async_save it is complete some steps later."""
        machine.release_freed_memory()
        info = {"state": asdict(state), "metrics": self.held_out, "unlogged": self.unwritten}
        self.saver.save(state.step, info)

    def save_if_due(self, learner: Learner, *, stopping: bool) -> None:
        """Save a checkpoint if the recipe asks for one after this step, or if the run ends.

        Args:
            learner: The learner, after the step.
            stopping: True if a signal or a full disk ends the run.

        Raises:
            TrainingAborted: The loss or gradient of too many steps in a row was not finite. A checkpoint was
                saved.
        """
        checkpointing = self.recipe.checkpointing
        state = learner.state
        limit = self.recipe.nemo_grpo.engine.max_consecutive_skipped_steps
        must_abort = state.skipped_in_a_row >= limit
        is_last = stopping or must_abort or learner.has_ended
        if checkpointing.enabled and (is_last or state.step % checkpointing.save_period == 0):
            self.save(state)
        if must_abort:
            self.saver.finish()
            raise TrainingAborted(
                f"{limit} steps in a row had a non-finite loss or gradient (last at step {state.step}); look "
                "at metrics.jsonl, then start another nemo_grpo.run_name with a lower "
                "policy.megatron_cfg.optimizer.lr, or try these steps again with --resume"
            )

    @contextmanager
    def saved_before_failure(self, state: TrainingState) -> Iterator[None]:
        """If an error within the block ends the run, save a checkpoint of the finished steps first.

        A save waits for all ranks, so with several ranks only errors that all of them raise lead to a save. A
        policy whose logits are not finite is not saved.
        """
        try:
            yield
        except Exception as error:
            all_ranks_fail = self.recipe.world_size == 1 or isinstance(error, ON_EVERY_RANK)
            is_usable = not isinstance(error, FloatingPointError)
            is_unsaved = state.step > self.saver.saved
            if all_ranks_fail and is_usable and is_unsaved and self.recipe.checkpointing.enabled:
                self.save(state)
                self.saver.finish()
                log.error("step %d is saved, from which --resume continues", self.saver.saved)
            raise

    def export(self, learner: Learner) -> None:
        """Export the model and, with LoRA, also the adapters, if the recipe asks for it."""
        machine.release_freed_memory()
        export = self.recipe.nemo_grpo.export
        if export.hf:
            training = Training(self.recipe.to_dict(), learner.state.step, self.held_out, versions())
            dtype = None if export.dtype is None else DTYPES[export.dtype]
            export_policy(learner.policy, self.saver.source, self.folder, dtype, training)
        distributed.barrier()

    def progress(self, num_done: int) -> AbstractContextManager[Advance]:
        """Return the progress bar of the whole run. Only the first rank shows one.

        Args:
            num_done: Number of steps that are finished already.
        """
        name = f"{self.recipe.loss_fn.variant} {self.recipe.nemo_grpo.run_name}"
        if not self.folder.leads:
            return nullcontext(lambda note="", amount=1: None)
        return progress(name, self.recipe.grpo.max_num_steps, done=num_done)
