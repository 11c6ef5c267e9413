"""Learning from a step's groups: score the tokens, decide advantages on whole groups, update the policy."""

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
    """Progress of a run: everything that a resumed run needs besides policy and optimizer.

    The state of random generators is not needed, because the run's seed and the counters here seed every
    random choice of a step.

    Attributes:
        step: Number of finished steps.
        next_problem: Position in the stream of training problems.
        skipped_in_a_row: Number of most recent steps without an update because the loss or gradient was not
            finite.
        skipped: Number of all such steps.
        no_signal: Number of steps without an update because all rewards within each group were equal.
        tokens: Number of response tokens in all steps.
        reached_goal: True if grpo.stop_at_validation_metric has ended the run.
        carried: Numbers that the objective carries from step to step, see `PreparedBatch`.
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
    """Trains the policy on the recipe's objective, step by step."""

    recipe: Recipe
    objective: Objective
    policy: MegatronPolicy
    state: TrainingState = field(default_factory=TrainingState)

    @property
    def has_ended(self) -> bool:
        """True if no step is left to train."""
        return self.state.step >= self.recipe.grpo.max_num_steps or self.state.reached_goal

    def learn(self, step: Step, clock: Clock) -> tuple[PreparedBatch, list[UpdateResult]]:
        """Take one training step: score the tokens, prepare the objective and update the policy.

        Returns:
            (prepared batch of the step, results of its updates).
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
        """True if the forward pass of a step's only update also gives the scores, which saves a pass.

        That works if the advantages do not depend on the scores.
        """
        return not self.objective.needs_scores and self.recipe.num_updates_per_step == 1

    def _update_and_score(
        self, step: Step, reference: Tensor | None
    ) -> tuple[PreparedBatch, list[UpdateResult]]:
        """Update, then prepare the step once more, so that its metrics use the scores of the update."""
        # No loss reads these scores: with `scoring` an update uses its own logprobs as the previous ones.
        unread_scores = Scores(step.generation_logprobs)
        updates = self.update(self.prepare(step, unread_scores, reference), step, scoring=True)
        # Without a row that has a gradient there was no update, and so there are no scores yet.
        if not updates:
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
        """Compute the objective's advantages and weights on whole groups.

        Args:
            step: The step's groups as tensors.
            scores: Scores [B, T] of the policy before the step.
            reference: Logprobs [B, T] of the reference policy.
            scored: [B] bool, False for rows without scores, see `TokenBatch`. By default all have scores.
        """
        logprobs = scores.logprobs
        # Rows that the update left out have no scores, and keep the sampler's logprobs.
        if scored is not None:
            logprobs = torch.where(scored[:, None], logprobs, step.generation_logprobs)
        batch = step.token_batch(logprobs, scores.entropies, reference)
        batch = replace(batch, carried=self.state.carried, scored=scored)
        return self.objective.prepare(batch, seed=step_seed(self.recipe.grpo.seed, self.state.step))

    def update(self, prepared: PreparedBatch, step: Step, *, scoring: bool = False) -> list[UpdateResult]:
        """Make an optimizer step for every train_global_batch_size rows, unless they have no gradient.

        Args:
            prepared: Prepared batch of the step.
            step: The step's groups as tensors.
            scoring: See `MegatronPolicy.update`.
        """
        policy = self.recipe.policy
        num_rows = len(step.rewards)
        rows_per_update = min(policy.train_global_batch_size, num_rows)
        has_gradient = self.objective.rows_with_gradient(prepared.advantages, prepared.batch.mask)
        results = []
        for rows in torch.arange(num_rows).split(rows_per_update):
            # Rows without a gradient are skipped: Adam's momentum and weight decay would change the weights.
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
        """Divisor of the logits: the sampling temperature of the rollouts, or 1 if nothing is sampled."""
        if self.recipe.loss_fn.learns_from_demonstrations:
            return 1.0
        return self.recipe.policy.generation.temperature
