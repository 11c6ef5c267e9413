"""Rollouts: prompts to groups of scored responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_grpo.run.groups import Group, Scored
from nemo_grpo.sampling.episodes import sample_responses
from nemo_grpo.sampling.requests import Generator, Request
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.scoring import Scorer


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
