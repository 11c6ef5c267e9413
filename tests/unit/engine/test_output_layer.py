"""The loss and its gradient by parts, against autograd on all logits in float64."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_grpo.core.logprobs import logprobs_and_entropy
from nemo_grpo.engine.megatron.microbatches import plan_parts
from nemo_grpo.engine.megatron.output_layer import loss_in_parts

TOKENS, WIDTH, VOCAB = 11, 5, 17
TEMPERATURE = 0.7


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, a factor of each token."""
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS,)
    hidden, weight, factors = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, factors


def loss_of(factors: Tensor, logprobs: Tensor, entropies: Tensor | None) -> Tensor:
    """Not linear, so that a token's gradient depends on its logprob, and over all of the part's tokens."""
    assert entropies is not None
    assert not entropies.requires_grad
    return (factors * logprobs.exp() + entropies * logprobs).sum() + logprobs.sum() ** 2 / 10


def numbers(targets: Tensor, logits: Tensor, where: slice) -> tuple[Tensor, Tensor]:
    logprobs, entropies = logprobs_and_entropy(logits, targets[where], temperature=TEMPERATURE)
    return logprobs, entropies.detach()


def in_parts(bounds: list[int], most: int, hidden: Tensor, weight: Tensor, targets: Tensor, f: Tensor) -> Any:
    wheres = [slice(*pair) for pair in pairwise(bounds)]
    parts = [(where, partial(loss_of, f[where])) for where in wheres]
    return loss_in_parts(hidden, weight, parts, partial(numbers, targets), most)


def by_autograd(bounds: list[int], hidden: Tensor, weight: Tensor, targets: Tensor, f: Tensor) -> Tensor:
    log_p = torch.log_softmax(hidden @ weight.T / TEMPERATURE, -1)
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1).detach()
    wheres = [slice(*pair) for pair in pairwise(bounds)]
    return sum(loss_of(f[where], logprobs[where], entropies[where]) for where in wheres)


@pytest.mark.parametrize("most", [1, 4, 100])
@pytest.mark.parametrize("bounds", [[0, 11], [0, 4, 4, 5, 11]])
def test_loss_and_gradients_are_those_of_autograd(bounds, most):
    hidden, weight, targets, factors = drawn()
    expected = by_autograd(bounds, hidden, weight, targets, factors)
    of_expected = torch.autograd.grad(3.0 * expected, (hidden, weight))
    found = in_parts(bounds, most, hidden, weight, targets, factors)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (3.0 * found).backward()
    for tensor, gradient in zip((hidden, weight), of_expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        without = in_parts(bounds, most, hidden, weight, targets, factors)
    torch.testing.assert_close(without, expected.detach(), rtol=1e-12, atol=1e-12)


def test_parts_have_at_most_so_many_tokens():
    assert plan_parts([3, 4, 2, 1], 7) == [2, 2]


def test_a_part_has_whole_rows():
    assert plan_parts([3, 4, 2, 9, 1, 1], 7) == [2, 1, 1, 2]
    assert plan_parts([5], 2) == [1]


def test_sixteen_bit_gradients_of_parts_are_added_in_float32():
    """600 tokens with a gradient of 1/2 each; in bfloat16 the sum would stop at 128."""
    hidden = torch.ones(600, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = partial(numbers, torch.zeros(600, dtype=torch.int64))

    def loss(logprobs: Tensor, _entropies: Tensor | None) -> Tensor:
        return TEMPERATURE * logprobs.sum()

    loss_in_parts(hidden, weight, [(slice(i, i + 1), loss) for i in range(600)], targets, 100).backward()
    assert weight.grad is not None
    assert (weight.grad.dtype, weight.grad.tolist()) == (torch.bfloat16, [[300.0], [-300.0]])


@pytest.mark.parametrize("most", [4, 8, 100])
def test_logits_in_memory_are_those_of_a_few_tokens(most):
    hidden, weight, targets, factors = drawn()
    seen: list[int] = []

    def counting(logits: Tensor, where: slice) -> tuple[Tensor, Tensor]:
        seen.append(len(logits))
        return numbers(targets, logits, where)

    parts = [(slice(0, 3), partial(loss_of, factors[:3])), (slice(3, 11), partial(loss_of, factors[3:]))]
    loss_in_parts(hidden, weight, parts, counting, most)
    assert seen == ([3, 4, 4, 4, 4] if most == 4 else [3, 8])  # only a long part's logits are made twice
