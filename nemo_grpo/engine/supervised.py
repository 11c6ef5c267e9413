"""Supervised training: the loop of `Trainer` on demonstrations instead of rollouts."""

import time
from typing import Any

from nemo_grpo.engine.records import Clock, mean_metrics
from nemo_grpo.engine.trainer import Trainer
from nemo_grpo.sampling.generate_distributed import from_first_rank
from nemo_grpo.training.demonstrations import Demonstrations
from nemo_grpo.training.rollout import assemble


class SupervisedTrainer(Trainer):
    """One run of an sft recipe on the embedded engine: a step is one update on its demonstrations.

    Checkpoints, resuming, layouts, LoRA, packing, sampled validation and export are `Trainer`'s.
    """

    def _set_up_training_data(self) -> None:
        """Encode every demonstration before anything is written, of an endless stream the first ones."""
        self.demonstrations = Demonstrations(self.recipe, self.task, self.tokenizer)
        self.held_out = [self.demonstrations.held_out(problem) for problem in self.problems]
        self.demonstrations.check()

    def train_step(self) -> dict[str, Any]:
        """One update on the next demonstrations; returns its metrics."""
        recipe, state, clock = self.recipe, self.state, Clock()
        first, number = state.next_problem, recipe.grpo.num_prompts_per_step
        indices = range(first, first + number)
        with self._saving_first():
            groups = from_first_rank(lambda: [self.demonstrations.training(index) for index in indices])
        step = assemble(groups)
        state.next_problem += number
        prepared = self.objective.prepare(step.token_batch(step.generation_logprobs))
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
        start, step = time.monotonic(), assemble(self.held_out)
        logprobs = self.learner.score(step, with_entropies=False).logprobs
        loss = -logprobs[step.token_mask].double().mean()
        sampled = super().validate()
        return {"validation/val_loss": float(loss)} | sampled | {"time/validation": time.monotonic() - start}
