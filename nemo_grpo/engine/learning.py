"""Learning from a step: score, prepare the objective on whole groups, update."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemo_grpo.core.batch import PreparedBatch
from nemo_grpo.core.objective import Objective
from nemo_grpo.core.random import step_seed
from nemo_grpo.engine.megatron.policy import MegatronPolicy, Scores, UpdateResult
from nemo_grpo.engine.step_metrics import Clock
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.groups import Step


@dataclass
class TrainingState:
    """Position of a run; all that a resumed run needs besides policy and optimizer.

    Every random choice of a step is seeded by the run's seed and the counters here, so there is no generator
    state.

    Attributes:
        step: finished steps.
        next_problem: position in the stream of training problems.
        skipped_in_a_row: steps at the end without an update because something was not finite.
        skipped: all such steps.
        no_signal: steps without an update because no group's rewards differed.
        tokens: trained on so far.
        reached_goal: grpo.stop_at_validation_metric has ended the run.
        carried: see `PreparedBatch`.
    """

    step: int = 0
    next_problem: int = 0
    skipped_in_a_row: int = 0
    skipped: int = 0
    no_signal: int = 0
    tokens: int = 0
    reached_goal: bool = False
    carried: dict[str, float] = field(default_factory=dict)

    def count(self, updates: list[UpdateResult], num_tokens: int) -> None:
        """Count a finished step by its updates and response tokens."""
        self.step += 1
        self.tokens += num_tokens
        if not updates:
            self.no_signal += 1
            return
        if all(update.skipped for update in updates):
            self.skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0


@dataclass
class Learner:
    """The recipe's objective, applied to the policy step by step."""

    recipe: Recipe
    objective: Objective
    policy: MegatronPolicy
    state: TrainingState = field(default_factory=TrainingState)

    @property
    def has_ended(self) -> bool:
        """True if no step is left to train."""
        return self.state.step >= self.recipe.grpo.max_num_steps or self.state.reached_goal

    def learn(self, step: Step, clock: Clock) -> tuple[PreparedBatch, list[UpdateResult]]:
        """Score, prepare and update.

        Returns:
            (the prepared step, its updates).
        """
        if self.scores_in_update:
            reference = self.reference(step)
            clock.lap("time/score")
            prepared, updates = self._update_and_score(step, reference)
        else:
            scores = self.score(step)
            reference = self.reference(step)
            clock.lap("time/score")
            prepared = self.prepare(step, scores, reference)
            updates = self.update(prepared, step)
        self.state.carried = prepared.carried
        self.state.count(updates, int(step.token_mask.sum()))
        clock.lap("time/update")
        return prepared, updates

    @property
    def scores_in_update(self) -> bool:
        """True if a step's only update also scores in its forward pass, which saves a pass of the model.

        It can, if the advantages do not depend on the scores.
        """
        return not self.objective.needs_scores and self.recipe.num_updates_per_step == 1

    def _update_and_score(
        self, step: Step, reference: Tensor | None
    ) -> tuple[PreparedBatch, list[UpdateResult]]:
        """Update, then prepare the step once more with the scores of the update, for its metrics."""
        # No loss reads these scores: with `scoring` an update takes its own logprobs for the previous ones.
        unread_scores = Scores(step.generation_logprobs)
        updates = self.update(self.prepare(step, unread_scores, reference), step, scoring=True)
        if not updates:  # no row has a gradient
            return self.prepare(step, self.score(step), reference), updates
        scores = updates[0].scores
        assert scores is not None
        return self.prepare(step, scores, reference, updates[0].computed), updates

    def score(self, step: Step, *, with_entropies: bool = True) -> Scores:
        """Compute the policy's logprobs and entropies of a step's tokens."""
        policy = self.recipe.policy
        return self.policy.score(
            step.sequences,
            micro_batch_size=policy.logprob_batch_size,
            mb_tokens=policy.logprob_mb_tokens,
            temperature=self.temperature,
            with_entropies=with_entropies,
        )

    def reference(self, step: Step) -> Tensor | None:
        """Compute the reference policy's logprobs, if the objective needs them."""
        if not self.objective.needs_reference:
            return None
        with self.policy.reference_weights():
            return self.score(step, with_entropies=False).logprobs

    def prepare(
        self, step: Step, scores: Scores, reference: Tensor | None = None, scored: Tensor | None = None
    ) -> PreparedBatch:
        """Decide advantages and weights on whole groups.

        Args:
            scores: [B, T] of the policy before the step.
            reference: [B, T], logprobs of the reference policy.
            scored: [B] bool, see `TokenBatch`; None: the policy scored all rows.
        """
        logprobs = scores.logprobs
        # Rows that the update left out have no scores, and keep the sampler's logprobs.
        if scored is not None:
            logprobs = torch.where(scored[:, None], logprobs, step.generation_logprobs)
        batch = step.token_batch(logprobs, scores.entropies, reference)
        batch = replace(batch, carried=self.state.carried, scored=scored)
        return self.objective.prepare(batch, seed=step_seed(self.recipe.grpo.seed, self.state.step))

    def update(self, prepared: PreparedBatch, step: Step, *, scoring: bool = False) -> list[UpdateResult]:
        """Make one optimizer step per train_global_batch_size rows; none where nothing has a gradient.

        Args:
            scoring: see `MegatronPolicy.update`.
        """
        policy = self.recipe.policy
        num_rows = len(step.rewards)
        rows_per_update = min(policy.train_global_batch_size, num_rows)
        has_gradient = self.objective.rows_with_gradient(prepared.advantages, prepared.batch.mask)
        results = []
        for rows in torch.arange(num_rows).split(rows_per_update):
            # No update without gradient: Adam's momentum and weight decay would make one.
            if not has_gradient[rows].any():
                continue
            sequences = step.sequences.select(rows)
            result = self.policy.update(
                self.objective,
                prepared.select(rows, length=sequences.input_ids.shape[1] - 1),
                sequences,
                micro_batch_size=policy.train_micro_batch_size,
                mb_tokens=policy.train_mb_tokens,
                temperature=self.temperature,
                scoring=scoring,
            )
            results.append(result)
        return results

    @property
    def temperature(self) -> float:
        """Divisor of the logits: the rollouts' sampling temperature; 1 where nothing is sampled."""
        if self.recipe.loss_fn.learns_from_demonstrations:
            return 1.0
        return self.recipe.policy.generation.temperature
