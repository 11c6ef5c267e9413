"""Rollouts: problems to prompts, prompts to groups of scored responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nemo_grpo.core.random import step_seed
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.demonstrations import Demonstrations
from nemo_grpo.run.groups import Group, Scored
from nemo_grpo.sampling.episodes import sample_responses
from nemo_grpo.sampling.requests import Generator, Request, SamplingParams
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.tasks import Problem, Task
from nemo_grpo.tasks.prompts import PROMPTS_CHECKED, encode_prompts
from nemo_grpo.tasks.scoring import Scorer


@dataclass(frozen=True)
class Rollouts:
    """Sampling side of a run: its task, its tokenizer, and a generator that takes the policy's weights.

    Attributes: vocab_size: the policy's.  problems: held out, for validation.
                demonstrations: of a supervised run, which learns from them instead.
    """

    recipe: Recipe
    task: Task
    scorer: Scorer
    tokenizer: Any
    vocab_size: int
    generator: Generator
    sampling: SamplingParams
    validation_sampling: SamplingParams
    problems: list[Problem]
    demonstrations: Demonstrations | None = None

    def encode(self, problems: list[Problem]) -> list[list[int]]:
        """Return the token ids of the problems' prompts."""
        return encode_prompts(
            problems,
            self.tokenizer,
            self.recipe.nemo_grpo.prompt,
            limit=self.recipe.policy.max_total_sequence_length,
            max_new_tokens=self.sampling.max_new_tokens,
            vocab_size=self.vocab_size,
        )

    def check_problems(self) -> None:
        """Encode all prompts or demonstrations, of an endless stream the first ones.

        A problem that cannot be used ends the run now, not at its turn.
        """
        self.encode(self.problems)
        if self.demonstrations is not None:
            self.demonstrations.check(self.problems)
            return
        number = getattr(self.task, "num_train_problems", PROMPTS_CHECKED)
        seed = self.recipe.grpo.seed
        problems = (self.task.train_problem(index, seed) for index in range(number))

        def encode_all() -> None:
            while some := list(islice(problems, PROMPTS_CHECKED)):
                self.encode(some)

        from_first_rank(encode_all)

    def draw(self, first: int) -> list[Group]:
        """Sample and score the responses to ``num_prompts_per_step`` problems, from number ``first`` on."""
        grpo = self.recipe.grpo
        numbers = range(first, first + grpo.num_prompts_per_step)
        problems = [self.task.train_problem(number, grpo.seed) for number in numbers]
        seed = step_seed(grpo.seed, first)
        request = Request(self.encode(problems), grpo.num_generations_per_prompt, self.sampling, seed)
        return sample_groups(self.generator, self.tokenizer, self.scorer, problems, request)


def sample_groups(
    generator: Generator, tokenizer: Any, scorer: Scorer, problems: Sequence[Problem], request: Request
) -> list[Group]:
    """Sample and score a request's responses; its prompts are those of ``problems``.

    The first rank scores for all: a verdict at a grader's time limit may differ between two calls.
    """
    sampled = sample_responses(generator, tokenizer, scorer.task, request, scorer.first_words)
    num_generations = request.num_generations
    rows = [problem for problem in problems for _ in range(num_generations)]
    scored = from_first_rank(lambda: scorer(rows, [one.text for one in sampled]))
    groups = []
    for index, problem in enumerate(problems):
        part = slice(index * num_generations, (index + 1) * num_generations)
        responses = [
            Scored(one, scores, scorer.reward(scores))
            for one, scores in zip(sampled[part], scored[part], strict=True)
        ]
        groups.append(Group(problem, request.prompts[index], responses))
    return groups
