"""Random and fixed rollout steps for the tests of variants, and what each variant is tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from nemo_grpo import Objective, PreparedBatch, TokenBatch, global_counts

TOKEN_TENSORS = (
    "next_token_logprobs",
    "prev_logprobs",
    "generation_logprobs",
    "reference_policy_logprobs",
    "entropies",
)

PARAMETERS: dict[str, dict[str, Any]] = {
    "grpo": {"reference_policy_kl_penalty": 0.1},
    "dr_grpo": {"max_response_length": 7},
    "dapo": {},
    "clip_cov": {"covariance_min": 0.05, "covariance_max": 5.0, "clip_fraction": 0.2},
    "cw_grpo": {},
    "tr_grpo": {"reference_policy_kl_penalty": 0.1},
    "erpo": {"num_buckets": 2},
    "gpg": {},
    "gspo": {"ratio_clip_min": 0.05, "ratio_clip_max": 0.1},
    "cispo": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.1},
}
"""One setting per variant under which every part of it acts on small examples."""

FURTHER: list[tuple[str, dict[str, Any]]] = [
    (
        "cw_grpo",
        {"logprob_centering": "group", "scope": "batch", "ratio_clip_min": 0.2, "ratio_clip_max": 0.3},
    ),
    ("tr_grpo", {"weighting": "random", "kl_weighting": "outer"}),
    ("tr_grpo", {"weighting": "reverse", "kl_weighting": "none"}),
    ("gpg", {"reward_normalization": "batch", "aggregation": "sequence_mean"}),
    ("grpo", {"use_leave_one_out_baseline": True, "ratio_clip_c": 3.0, "aggregation": "constant",
              "max_response_length": 9}),
    ("erpo", {"num_buckets": 2, "entropy_statistics": "moving"}),
    ("tr_grpo", {"aggregation": "group_token_mean", "reference_policy_kl_penalty": 0.1}),
    ("gpg", {"aggregation": "group_token_mean", "use_alpha": False}),
    ("gpg", {"reference_policy_kl_penalty": 0.1}),
    ("gspo", {"use_importance_sampling_correction": True}),
    ("cispo", {"aggregation": "group_token_mean"}),
    ("sft", {}),
]  # fmt: skip

ALL = [*PARAMETERS.items(), *FURTHER]
IDS = [name if i < len(PARAMETERS) else f"{name}-{i}" for i, (name, _) in enumerate(ALL)]


@st.composite
def steps(draw: st.DrawFn) -> TokenBatch:
    """2-4 groups of 1-4 responses of 0-6 tokens; some rows excluded, some rewards equal."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    num_rows = sum(sizes)
    lengths = draw(st.lists(st.integers(0, 6), min_size=num_rows, max_size=num_rows))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.3]), min_size=num_rows, max_size=num_rows))
    excluded = draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    ids = [5 * group - 3 for group, size in enumerate(sizes) for _ in range(size)]
    batch = random_step(lengths, rewards, ids, draw(st.integers(0, 2**31)))
    return replace(batch, sample_mask=~(torch.tensor(excluded) & (torch.arange(num_rows) % 3 == 2)))


def random_step(
    lengths: Sequence[int], rewards: Sequence[float], group_ids: Sequence[int], seed: int = 0
) -> TokenBatch:
    """Random logprobs of the given shape, the current policy somewhat away from the previous one."""
    shape, generator = (len(lengths), max(*lengths, 1)), torch.Generator().manual_seed(seed)

    def rand() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    prev = -3 * rand() ** 2 - 1e-3
    return TokenBatch(
        next_token_logprobs=(prev + 0.8 * (rand() - 0.5)).requires_grad_(),
        prev_logprobs=prev,
        generation_logprobs=prev + 0.01 * (rand() - 0.5),
        reference_policy_logprobs=prev + 0.5 * (rand() - 0.5),
        entropies=2 * rand(),
        token_mask=torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        sample_mask=torch.ones(shape[0]),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(group_ids),
    )


def counts(batch: TokenBatch) -> dict[str, Any]:
    """What a loss divides by, of a batch that holds the whole step."""
    return dict(zip(("global_valid_toks", "global_valid_seqs"), global_counts(batch), strict=True))


def loss_and_gradient(
    objective: Objective, batch: TokenBatch, parts: list[Tensor] | None = None
) -> tuple[Tensor, Tensor, PreparedBatch]:
    """Loss summed over ``parts`` (rows; default: all at once), and its gradient in next_token_logprobs."""
    prepared = objective.prepare(batch, seed=11)
    current = batch.next_token_logprobs
    total = torch.zeros((), dtype=current.dtype)
    for rows in [torch.arange(len(batch.rewards))] if parts is None else parts:
        part = prepared.select(rows, next_token_logprobs=current[rows])
        total = total + objective.loss(part, **counts(batch))[0]
    (gradient,) = torch.autograd.grad(total, current)
    return total.detach(), gradient, prepared
