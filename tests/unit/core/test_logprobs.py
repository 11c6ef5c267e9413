"""Chunked logprobs and entropies against the textbook, values and gradients."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_grpo.core.logprobs import IGNORED, logprobs_and_entropy, next_token_logprobs


def textbook(logits, targets, temperature=1.0):
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def example(dtype=torch.float64, shape=(3, 5), vocab=11, scale=3.0):
    generator = torch.Generator().manual_seed(1)
    logits = (scale * torch.randn(*shape, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    return logits.requires_grad_(), torch.randint(vocab, shape, generator=generator)


def test_values_by_hand():
    """Logits 0, 0, ln 2: probabilities 1/4, 1/4, 1/2; H = 1.5 ln 2."""
    logits = torch.tensor([[0.0, 0.0, torch.tensor(2.0).log()]], dtype=torch.float64)
    logp, entropy = logprobs_and_entropy(logits, torch.tensor([2]))
    assert logp.item() == pytest.approx(-0.6931471805599453)
    assert entropy.item() == pytest.approx(1.5 * 0.6931471805599453)


@settings(max_examples=30, deadline=None)
@given(chunk=st.integers(1, 40), temperature=st.sampled_from([0.3, 1.0, 2.5]), seed=st.integers(0, 99))
def test_values_and_gradients_do_not_depend_on_the_chunk_size(chunk, temperature, seed):
    logits, targets = example()
    weights = torch.randn(
        2, *targets.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    def gradient(logp, entropy):
        return torch.autograd.grad((weights[0] * logp).sum() + (weights[1] * entropy).sum(), logits)[0]

    ours = logprobs_and_entropy(logits, targets, temperature=temperature, chunk_size=chunk)
    expected = textbook(logits, targets, temperature)
    torch.testing.assert_close(ours[0], expected[0])
    torch.testing.assert_close(ours[1], expected[1])
    torch.testing.assert_close(gradient(*ours), gradient(*expected))


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_thousand_tokens_take_as_many_operations_on_a_gpu_as_one():
    """Launching a few kernels for every 6 tokens took two thirds of an update on an H200."""

    def operations(num_tokens: int) -> int:
        logits = torch.empty(num_tokens, 32_000, device="meta")  # no CPU: as on a GPU
        with Operations() as counted:
            logprobs_and_entropy(logits, torch.empty(num_tokens, dtype=torch.int64, device="meta"))
        return counted.count

    assert operations(1000) == operations(1) > 10


@pytest.mark.parametrize("unused", [0, 1])
def test_an_unused_output_leaves_the_other_gradient_alone(unused):
    logits, targets = example()
    (ours,) = torch.autograd.grad(logprobs_and_entropy(logits, targets)[1 - unused].sum(), logits)
    (expected,) = torch.autograd.grad(textbook(logits, targets)[1 - unused].sum(), logits)
    torch.testing.assert_close(ours, expected)


def test_logprobs_alone_are_the_same_bits_and_gradient():
    logits, targets = example()
    of_one = torch.log_softmax(logits.detach(), -1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(next_token_logprobs(logits, targets), of_one, rtol=1e-5, atol=1e-6)
    alone = next_token_logprobs(logits, targets, temperature=0.7, chunk_size=4)
    both, _ = logprobs_and_entropy(logits, targets, temperature=0.7, chunk_size=4)
    assert torch.equal(alone, both)
    (ours,) = torch.autograd.grad(alone.square().sum(), logits)
    (expected,) = torch.autograd.grad(both.square().sum(), logits)
    assert torch.equal(ours, expected)
    assert ours.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_accumulated_in_float32(dtype):
    logits, targets = example(dtype, shape=(64,), vocab=4096, scale=1.0)
    logp, entropy = logprobs_and_entropy(logits, targets, chunk_size=7)
    expected = textbook(logits.detach(), targets)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_an_offset_of_float32_logits_changes_nothing(offset):
    """Logits in steps of 2^-10, so that the sums with 1e4 are exact; one is far above the others."""
    logits, targets = example(torch.float32, shape=(6,))
    plain = ((logits.detach() * 1024).round() / 1024).requires_grad_()
    with torch.no_grad():
        plain[0, 3] = 90.0
    moved = (plain.detach() + offset).requires_grad_()
    one, two = logprobs_and_entropy(plain, targets), logprobs_and_entropy(moved, targets)
    for here, there in zip(one, two, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)
    gradients = [
        torch.autograd.grad(sum(x.sum() for x in pair), y) for pair, y in ((one, plain), (two, moved))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"targets": torch.zeros(3, 4, dtype=torch.int64)}, "targets"), ({"temperature": 0.0}, "temperature=0"),
     ({"chunk_size": 0}, "chunk_size=0")],
)  # fmt: skip
def test_bad_arguments_are_refused(change, message):
    logits, targets = example()
    arguments = {"targets": targets} | change
    with pytest.raises(ValueError, match=message):
        logprobs_and_entropy(logits, **arguments)


def test_an_ignored_target_has_logprob_0_and_no_gradient():
    logits, targets = example(shape=(4,))
    targets[1] = IGNORED
    logp, entropy = logprobs_and_entropy(logits, targets)
    logp.sum().backward()
    assert logp[1] == 0
    assert not logits.grad[1].any()
    assert logits.grad[[0, 2, 3]].any(1).all()
    assert entropy[1] > 0


@pytest.mark.parametrize(("target", "vocab_size"), [(11, None), (-1, None), (-101, None), (9, 9)])
def test_a_target_that_is_no_token_is_refused_with_its_place(target, vocab_size):
    logits, targets = example(shape=(2, 2))
    targets %= 9
    targets[1, 0] = target
    highest = (vocab_size or 11) - 1
    with pytest.raises(
        ValueError, match=rf"targets\[1, 0\] is {target}; a target is 0 to {highest}, or -100"
    ):
        next_token_logprobs(logits, targets, vocab_size=vocab_size)


class Ranks:
    """Threads that stand in for the ranks of a process group."""

    def __init__(self, number: int) -> None:
        self.number, self.barrier, self.given = number, threading.Barrier(number), {}

    def group(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: self.number, rank=lambda: rank)

    def all_reduce(self, x, op, group):
        self.given[group.rank()] = x.clone()
        self.barrier.wait()
        all_of_them = torch.stack([self.given[rank] for rank in range(self.number)])
        self.barrier.wait()
        x.copy_(all_of_them.amax(0) if op == dist.ReduceOp.MAX else all_of_them.sum(0))

    def run(self, work):
        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(work, range(self.number)))


def test_ranks_that_share_the_vocabulary_agree_with_one_that_has_all(monkeypatch):
    """Four ranks of 3 columns; 7 tokens, so that a rank holds padding alone; one has only -inf of a token."""
    logits, targets = example(shape=(6,), vocab=12)
    targets %= 7
    with torch.no_grad():
        logits[1, 3:6], logits[2, :6], logits[4, 2] = -torch.inf, -torch.inf, -torch.inf
    targets[:] = torch.tensor([0, 6, 6, 4, 5, 2])
    ranks = Ranks(4)
    monkeypatch.setattr("nemo_grpo.core.logprobs.dist.all_reduce", ranks.all_reduce)
    weights = torch.linspace(-1, 2, 12, dtype=torch.float64).view(2, 6)

    def work(rank):
        own = logits.detach()[:, 3 * rank : 3 * rank + 3].clone().requires_grad_()
        options = {"temperature": 0.7, "chunk_size": 4, "group": ranks.group(rank), "vocab_size": 7}
        numbers = torch.stack(logprobs_and_entropy(own, targets, **options))
        return numbers.detach(), torch.autograd.grad((numbers * weights).sum(), own)[0]

    found, gradients = zip(*ranks.run(work), strict=True)
    whole = logits.detach()[:, :7].clamp(min=-1e30).requires_grad_()
    expected = torch.stack(textbook(whole, targets, 0.7))
    (gradient,) = torch.autograd.grad((expected * weights).sum(), whole)
    for numbers in found:
        torch.testing.assert_close(numbers, expected.detach())
    torch.testing.assert_close(torch.cat(gradients, 1)[:, :7], gradient)
    assert not torch.cat(gradients, 1)[:, 7:].any()
