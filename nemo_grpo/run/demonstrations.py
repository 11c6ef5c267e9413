"""Demonstrations in place of rollouts: each problem becomes a group of one worked response."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_grpo.recipe import Recipe
from nemo_grpo.run.groups import Group, Scored
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt
from nemo_grpo.tasks.base import MultiTurnTask, stream
from nemo_grpo.tasks.prompts import PROMPTS_CHECKED


@dataclass(frozen=True)
class Demonstrations:
    """A recipe's demonstrations by number, for both engines; always the same ones."""

    recipe: Recipe
    task: Task
    tokenizer: Any

    def training(self, index: int) -> Group:
        """Return the demonstration of problem number ``index`` of the training stream."""
        seed = self.recipe.grpo.seed
        problem = self.task.train_problem(index, seed)
        return self._demonstrate(problem, stream("demonstration", seed, index))

    def held_out(self, problem: Problem) -> Group:
        """Return the demonstration of a validation problem."""
        return self._demonstrate(problem, stream("demonstration", problem.id))

    def check(self, problems: Sequence[Problem] = ()) -> None:
        """Encode the demonstrations of these problems and of training (of an endless stream, the first)."""
        for index in range(getattr(self.task, "num_train_problems", PROMPTS_CHECKED)):
            self.training(index)
        for problem in problems:
            self.held_out(problem)

    def _demonstrate(self, problem: Problem, rng: random.Random) -> Group:
        """Lay out a problem with its demonstration.

        Args:
            rng: seeded by the problem's number or id, so that it gets the same demonstration every time.
        """
        return demonstrated(
            self.tokenizer,
            self.task,
            self.recipe.nemo_grpo.prompt,
            problem,
            rng,
            limit=self.recipe.policy.max_total_sequence_length,
            key="policy.max_total_sequence_length",
        )


def demonstrated(
    tokenizer: Any,
    task: Task,
    prompt: Prompt,
    problem: Problem,
    rng: random.Random,
    *,
    limit: int,
    key: str,
    prompt_tokens: list[int] | None = None,
) -> Group:
    """Lay out a problem with its demonstration, up to the end-of-sequence token.

    The environment's text between turns is context, as in a rollout. Nothing was sampled or scored: logprobs
    and reward are 0.

    Args:
        rng: for tasks whose demonstrations vary.
        limit: longest sequence, tokens.
        key: the recipe's key that sets it.
        prompt_tokens: those of a prompt with images; None: `encode_prompt` makes them.
    """
    if prompt_tokens is None:
        prompt_tokens = encode_prompt(tokenizer, prompt, problem)
    # The prompt ends with the response's first words.
    text = task.demonstration(problem, rng).removeprefix(prompt.response_prefix)
    # (text, True if the policy is to write it; the environment's text is not).
    segments = task.segments(text) if isinstance(task, MultiTurnTask) else [(text, True)]
    tokens: list[int] = []
    mask: list[bool] = []
    # Segments are encoded one by one, as a rollout samples them: no token spans two of them.
    for segment, is_written in segments:
        ids = tokenizer(segment, add_special_tokens=False)["input_ids"]
        tokens += ids
        mask += [is_written] * len(ids)
    tokens.append(tokenizer.eos_token_id)
    mask.append(True)
    num_tokens = len(prompt_tokens) + len(tokens)
    if num_tokens > limit:
        raise UserError(
            f"{key}={limit}: problem {problem.id!r} with its demonstration has {num_tokens} tokens; raise "
            "it, or leave the problem out"
        )
    response = Response(
        tokens=torch.tensor(tokens),
        logprobs=torch.zeros(len(tokens)),
        token_mask=torch.tensor(mask),
        truncated=False,
        text=text,
    )
    return Group(problem, prompt_tokens, [Scored(response)])
