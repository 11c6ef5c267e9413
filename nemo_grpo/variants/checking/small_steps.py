"""Small rollout steps of random numbers, and the loss of one of them in parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nemo_grpo.core.batch import PreparedBatch, TokenBatch, global_counts
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Objective, Shaped

TOKEN_TENSORS = (
    "next_token_logprobs",
    "prev_logprobs",
    "generation_logprobs",
    "reference_policy_logprobs",
    "entropies",
)
SEED = 11
"""Seed of the step's draws in every check."""


def random_step(
    lengths: Sequence[int],
    rewards: Sequence[float],
    group_ids: Sequence[int],
    seed: int = 0,
    spread: float = 1.0,
) -> TokenBatch:
    """Draw a step of random logprobs. The current policy's differ somewhat from the scored ones.

    Args:
        lengths: response tokens of each row.
        rewards: reward of each row.
        group_ids: group of each row.
        seed: seed of the random numbers.
        spread: factor of all logprobs and their differences.
    """
    shape = (len(lengths), max(*lengths, 1))
    generator = torch.Generator().manual_seed(seed)

    def rand() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    prev = -3 * spread * rand() ** 2 - 1e-3
    return TokenBatch(
        next_token_logprobs=(prev + 0.8 * spread * (rand() - 0.5)).requires_grad_(),
        prev_logprobs=prev,
        generation_logprobs=prev + 0.01 * spread * (rand() - 0.5),
        reference_policy_logprobs=prev + 0.5 * spread * (rand() - 0.5),
        entropies=2 * rand(),
        token_mask=torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        sample_mask=torch.ones(shape[0]),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(group_ids),
    )


def example_step(seed: int = 5) -> TokenBatch:
    """Draw a step of two groups, with an empty, a one-token and a truncated response."""
    return random_step([4, 1, 0, 3, 4], [1.0, 0.0, 0.0, 1.0, 0.3], [0, 0, 0, 1, 1], seed)


def distinct_ids(num_responses: int) -> Tensor:
    """Make response ids [B], so that draws go by them and not by the bits of the scored logprobs."""
    return torch.arange(num_responses) * 7919  # a prime, so that they look like no row numbers


def changed(batch: TokenBatch, **changes: Any) -> TokenBatch:
    """Replace fields of a batch; its current logprobs become a new leaf."""
    new = replace(batch, **changes)
    return replace(new, next_token_logprobs=new.next_token_logprobs.detach().clone().requires_grad_())


def counts(batch: TokenBatch) -> dict[str, Any]:
    """Count the tokens and sequences of a whole step, as the arguments by which `Objective.loss` divides."""
    num_tokens, num_sequences = global_counts(batch)
    return {"global_valid_toks": num_tokens, "global_valid_seqs": num_sequences}


def token_tensors(batch: TokenBatch, dtype: Any = None) -> dict[str, Tensor]:
    """Return the `TOKEN_TENSORS` that the batch has, without gradient."""
    tensors = {}
    for name in TOKEN_TENSORS:
        tensor = getattr(batch, name)
        if tensor is not None:
            tensors[name] = tensor.detach().to(dtype or tensor.dtype)
    return tensors


def loss_and_gradient(
    objective: Objective, batch: TokenBatch, parts: Sequence[Tensor] | None = None, *, folded: bool = False
) -> tuple[Tensor, Tensor, PreparedBatch]:
    """Sum the loss over parts of a step.

    Args:
        objective: the loss.
        batch: the whole step.
        parts: rows of each part; None: all at once.
        folded: take the folded step and objective.
    Returns: (loss, gradient by the current logprobs [B, T], prepared step).
    """
    prepared = objective.prepare(batch, seed=SEED)
    if folded:
        prepared = prepared.folded()
        objective = objective.folded()
    total = loss_of(objective, prepared, batch.next_token_logprobs, parts)
    (gradient,) = torch.autograd.grad(total, batch.next_token_logprobs)
    return total.detach(), gradient, prepared


def loss_of(
    objective: Objective, prepared: PreparedBatch, current: Tensor, rows: Sequence[Tensor] | None = None
) -> Tensor:
    """Sum the step's loss over parts, as `split` makes them, at these logprobs of the policy."""
    losses = []
    for part in split(objective, prepared, current, rows):
        loss, _ = objective.loss(part, **counts(prepared.batch))
        losses.append(loss)
    return torch.stack(losses).sum()


def split(
    objective: Objective, prepared: PreparedBatch, current: Tensor, rows: Sequence[Tensor] | None = None
) -> list[PreparedBatch]:
    """Divide a step into parts with these rows.

    By default all rows are one part, or each group is one if the loss needs whole groups.
    """
    batch = prepared.batch
    if rows is None and objective.whole_groups_per_loss_call:
        rows = [torch.nonzero(batch.group_ids == group).flatten() for group in batch.group_ids.unique()]
    elif rows is None:
        rows = [torch.arange(len(batch.rewards))]
    return [prepared.select(part, next_token_logprobs=current[part]) for part in rows]


def shaped_by(objective: Objective, batch: TokenBatch) -> Shaped:
    """Compute advantages and weights as `Objective.prepare` does."""
    clean = batch.clean()
    return objective.shape(replace(clean, next_token_logprobs=clean.prev_logprobs), SEED)
