"""Rollouts: encode the prompts of problems, sample responses, and score them in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from nemo_grpo.core.random import step_seed
from nemo_grpo.evaluate.sampling import EvalRequest
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
    """The sampling side of a run.

    Attributes:
        recipe: Recipe of the run.
        task: Task of the recipe.
        scorer: Computes the rewards of responses.
        tokenizer: Tokenizer of the policy.
        vocab_size: Size of the policy's vocabulary.
        generator: Sampler, which gets the policy's weights before each rollout.
        sampling: Sampling parameters of the rollouts.
        validation_sampling: Sampling parameters of the validations.
        problems: Held-out problems for validation.
        demonstrations: Demonstrations of a supervised run, which take the place of rollouts.
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

    @cached_property
    def validation_requests(self) -> list[EvalRequest]:
        """Encoded prompts of the validation problems. They are the same in every validation."""
        prompts = self.encode(self.problems)
        return [
            EvalRequest(problem.id, tokens, images=())
            for problem, tokens in zip(self.problems, prompts, strict=True)
        ]

    def check_problems(self) -> None:
        """Refuse problems whose prompt or demonstration cannot be encoded, or is too long.

        So a bad problem ends the run at its start, not when its turn comes. All problems are checked, or the
        first `PROMPTS_CHECKED` of a task that makes its problems.
        """
        # The first access encodes the prompts and so checks them. Validations use the stored result.
        _ = self.validation_requests
        if self.demonstrations is not None:
            self.demonstrations.check(self.problems)
            return
        num_problems = getattr(self.task, "num_train_problems", PROMPTS_CHECKED)
        seed = self.recipe.grpo.seed
        problems = (self.task.train_problem(index, seed) for index in range(num_problems))

        def encode_all() -> None:
            # The problems are encoded in batches, because the token ids of a large data set need much memory.
            batch = list(islice(problems, PROMPTS_CHECKED))
            while batch:
                self.encode(batch)
                batch = list(islice(problems, PROMPTS_CHECKED))

        from_first_rank(encode_all)

    def draw(self, first: int) -> list[Group]:
        """Sample and score responses to the next ``num_prompts_per_step`` problems.

        Args:
            first: Number of the first problem in the training stream.
        """
        grpo = self.recipe.grpo
        numbers = range(first, first + grpo.num_prompts_per_step)
        problems = [self.task.train_problem(number, grpo.seed) for number in numbers]
        # The seed depends only on the position, so a resumed run samples the same as an uninterrupted one.
        seed = step_seed(grpo.seed, first)
        request = Request(self.encode(problems), grpo.num_generations_per_prompt, self.sampling, seed)
        return sample_groups(self.generator, self.tokenizer, self.scorer, problems, request)


def sample_groups(
    generator: Generator, tokenizer: Any, scorer: Scorer, problems: Sequence[Problem], request: Request
) -> list[Group]:
    """Sample and score the responses to a request, whose prompts are those of ``problems``.

    The first rank scores for all ranks: near a grader's time limit two calls may give different verdicts.
    """
    num_generations = request.num_generations
    responses = sample_responses(generator, tokenizer, scorer.task, request, scorer.first_words)
    texts = [response.text for response in responses]
    repeated_problems = [problem for problem in problems for _ in range(num_generations)]
    scores = from_first_rank(lambda: scorer(repeated_problems, texts))
    scored = [
        Scored(response, components, scorer.reward(components))
        for response, components in zip(responses, scores, strict=True)
    ]
    groups = []
    for index, problem in enumerate(problems):
        first = index * num_generations
        groups.append(Group(problem, request.prompts[index], scored[first : first + num_generations]))
    return groups
