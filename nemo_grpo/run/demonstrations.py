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
    """Demonstrations of a recipe's problems, for both engines.

    A problem gets the same demonstration each time, on every process and after a resume.
    """

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
        """Refuse demonstrations that cannot be encoded, or that are too long.

        All training problems are checked, or the first `PROMPTS_CHECKED` of a task that makes its problems.

        Args:
            problems: Validation problems to check as well.
        """
        for index in range(getattr(self.task, "num_train_problems", PROMPTS_CHECKED)):
            self.training(index)
        for problem in problems:
            self.held_out(problem)

    def _demonstrate(self, problem: Problem, rng: random.Random) -> Group:
        """Build the group of one problem and its demonstration.

        Args:
            problem: Problem to demonstrate.
            rng: Seeded by the problem's number or id, so that the problem always gets the same demonstration.
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
    """Build the group of one problem and its demonstration, which ends with the end-of-sequence token.

    The environment's text between turns is context, as in a rollout. Logprobs and reward are 0, because
    nothing was sampled or scored.

    Args:
        tokenizer: Tokenizer of the model.
        task: Task of the problem.
        prompt: Section ``nemo_grpo.prompt`` of the recipe.
        problem: Problem to demonstrate.
        rng: Random numbers for tasks whose demonstrations vary.
        limit: Longest sequence in tokens.
        key: Key of the recipe that sets ``limit``, for messages.
        prompt_tokens: Tokens of a prompt with images. By default `encode_prompt` makes the prompt's tokens.
    """
    if prompt_tokens is None:
        prompt_tokens = encode_prompt(tokenizer, prompt, problem)
    # The prompt already ends with the response's prefix.
    text = task.demonstration(problem, rng).removeprefix(prompt.response_prefix)
    # Pairs of a text and a flag: True for the policy's own text, False for the environment's.
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
