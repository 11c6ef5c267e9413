"""Supervised training: the loop of `Trainer` on demonstrations instead of rollouts."""

from __future__ import annotations

import time
from typing import Any

from nemo_grpo.engine.demonstrations import demonstrated
from nemo_grpo.engine.records import Clock, mean_metrics
from nemo_grpo.engine.rollout import Group, Step, assemble
from nemo_grpo.engine.trainer import Trainer
from nemo_grpo.sampling.prompting import PROMPTS_CHECKED
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.base import stream


class SupervisedTrainer(Trainer):
    """One run of an sft recipe on the embedded engine: a step is one update on its demonstrations.

    Checkpoints, resuming, layouts, LoRA, packing, sampled validation and export are `Trainer`'s.
    """

    def _check_prompts(self) -> None:
        """Encode every demonstration before anything is written, of an endless stream the first ones."""
        self._encode(self.problems)
        self.held_out = self._demonstrate([(problem, (problem.id,)) for problem in self.problems])
        for index in range(getattr(self.task, "num_train_problems", PROMPTS_CHECKED)):
            self._training_groups(index, 1)

    def train_step(self) -> dict[str, Any]:
        """One update on the next demonstrations; returns its metrics."""
        recipe, state, clock = self.recipe, self.state, Clock()
        number = recipe.grpo.num_prompts_per_step
        step = self._assemble(self._training_groups(state.next_problem, number))
        state.next_problem += number
        prepared = self.objective.prepare(step.token_batch(step.generation_logprobs, None, None))
        clock.lap("time/data")
        updates = self.learner.update(prepared, step, state)
        clock.lap("time/update")
        state.step += 1
        num_tokens = int(step.token_mask.sum())
        state.tokens += num_tokens
        lengths = step.token_mask.sum(1)
        seconds = sum(clock.laps.values())
        return (
            {"step": state.step}
            | mean_metrics(updates)
            | {"length/mean": float(lengths.double().mean()), "length/max": float(lengths.max())}
            | clock.laps
            | {"time/step": seconds, "tokens_per_second": num_tokens / seconds}
            | {"steps/skipped": state.skipped, "tokens/trained": state.tokens}
        )

    def validate(self) -> dict[str, float]:
        """Mean loss per token of the held-out demonstrations, and what `Trainer` samples."""
        start, step = time.monotonic(), self._assemble(self.held_out)
        logprobs = self.learner.score(step, with_entropies=False).logprobs
        loss = -logprobs[step.token_mask].double().mean()
        sampled = super().validate()
        return {"validation/val_loss": float(loss)} | sampled | {"time/validation": time.monotonic() - start}

    def _training_groups(self, first: int, number: int) -> list[Group]:
        """The demonstrations with these numbers in the training stream; always the same ones."""
        seed = self.recipe.grpo.seed
        return self._demonstrate(
            [(self.task.train_problem(index, seed), (seed, index)) for index in range(first, first + number)]
        )

    def _demonstrate(self, problems: list[tuple[Problem, tuple[object, ...]]]) -> list[Group]:
        """Each problem with the demonstration that its seed chooses."""
        key, limit = "policy.max_total_sequence_length", self.recipe.policy.max_total_sequence_length
        return [
            demonstrated(
                self.tokenizer,
                self.task,
                self.recipe.nemo_grpo.prompt,
                problem,
                stream("demonstration", *seed),
                limit=limit,
                key=key,
            )
            for problem, seed in problems
        ]

    def _assemble(self, groups: list[Group]) -> Step:
        return assemble(groups, pad_id=self.tokenizer.pad_token_id, overlong=None, drop_truncated=False)
