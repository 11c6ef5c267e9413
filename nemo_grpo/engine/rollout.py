"""Rollouts: prompts to groups of scored responses, groups to the aligned tensors of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.random import response_ids
from nemo_grpo.core.resampling import rewards_differ
from nemo_grpo.core.reward_shaping import overlong_penalty
from nemo_grpo.engine.episodes import sample_responses
from nemo_grpo.engine.generate_distributed import from_first_rank
from nemo_grpo.engine.protocols import Generator, SamplingParams
from nemo_grpo.tasks import Problem, Task
from nemo_grpo.tasks.environment import Episode


@dataclass(frozen=True)
class Response:
    """One sampled response: tokens, the sampler's logprobs (nats), reward components, weighted reward.

    Attributes: token_mask: [T] bool; False where an environment spoke. None: the policy wrote every token.
                episode: the turns of a task that has some.
    """

    tokens: Tensor
    logprobs: Tensor
    truncated: bool
    text: str
    scores: dict[str, float]
    reward: float
    token_mask: Tensor | None = None
    episode: Episode | None = None


@dataclass(frozen=True)
class Group:
    """One prompt and its responses."""

    problem: Problem
    prompt: list[int]
    responses: list[Response]

    def has_signal(self, *, drop_truncated: bool = False) -> bool:
        """True if the rewards of the responses that train differ: what is masked out can give no gradient.

        DAPO's aim is a step in which every prompt has one, so what overlong filtering drops does not count.
        """
        return rewards_differ([r.reward for r in self.responses if not (drop_truncated and r.truncated)])


@dataclass(frozen=True)
class Sequences:
    """Prompts with responses as token ids, right-padded.

    Attributes: input_ids: [B, S] int64.  lengths: [B] int64.
                prompt_lengths: [B] int64, at least 1 and less than ``lengths``; the tokens that follow need
                    logprobs. Default: 1, so all but the first.
                prompt_ids: [B] integers; equal only for rows that begin with the same prompt. Default: all
                    different.
    """

    input_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor = None  # type: ignore[assignment]  # filled below, so readers see a Tensor
    prompt_ids: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.prompt_lengths is None:
            object.__setattr__(self, "prompt_lengths", torch.ones_like(self.lengths))
        if self.prompt_ids is None:
            object.__setattr__(self, "prompt_ids", torch.arange(len(self.lengths)))

    def select(self, rows: Tensor) -> Sequences:
        """The given rows, cut to their longest."""
        lengths = self.lengths[rows]
        return Sequences(
            self.input_ids[rows, : int(lengths.max())],
            lengths,
            self.prompt_lengths[rows],
            self.prompt_ids[rows],
        )


@dataclass(frozen=True)
class Step:
    """A step's groups as tensors; token tensors are [B, S - 1] and aligned as in `TokenBatch`."""

    sequences: Sequences
    token_mask: Tensor
    sample_mask: Tensor
    generation_logprobs: Tensor
    rewards: Tensor
    group_ids: Tensor
    response_ids: Tensor

    def token_batch(self, prev: Tensor, entropies: Tensor | None, reference: Tensor | None) -> TokenBatch:
        """Join with what the policy's scoring gave; each [B, S - 1]."""
        return TokenBatch(
            prev_logprobs=prev,
            entropies=entropies,
            reference_policy_logprobs=reference,
            generation_logprobs=self.generation_logprobs,
            token_mask=self.token_mask,
            sample_mask=self.sample_mask,
            rewards=self.rewards,
            group_ids=self.group_ids,
            response_ids=self.response_ids,
        )


def sample_groups(
    generator: Generator,
    tokenizer: Any,
    task: Task,
    problems: Sequence[Problem],
    prompts: Sequence[list[int]],
    *,
    num_generations: int,
    sampling: SamplingParams,
    reward_weights: Mapping[str, float],
    seed: int,
) -> list[Group]:
    """Sample ``num_generations`` responses to each problem and score them.

    The first rank scores for all: a verdict at a grader's time limit may differ between two calls.
    """
    sampled = sample_responses(generator, tokenizer, task, prompts, num_generations, sampling, seed)
    scored = from_first_rank(
        lambda: [task.score(problems[i // num_generations], one.text) for i, one in enumerate(sampled)]
    )
    groups = []
    for index, problem in enumerate(problems):
        rows = slice(index * num_generations, (index + 1) * num_generations)
        responses = []
        for one, scores in zip(sampled[rows], scored[rows], strict=True):
            reward = sum(weight * scores[name] for name, weight in reward_weights.items())
            responses.append(
                Response(
                    one.tokens,
                    one.logprobs,
                    one.truncated,
                    one.text,
                    scores,
                    reward,
                    token_mask=one.token_mask,
                    episode=one.episode,
                )
            )
        groups.append(Group(problem, prompts[index], responses))
    return groups


@dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft length penalty; see `overlong_penalty`."""

    max_response_length: int
    buffer_length: int
    penalty: float

    def __call__(self, lengths: Tensor) -> Tensor:
        return overlong_penalty(
            lengths,
            max_response_length=self.max_response_length,
            buffer_length=self.buffer_length,
            penalty=self.penalty,
        )


def assemble(
    groups: Sequence[Group], *, pad_id: int, overlong: OverlongPenalty | None, drop_truncated: bool
) -> Step:
    """Lay a step's groups out as tensors.

    Token column t speaks of input_ids[:, t + 1], so a response that starts at position p is counted from
    column p - 1. What an environment said is context: its columns are False in the mask.

    Args: overlong: added to the rewards.  drop_truncated: leave truncated responses out of loss and
          statistics.
    """
    flat = [(g, group.prompt, response) for g, group in enumerate(groups) for response in group.responses]
    prompt_lengths = torch.tensor([len(prompt) for _, prompt, _ in flat])
    response_lengths = torch.tensor([len(response.tokens) for _, _, response in flat])
    lengths = prompt_lengths + response_lengths
    ids = torch.full((len(flat), int(lengths.max())), pad_id)
    generation_logprobs = torch.zeros(len(flat), ids.shape[1] - 1)
    token_mask = torch.zeros(generation_logprobs.shape, dtype=torch.bool)
    for row, (_, prompt, response) in enumerate(flat):
        start, end = len(prompt), int(lengths[row])
        ids[row, :start] = torch.tensor(prompt)
        ids[row, start:end] = response.tokens
        generation_logprobs[row, start - 1 : end - 1] = response.logprobs
        token_mask[row, start - 1 : end - 1] = True if response.token_mask is None else response.token_mask
    rewards = torch.tensor([response.reward for _, _, response in flat], dtype=torch.float32)
    if overlong is not None:
        rewards = rewards + overlong(response_lengths)
    truncated = torch.tensor([response.truncated for _, _, response in flat])
    group_ids = torch.tensor([g for g, _, _ in flat])
    return Step(
        sequences=Sequences(ids, lengths, prompt_lengths, group_ids),
        token_mask=token_mask,
        sample_mask=~truncated if drop_truncated else torch.ones_like(truncated),
        generation_logprobs=generation_logprobs,
        rewards=rewards,
        group_ids=group_ids,
        response_ids=response_ids([(prompt, _written(response)) for _, prompt, response in flat]),
    )


def _written(response: Response) -> list[int]:
    """The tokens of a response that the policy wrote."""
    mask = response.token_mask
    return (response.tokens if mask is None else response.tokens[mask]).tolist()
