"""Records of a run: rows and samples in its folder, checkpoints, exports, and the progress bar."""

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
"""Errors raised identically on every rank."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Recorder:
    """Recorder of a run: its folder, its saver, and the state that checkpoints keep.

    Attributes:
        held_out: metrics of the validation of these weights; empty: there was none.
        unwritten: row of the last step that metrics.jsonl lacks; a checkpoint keeps it.
    """

    recipe: Recipe
    folder: RunFolder
    saver: Saver
    diagnostics: StepDiagnostics
    held_out: dict[str, float] = field(default_factory=dict)
    unwritten: Row = field(default_factory=dict)

    def begin(self, row: Row, groups: list[Group], tokenizer: Any) -> None:
        """Take a step's row, whose weights have not been validated yet, and write some of its samples."""
        self.unwritten = row
        self.held_out = {}
        if self.recipe.loss_fn.learns_from_demonstrations:
            return  # nothing was sampled
        num_samples = self.recipe.nemo_grpo.engine.log_samples
        self.folder.append_samples(sample_rows(row["step"], groups, num_samples, tokenizer))

    def write(self, row: Row, held_out: dict[str, float]) -> Row:
        """Write a step's row with its validation, and return the row that was written."""
        self.held_out = held_out
        whole_row = row | held_out
        self.folder.append_metrics(whole_row)
        self.unwritten = whole_row if self.folder.failure else {}
        return whole_row

    def restore(self, checkpoint: Path, learner: Learner) -> None:
        """Continue from a checkpoint."""
        info = read_info(checkpoint)
        load_policy(learner.policy, checkpoint / WEIGHTS)
        # The recipe may have raised its goal since, so the checkpoint's reached_goal does not hold.
        reached_goal = validation.reached_goal(self.recipe.grpo, info["metrics"])
        # A resumed run has all its attempts again.
        learner.state = replace(TrainingState(**info["state"]), reached_goal=reached_goal, skipped_in_a_row=0)
        self.held_out = info["metrics"]
        self.unwritten = info.get("unlogged", {})
        self.saver.saved = learner.state.step
        log.info("resuming from %s", checkpoint)

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint of the present state; with async_save it is complete some steps later."""
        machine.release_freed_memory()
        info = {"state": asdict(state), "metrics": self.held_out, "unlogged": self.unwritten}
        self.saver.save(state.step, info)

    def save_if_due(self, learner: Learner, *, stopping: bool) -> None:
        """Save after a step that the recipe names, and before the run ends.

        Raises:
            TrainingAborted: too many steps in a row were not finite; a checkpoint was saved.
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
        """Save the finished steps if an error within the block ends the run.

        Several ranks must all fail, since a save waits for each. A policy whose logits are not finite is not
        saved.
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
        """Export the model and, with LoRA, its adapters."""
        machine.release_freed_memory()
        export = self.recipe.nemo_grpo.export
        if export.hf:
            training = Training(self.recipe.to_dict(), learner.state.step, self.held_out, versions())
            dtype = None if export.dtype is None else DTYPES[export.dtype]
            export_policy(learner.policy, self.saver.source, self.folder, dtype, training)
        distributed.barrier()

    def progress(self, num_done: int) -> AbstractContextManager[Advance]:
        """Return the progress bar of the whole run; ranks but the first have none."""
        name = f"{self.recipe.loss_fn.variant} {self.recipe.nemo_grpo.run_name}"
        if not self.folder.leads:
            return nullcontext(lambda note="", amount=1: None)
        return progress(name, self.recipe.grpo.max_num_steps, done=num_done)
