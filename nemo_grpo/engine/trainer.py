"""The training loop: sample groups, score, prepare the objective, update, log, validate, save."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoints_conv.model_card import Training
from nemo_grpo.core.batch import PreparedBatch
from nemo_grpo.core.random import step_seed
from nemo_grpo.core.resampling import accumulate_groups
from nemo_grpo.diagnostics.stuck import Watch
from nemo_grpo.diagnostics.tokens import token_diagnostics
from nemo_grpo.engine import heap, setup, validation
from nemo_grpo.engine.checked_prompts import check_training_prompts
from nemo_grpo.engine.checkpoint import WEIGHTS, CheckpointStore, read_info
from nemo_grpo.engine.checks import check, check_ranks
from nemo_grpo.engine.inputs import check_inputs, data_files, keep_inputs, model_files, used_when_resumed
from nemo_grpo.engine.learning import Learner, TrainingState
from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.megatron.checkpoint import load_policy
from nemo_grpo.engine.precision import choose_precision
from nemo_grpo.engine.records import Clock, mean_metrics, mean_scores, note, sample_rows, signal_shares
from nemo_grpo.engine.resume import ANOTHER_RUN
from nemo_grpo.engine.saving import Saver, TrainingAborted, export_policy
from nemo_grpo.errors import UserError
from nemo_grpo.hf_folder import end_tokens, load_config, load_tokenizer
from nemo_grpo.progress import Advance, progress
from nemo_grpo.recipe import Recipe
from nemo_grpo.sampling.generate_distributed import from_first_rank
from nemo_grpo.sampling.prompting import encode_prompts
from nemo_grpo.sampling.requests import Request
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.environment import make_ready
from nemo_grpo.tasks.retriever import RetrieverError
from nemo_grpo.tasks.scoring import RewardsFailed, Scorer
from nemo_grpo.training.rollout import Group, Step, assemble, sample_groups
from nemo_grpo.training.run_folder import RunFolder, versions
from nemo_grpo.training.signals import stop_on_signals
from nemo_grpo.training.trackers import Ended, open_trackers

log = logging.getLogger(__name__)

ON_EVERY_RANK = (RewardsFailed, RetrieverError, UserError)
"""What the first rank finds for all (`from_first_rank`), or all find alike."""


class Trainer:
    """One run of a recipe on the embedded engine."""

    def __init__(self, recipe: Recipe, *, resume: bool = False) -> None:
        """Check everything, then build model, sampler and optimizer; ``resume``: load the newest checkpoint.

        Raises: UserError: the recipe asks for what this engine or this machine does not have, the run folder
                exists and ``resume`` is False, or a checkpoint does not fit.
        """
        begun = check(recipe, resume=resume)
        check_ranks(recipe)
        torch.set_num_threads(recipe.nemo_grpo.engine.num_threads)
        heap.keep()
        self.device = setup.choose_device(recipe)
        parallel.initialize(recipe.policy.megatron_cfg.layout, self.device, recipe.grpo.seed)
        leads = parallel.is_rank_zero()
        self.run = RunFolder(recipe.run_dir, checkpoints=recipe.checkpoint_dir, leads=leads, resume=resume)
        self.recipe = recipe = choose_precision(recipe, self.device, begun, leads=leads)
        if resume:
            self.run.lock()
        self.objective = recipe.loss_fn.build()
        own, self.task = recipe.nemo_grpo, recipe.task.build()
        self.scorer = Scorer(self.task, own.rewards, own.prompt, own.max_failed_rewards)
        self.scorer.try_out(recipe.grpo.seed)
        from_first_rank(lambda: make_ready(self.task))
        self.source = setup.model_source(recipe, self.task)
        inputs = from_first_rank(lambda: data_files(recipe) | model_files(self.source))
        if resume:
            used = used_when_resumed(inputs, recipe, has_reference=self.objective.needs_reference)
            from_first_rank(lambda: check_inputs(self.run.path, used, ANOTHER_RUN))
        self.tokenizer = load_tokenizer(self.source)
        self.vocab_size = load_config(self.source).vocab_size
        self.policy = setup.build_policy(recipe, self.source, keep_reference=self.objective.needs_reference)
        self.generator = setup.build_generator(recipe, self.source)
        ends = end_tokens(self.source, self.tokenizer)
        self.sampling = setup.training_sampling(recipe, ends)
        self.validation_sampling = setup.validation_sampling(recipe, ends)
        self.learner = Learner(recipe, self.objective, self.policy)
        self.problems = self.task.validation_problems(recipe.grpo.num_val_problems)
        checkpointing = recipe.checkpointing
        self.store = CheckpointStore(
            recipe.checkpoint_dir,
            checkpointing.keep_top_k,
            checkpointing.metric_key,
            checkpointing.higher_is_better,
            leads,
            parallel.barrier,
        )
        behind = recipe.policy.megatron_cfg.checkpoint.async_save
        self.saver = Saver(self.store, self.policy, self.source, behind)
        self.state = TrainingState()
        self.validated: dict[str, float] = {}
        self.saved = 0  # the step of the newest checkpoint
        self.unlogged: dict[str, Any] = {}  # what metrics.jsonl lacks of the last step
        self._encode(self.problems)  # a problem that cannot be used ends the run now, not at its turn
        self._set_up_training_data()
        checkpoint = self.store.newest_whole() if resume else None
        if checkpoint is not None:
            self._restore(checkpoint)
        from_step = -1 if checkpoint is None else self.state.step
        # A recipe by which nothing is made any more is not the run's.
        kept = begun if begun and self._has_ended and not self.unlogged else recipe
        self.run.open(
            kept.to_yaml(),
            recipe.own_files,
            from_step=from_step,
            trackers=lambda folder: open_trackers(recipe, folder, from_step),
        )
        if leads:  # not before the folder is ours: another process's save under way looks like a leftover
            keep_inputs(self.run.path, inputs)
            self.store.remove_leftovers()

    @property
    def _has_ended(self) -> bool:
        return self.state.step >= self.recipe.grpo.max_num_steps or self.state.reached_goal

    def _set_up_training_data(self) -> None:
        """Encode every training prompt before anything is written, of an endless stream the first ones."""
        seed, settings = self.recipe.grpo.seed, (self.recipe.nemo_grpo.prompt, self._limits)
        from_first_rank(lambda: check_training_prompts(self.task, self._encode, seed, self.source, settings))

    @property
    def _limits(self) -> dict[str, int]:
        return {
            "limit": self.recipe.policy.max_total_sequence_length,
            "max_new_tokens": self.sampling.max_new_tokens,
            "vocab_size": self.vocab_size,
        }

    def _encode(self, problems: list[Problem]) -> list[list[int]]:
        return encode_prompts(problems, self.tokenizer, self.recipe.nemo_grpo.prompt, **self._limits)

    def _restore(self, checkpoint: Path) -> None:
        info = read_info(checkpoint)
        load_policy(self.policy, checkpoint / WEIGHTS)
        # The threshold may have been raised.
        goal = validation.reached_goal(self.recipe.grpo, info["metrics"])
        state = TrainingState(**info["state"])
        self.state = replace(state, reached_goal=goal, skipped_in_a_row=0)
        self.validated, self.saved, self.unlogged = info["metrics"], state.step, info.get("unlogged", {})
        log.info("resuming from %s", checkpoint)

    # ------------------------------------------------------------------ the loop

    def train(self) -> bool:
        """Train until the last step.

        Returns: True when the run is finished; False when a signal stopped it, with a checkpoint saved if
                 the recipe has any.
        Raises:  TrainingAborted: the loss or gradient of too many steps in a row was not finite, or the run's
                 folder cannot be written (a checkpoint was saved); or the trained weights are not finite.
                 RewardsFailed, RetrieverError: a checkpoint was saved.
        """
        ended: Ended = "FAILED"
        try:
            finished = self._train()
            ended = "FINISHED" if finished else "KILLED"
        except Exception:
            if self.recipe.world_size == 1:  # of several ranks the others may never come to it
                self.saver.finish()
            raise
        finally:
            self.run.close(ended)
            self.scorer.close()
        if finished:
            self.finish()
        return finished

    def _train(self) -> bool:
        recipe, state = self.recipe, self.state
        with stop_on_signals() as stop:
            if self.unlogged or (state.step == 0 and recipe.grpo.val_at_start):
                self._log(self.unlogged or {"step": 0})
            if state.step >= recipe.grpo.max_num_steps:
                log.info(
                    "at step %d, grpo.max_num_steps=%d: nothing is left to train; raise it to go on",
                    state.step,
                    recipe.grpo.max_num_steps,
                )
            stopping, watch = False, Watch(recipe.grpo.max_num_steps)
            with self._progress() as advance:
                while not (self._has_ended or stopping):
                    row = self.train_step()
                    self.saver.finish_if_written()
                    self.validated = {}
                    self._log(row)
                    advance(note(row))
                    for sentence in watch(row):
                        log.warning("%s", sentence)
                    stopping = parallel.any_rank(bool(stop) or self.run.failure is not None, self.device)
                    self._save_if_due(stopping)
        self.saver.finish()
        if failure := from_first_rank(lambda: self.run.failure):
            raise TrainingAborted(f"{failure}; make room, then --resume continues from step {self.saved}")
        if stopping and not self._has_ended:
            if recipe.checkpointing.enabled:
                log.warning("stopped at step %d; add --resume to continue", state.step)
            else:
                log.error("stopped at step %d without a checkpoint: checkpointing.enabled=false", state.step)
            return False
        return True

    def _log(self, row: dict[str, Any]) -> None:
        """Validate if that is due, and write a step's metrics; a checkpoint keeps an unwritten row."""
        grpo, step = self.recipe.grpo, self.state.step
        self.unlogged = row
        if not self.validated and (validation.is_due(grpo, step) if step else grpo.val_at_start):
            with self._saving_first():
                self.validated = self.validate()
        row |= self.validated
        self.run.append_metrics(row)
        self.unlogged = row if self.run.failure else {}
        self.state.reached_goal = step > 0 and validation.reached_goal(grpo, row)

    @contextmanager
    def _saving_first(self) -> Iterator[None]:
        """Before an error in here ends the run, save the steps that were made.

        Of several ranks all must fail, since a save waits for every one. A policy whose logits are not finite
        is not worth saving.
        """
        position = self.state.next_problem
        try:
            yield
        except Exception as error:
            self.state.next_problem = position
            alike = self.recipe.world_size == 1 or isinstance(error, ON_EVERY_RANK)
            saves = alike and not isinstance(error, FloatingPointError) and self.recipe.checkpointing.enabled
            if saves and self.state.step > self.saved:
                self.save()
                self.saver.finish()
                log.error("step %d is saved, from which --resume continues", self.saved)
            raise

    def _progress(self) -> AbstractContextManager[Advance]:
        name = f"{self.recipe.loss_fn.variant} {self.recipe.nemo_grpo.run_name}"
        if not self.run.leads:
            return nullcontext(lambda note="", amount=1: None)
        return progress(name, self.recipe.grpo.max_num_steps - self.state.step)

    def train_step(self) -> dict[str, Any]:
        """One step of the algorithm; returns its metrics."""
        recipe, state = self.recipe, self.state
        clock = Clock()
        self.generator.update_weights(self.policy.named_tensors())
        with self._saving_first():
            groups, drawn = self.sample()
        clock.lap("time/rollout")
        step = assemble(
            groups,
            overlong=setup.overlong_penalty_of(recipe),
            drop_truncated=recipe.grpo.overlong_filtering,
        )
        prepared, updates = self.learner.learn(step, state, clock)
        state.step += 1
        state.tokens += int(step.token_mask.sum())
        row: dict[str, Any] = {"step": state.step, "rollout/num_prompts": len(drawn)}
        row |= {name: float(value) for name, value in prepared.metrics.items()}
        shares = signal_shares(drawn, drop_truncated=recipe.grpo.overlong_filtering)
        row |= mean_scores(groups) | shares | mean_metrics(updates) | clock.laps
        row |= self._diagnose(prepared, step)
        row["time/step"] = sum(clock.laps.values())
        row["tokens_per_second"] = float(step.token_mask.sum()) / row["time/step"]
        row |= {
            "steps/skipped": state.skipped,
            "steps/no_signal": state.no_signal,
            "tokens/trained": state.tokens,
        }
        self.run.append_samples(sample_rows(state.step, groups, recipe.nemo_grpo.engine.log_samples))
        return row

    def _diagnose(self, prepared: PreparedBatch, step: Step) -> dict[str, float]:
        """Now and then a look at the step's tokens: details to diagnostics.jsonl, numbers as metrics."""
        period, number = self.recipe.nemo_grpo.engine.diagnostics_period, self.state.step
        if not self.run.leads or period == 0 or (number > 1 and number % period > 0):
            return {}
        tokens = step.sequences.input_ids[:, 1:]
        numbers, details = token_diagnostics(
            self.objective, prepared, tokens, lambda token: str(self.tokenizer.decode([token]))
        )
        self.run.append_diagnostics({"step": number} | details)
        return numbers

    def sample(self) -> tuple[list[Group], list[Group]]:
        """The groups of one step, and all that were drawn for them."""
        grpo, drawn = self.recipe.grpo, list[Group]()
        if not grpo.use_dynamic_sampling:
            drawn = self._draw()
            return drawn, drawn

        def draw() -> list[Group]:
            groups = self._draw()
            drawn.extend(groups)
            return groups

        threshold, max_draws = self.recipe.loss_fn.resampling(grpo.dynamic_sampling_max_gen_batches)
        gathered = accumulate_groups(
            draw,
            partial(Group.has_signal, drop_truncated=grpo.overlong_filtering),
            num_groups=grpo.num_prompts_per_step,
            valid_fraction_threshold=threshold,
            max_draws=max_draws,
        )
        return list(gathered.take(grpo.num_prompts_per_step)), drawn

    def _draw(self) -> list[Group]:
        recipe, first = self.recipe, self.state.next_problem
        numbers = range(first, first + recipe.grpo.num_prompts_per_step)
        problems = [self.task.train_problem(number, recipe.grpo.seed) for number in numbers]
        seed, number = step_seed(recipe.grpo.seed, first), recipe.grpo.num_generations_per_prompt
        request = Request(self._encode(problems), number, self.sampling, seed)
        self.state.next_problem += len(problems)
        return sample_groups(self.generator, self.tokenizer, self.scorer, problems, request)

    # ------------------------------------------------------------------ validation, saving, the end

    def validate(self) -> dict[str, float]:
        """Greedy, avg@k and pass@k on the held-out problems, as ``validation/*``."""
        heap.give_back()
        tensors = self.policy.named_tensors()
        return validation.validate(
            *(self.recipe, self.generator, tensors, self.tokenizer, self.task, self.problems),
            self.validation_sampling,
        )

    def _save_if_due(self, stopping: bool) -> None:
        checkpointing, state = self.recipe.checkpointing, self.state
        limit = self.recipe.nemo_grpo.engine.max_consecutive_skipped_steps
        abort = state.skipped_in_a_row >= limit
        last = state.step == self.recipe.grpo.max_num_steps or state.reached_goal
        if checkpointing.enabled and (
            stopping or abort or last or state.step % checkpointing.save_period == 0
        ):
            self.save()
        if abort:
            self.saver.finish()
            raise TrainingAborted(
                f"{limit} steps in a row had a non-finite loss or gradient (last at step {state.step}); "
                "look at metrics.jsonl, then start another nemo_grpo.run_name with a lower "
                "policy.megatron_cfg.optimizer.lr, or try these steps again with --resume"
            )

    def save(self) -> None:
        """Write a checkpoint of this moment; with async_save it is complete some steps later."""
        heap.give_back()
        info = {"state": asdict(self.state), "metrics": self.validated, "unlogged": self.unlogged}
        self.saver.save(self.state.step, info)
        self.saved = self.state.step

    def finish(self) -> None:
        """Export the model and, with LoRA, its adapters."""
        heap.give_back()
        if self.recipe.nemo_grpo.export.hf:
            dtype = setup.DTYPES[self.recipe.nemo_grpo.export.dtype]
            training = Training(self.recipe.written(), self.state.step, self.validated, versions())
            export_policy(self.policy, self.source, self.run, dtype, training)
        parallel.barrier()
