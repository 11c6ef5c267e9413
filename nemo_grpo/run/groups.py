"""Groups of scored responses, and the aligned tensors that a step's groups become; for both engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_grpo.core.batch import Sequences, TokenBatch
from nemo_grpo.core.random import response_ids
from nemo_grpo.core.resampling import has_signal
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.tasks import Problem


@dataclass(frozen=True)
class Scored:
    """A response with its reward.

    Attributes:
        response: Sampled response.
        scores: Components of the reward, by name.
        reward: Weighted sum of the scores. NaN means that there is no reward, see `reward_of`.
    """

    response: Response
    scores: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0


@dataclass(frozen=True)
class Group:
    """One prompt and its responses."""

    problem: Problem
    prompt: list[int]
    responses: list[Scored]

    def has_signal(self, *, drop_truncated: bool = False) -> bool:
        """True if the group has a gradient: its rewards differ, and at least one response is in the loss.

        Args:
            drop_truncated: True if truncated responses are left out of the loss. Their rewards still count
                in the comparison.
        """
        rewards = [scored.reward for scored in self.responses]
        trains = [not (drop_truncated and scored.response.truncated) for scored in self.responses]
        return has_signal(rewards, trains)


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
    truncated: Tensor

    @property
    def response_lengths(self) -> Tensor:
        """Number of tokens of each response, [B] int64, with those of an environment's text."""
        return self.sequences.lengths - self.sequences.prompt_lengths

    def token_batch(
        self,
        prev_logprobs: Tensor,
        entropies: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
    ) -> TokenBatch:
        """Build the batch for the loss from this step and the policy's logprobs.

        Args:
            prev_logprobs: [B, S - 1], of the policy before the step's first update.
            entropies: [B, S - 1], of the same policy.
            reference_logprobs: [B, S - 1], of the reference policy.
        """
        return TokenBatch(
            prev_logprobs=prev_logprobs,
            entropies=entropies,
            reference_policy_logprobs=reference_logprobs,
            generation_logprobs=self.generation_logprobs,
            token_mask=self.token_mask,
            sample_mask=self.sample_mask,
            rewarded=~self.rewards.isnan(),
            rewards=self.rewards,
            group_ids=self.group_ids,
            response_ids=self.response_ids,
        )


def assemble(groups: Sequence[Group]) -> Step:
    """Lay a step's groups out as tensors.

    Column t of a token tensor belongs to input_ids[:, t + 1], so a response that starts at position p starts
    at column p - 1. An environment's text is context: its columns are False in the mask. Rows are padded with
    token 0, because many tokenizers have no padding token. A response without a reward is masked as a whole.
    """
    prompts = [group.prompt for group in groups for _ in group.responses]
    scored_responses = [scored for group in groups for scored in group.responses]
    responses = [scored.response for scored in scored_responses]
    group_ids = torch.tensor([index for index, group in enumerate(groups) for _ in group.responses])
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    response_lengths = torch.tensor([len(response.tokens) for response in responses])
    lengths = prompt_lengths + response_lengths

    ids = torch.zeros(len(responses), int(lengths.max()), dtype=torch.int64)
    generation_logprobs = torch.zeros(len(responses), ids.shape[1] - 1)
    token_mask = torch.zeros(generation_logprobs.shape, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start = len(prompt)
        end = int(lengths[row])
        ids[row, :start] = torch.tensor(prompt)
        ids[row, start:end] = response.tokens
        generation_logprobs[row, start - 1 : end - 1] = response.logprobs
        token_mask[row, start - 1 : end - 1] = response.token_mask

    rewards = torch.tensor([scored.reward for scored in scored_responses], dtype=torch.float32)
    sampled_tokens = [response.tokens[response.token_mask].tolist() for response in responses]
    return Step(
        sequences=Sequences(ids, lengths, prompt_lengths, group_ids),
        token_mask=token_mask,
        sample_mask=~rewards.isnan(),
        generation_logprobs=generation_logprobs,
        rewards=rewards,
        group_ids=group_ids,
        response_ids=response_ids(zip(prompts, sampled_tokens, strict=True)),
        truncated=torch.tensor([response.truncated for response in responses]),
    )
