"""Core formulas against numbers worked out by hand, one token or one group at a time."""

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_grpo import TokenBatch, build_objective, global_counts
from nemo_grpo.core.advantages import group_advantages, implausible_advantage
from nemo_grpo.core.aggregation import aggregate
from nemo_grpo.core.importance import ImportanceCorrection
from nemo_grpo.core.kl import kl_estimate, weighted_k3, with_score_function
from nemo_grpo.core.statistics import Groups
from nemo_grpo.core.surrogates import (
    MAX_LOG_RATIO,
    clipped_policy_gradient,
    importance_ratio,
    sequence_importance_ratio,
)
from nemo_grpo.core.token_weights import (
    gaussian_kernel_weights,
    group_covariance,
    probability_weights,
    select_high_covariance,
    step_covariance,
)

LN2 = math.log(2)


def batch(prev, gen=None, *, mask=None, rewards=None, groups=None, valid=None) -> TokenBatch:
    prev = torch.tensor(prev, dtype=torch.float64)
    number = len(prev)
    return TokenBatch(
        prev_logprobs=prev,
        generation_logprobs=None if gen is None else torch.tensor(gen, dtype=torch.float64),
        token_mask=torch.ones(prev.shape, dtype=torch.bool) if mask is None else torch.tensor(mask).bool(),
        sample_mask=torch.ones(number, dtype=torch.bool) if valid is None else torch.tensor(valid).bool(),
        rewards=torch.tensor(rewards or [0.0] * number, dtype=torch.float64),
        group_ids=torch.tensor(groups or [0] * number),
    ).clean()


def close(found, expected) -> None:
    torch.testing.assert_close(
        found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize(
    ("kind", "value", "slope"),  # logp = -1, logp_ref = -1 + ln 2, so d = ln 2
    [("k1", -LN2, 1.0), ("k2", LN2**2 / 2, -LN2), ("k3", 2 - LN2 - 1, 1 - 2.0)],
)
def test_kl_estimators_and_their_derivatives(kind, value, slope):
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logp, logp.detach() + LN2, kind)
    close(kl.detach(), [[value]])
    close(torch.autograd.grad(kl.sum(), logp)[0], [[slope]])
    again = with_score_function(kl_estimate(logp, logp.detach() + LN2, kind), logp)
    close(again.detach(), [[value]])
    close(torch.autograd.grad(again.sum(), logp)[0], [[slope + value]])


# Two responses of two tokens. pi_prev / pi_gen: 2 and 4; 1/2 and 1.

PREV = [[-1.0, -1.0], [-1.0, -1.0]]
GEN = [[-1.0 - LN2, -1.0 - 2 * LN2], [-1.0 + LN2, -1.0]]


@pytest.mark.parametrize(
    ("correction", "weights", "outside"),
    [
        (ImportanceCorrection(), [[2, 4], [0.5, 1]], None),
        (ImportanceCorrection(sequence_level=True), [[8, 8], [0.5, 0.5]], None),
        (ImportanceCorrection("tis", 0.75, 3.0), [[2, 3], [0.75, 1]], [[0, 1], [1, 0]]),
        (ImportanceCorrection("icepop", 0.5, 2.0), [[2, 0], [0.5, 1]], [[0, 1], [0, 0]]),  # bounds are inside
        (ImportanceCorrection("icepop", 0.6, 1.9), [[0, 0], [0, 1]], [[1, 1], [1, 0]]),
        # geometric means: sqrt(8) = 2.83 and sqrt(1/2) = 0.71
        (ImportanceCorrection("seq-mask-tis", 0.7, 2.8), [[0, 0], [0.5, 1]], [1, 0]),
        (ImportanceCorrection("seq-mask-tis", 0.72, 2.9), [[2, 4], [0, 0]], [0, 1]),
        (ImportanceCorrection("tis", 0.0, 3.0, sequence_level=True), [[3, 3], [0.5, 0.5]], [[1, 1], [0, 0]]),
    ],
)
def test_importance_weights_and_what_is_outside(correction, weights, outside):
    found, metrics = correction.weights(batch(PREV, GEN))
    close(found, [[float(w) for w in row] for row in weights])
    close(metrics["importance/weight"], [[float(w) for w in row] for row in weights])
    if outside is None:
        assert "importance/outside" not in metrics
    else:
        assert metrics["importance/outside"].tolist() == outside


def test_importance_weight_that_is_not_finite_is_zero():
    gen = [[-math.inf, -1.0], [math.nan, -1.0]]
    found, metrics = ImportanceCorrection("seq-mask-tis", 0.5, 2.0).weights(batch(PREV, gen))
    close(found, [[0.0, 1.0], [0.0, 1.0]])  # the other token's ratio of 1 is the response's mean
    assert metrics["importance/outside"].tolist() == [0, 0]


def test_geometric_mean_is_over_counting_tokens():
    """Ratios 2 and (not counted) 4: the mean is 2, not sqrt(2) or sqrt(8)."""
    found, metrics = ImportanceCorrection("seq-mask-tis", 1.9, 2.1).weights(
        batch([PREV[0]], [GEN[0]], mask=[[1, 0]])
    )
    assert metrics["importance/outside"].tolist() == [0]
    close(found, [[2.0, 1.0]])


# Terms 1, 2, 4 | 8 in two rows; a step of 5 tokens in 3 sequences.


@pytest.mark.parametrize(
    ("how", "parameters", "expected"),
    [
        ("token_mean", {}, 15 / 5),
        ("group_token_mean", {"row_factors": torch.tensor([0.5, 0.25])}, (7 * 0.5 + 8 * 0.25) / 3),
        ("sequence_mean", {}, (7 / 3 + 8) / 3),
        ("constant", {"max_response_length": 10}, 15 / (3 * 10)),
    ],
)
def test_aggregates_by_hand(how, parameters, expected):
    terms, counts = torch.tensor([[1.0, 2, 4], [8, 64, 64]]), torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    found = aggregate(terms, counts, how, global_valid_toks=5, global_valid_seqs=3, **parameters)
    assert found.item() == pytest.approx(expected)


def test_an_aggregate_without_its_divisor_is_refused():
    rows = partial(aggregate, *torch.ones(2, 1, 2), global_valid_toks=2, global_valid_seqs=1)
    with pytest.raises(ValueError, match="needs the step's row_factors; prepare the batch"):
        rows(how="group_token_mean")
    with pytest.raises(ValueError, match="divides by max_response_length; set it"):
        rows(how="constant")


def test_advantages_of_one_group_by_hand():
    """Rewards 1, 0, 0, 0 and one that does not count: mean 1/4, std with ddof 1 = 1/2."""
    b = batch([[-1.0]] * 5, rewards=[1.0, 0.0, 0.0, 0.0, 9.0], valid=[1, 1, 1, 1, 0])
    close(group_advantages(b, normalization="none").values, [0.75, -0.25, -0.25, -0.25, 0])
    close(group_advantages(b, eps=0.5).values, [0.75, -0.25, -0.25, -0.25, 0])  # divided by 1/2 + 1/2
    close(group_advantages(b, eps=0.0).values, [1.5, -0.5, -0.5, -0.5, 0])
    assert group_advantages(b).sizes.tolist() == [4] * 5
    assert group_advantages(b).has_signal.tolist() == [True] * 4 + [False]


def test_advantages_by_the_batch_divide_by_its_std():
    """Two groups (2, 0), (1, 1): std of all four with ddof 1 is sqrt(2/3); the second has no signal."""
    b = batch([[-1.0]] * 4, rewards=[2.0, 0.0, 1.0, 1.0], groups=[0, 0, 1, 1])
    std = math.sqrt(2 / 3)
    close(
        group_advantages(b, normalization="batch", eps=0.25).values,
        [1 / (std + 0.25), -1 / (std + 0.25), 0, 0],
    )


def fractions_leave_one_out(rewards: list[float], eps: float) -> list[float]:
    """In exact arithmetic, of rewards as a computer holds them."""
    exact, found = [Fraction(r) for r in rewards], []
    for at, own in enumerate(exact):
        rest = exact[:at] + exact[at + 1 :]
        mean = sum(rest) / len(rest)
        variance = sum((r - mean) ** 2 for r in rest) / max(len(rest) - 1, 1)
        found.append(float(own - mean) / (math.sqrt(variance) + eps if len(set(rest)) > 1 else 1))
    return found


@given(
    rest=st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.4, 1.4 + 1e-9, 7.7]), min_size=1, max_size=12),
    offset=st.sampled_from([0.0, 1e4, -1e4, 0.1]),
    eps=st.sampled_from([1e-6, 1e-4, 0.1]),
)
@settings(max_examples=200, deadline=None)
def test_leave_one_out_equals_exact_arithmetic_for_any_group(rest, offset, eps):
    rewards = [offset + r for r in [0.05, *rest]]
    found = group_advantages(batch([[-1.0]] * len(rewards), rewards=rewards), eps=eps, leave_one_out=True)
    expected = [0.0] * len(rewards) if len(set(rewards)) == 1 else fractions_leave_one_out(rewards, eps)
    # a mean of 1e4 has an absolute error of about 1e-12, which a spread of 1e-9 multiplies
    assert found.values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_others_that_nearly_agree_are_named_by_step_group_and_value():
    """0.05 against 1.4 and six times 1.4001: the others' std is 3.8e-5."""
    near = [0.05, 1.4, *[1.4001] * 6]
    step = batch([[-1.0]] * 16, rewards=[*[0.0, 1.0] * 4, *near], groups=[0] * 8 + [7] * 8)
    plain, loo = (
        build_objective("grpo", use_leave_one_out_baseline=use).prepare(step) for use in (False, True)
    )
    assert implausible_advantage(plain) is None
    value = fractions_leave_one_out(near, 1e-6)[0]
    assert implausible_advantage(loo).startswith(
        f"group 7 has an advantage of {value:.6g} where its rewards span 1.3501 (plausible: up to 135.01)"
    )
    assert implausible_advantage(loo.select(slice(0, 0))) is None


def test_one_success_in_a_large_group_is_plausible_when_divided_by_the_mean():
    """One of 200 responses is right: its advantage is 199, as its group's size explains."""
    step = batch([[-1.0]] * 200, rewards=[1.0, *[0.0] * 199], groups=[0] * 200)
    prepared = build_objective("maxrl", advantage_eps=0.0).prepare(step)
    assert prepared.advantages[0, 0].item() == pytest.approx(199)
    assert implausible_advantage(prepared) is None
    close = batch([[-1.0]] * 2, rewards=[1.0, -0.999], groups=[0, 0])  # mean 0.0005
    assert "advantage of 1999 where its rewards span 1.999 (plausible: up to 199.9)" in implausible_advantage(
        build_objective("maxrl", advantage_eps=0.0).prepare(close)
    )


def test_covariances_by_hand():
    """logp -1, -3 | -2, (-9 does not count); A 1 and -1.  Step: means -2 and 1/3."""
    logp, mask = torch.tensor([[-1.0, -3.0], [-2.0, -9.0]]), torch.tensor([[1, 1], [1, 0]]).bool()
    tokens = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    close(step_covariance(logp, tokens, mask), [[2 / 3, -2 / 3], [0, 0]])
    b = batch(logp.tolist(), mask=mask.tolist())
    groups, a = Groups.from_ids(b.group_ids), torch.tensor([1.0, -1.0])
    close(group_covariance(logp, a, b, groups, "response"), [[1, -1], [0, 0]])
    shifted = torch.tensor([[-1.0, -3.0], [-5.0, -9.0]])  # mean of the group's tokens: -3
    close(group_covariance(shifted, a, b, groups, "group"), [[2, 0], [2, 0]])
    close(group_covariance(shifted, a, b, groups, "response"), [[1, -1], [0, 0]])
    close(group_covariance(shifted, a, b, groups, "none"), [[-1, -3], [5, 0]])
    two = batch([[-1.0, -2.0]] * 4, groups=[0, 0, 1, 1])  # advantages 2, 0 | 5, 5 are centred on their groups
    found = group_covariance(
        two.prev_logprobs, torch.tensor([2.0, 0, 5, 5]), two, Groups.from_ids(two.group_ids), "response"
    )
    close(found, [[0.5, -0.5], [-0.5, 0.5], [0, 0], [0, 0]])


def test_kernel_scope_is_what_it_says():
    """Group 0 has no spread, so weight 1; over the batch sigma^2 = 1/2 and w = 1, 1, e^-1, e^-1."""
    c, mask = torch.tensor([[0.0, 0.0], [1.0, -1.0]]), torch.ones(2, 2, dtype=torch.bool)
    groups = Groups.from_ids(torch.tensor([0, 1]))
    close(gaussian_kernel_weights(c, mask, groups, "group"), [[1, 1], [1, 1]])
    mean = (2 + 2 * math.exp(-1)) / 4
    close(gaussian_kernel_weights(c, mask, groups, "batch"), [[1 / mean] * 2, [math.exp(-1) / mean] * 2])
    mask[0, 1] = False
    assert gaussian_kernel_weights(c, mask, groups, "group").tolist() == [[1, 0], [1, 1]]


def test_tokens_of_high_covariance_are_drawn_within_the_bounds():
    """Of ten tokens a fraction 0.35 is three; those with 1 < c < 5 are c = 2, 3, 4, so all of them."""
    c = torch.arange(10.0)[None]
    b = batch([[-1.0] * 10])
    chosen = select_high_covariance(c, b, 1.0, 5.0, 0.35, seed=0)
    assert chosen.nonzero()[:, 1].tolist() == [2, 3, 4]
    one = select_high_covariance(c, b, 1.0, 5.0, 0.01, seed=0)
    assert int(one.sum()) == 1, "at least one"
    assert bool((one & chosen).any()), "from those that qualify"
    assert int(select_high_covariance(c, b, 1.0, 5.0, 0.29, seed=0).sum()) == 2, "rounded down"
    assert int(select_high_covariance(c, b, 1.0, 2.0, 0.5, seed=0).sum()) == 0, "bounds do not qualify"


@pytest.mark.parametrize(
    ("multiply", "lower", "upper", "expected"),
    [
        (True, 0.0, 9.0, 2 * (1 / (1 + math.exp(-1.0)) - 0.25)),  # sigmoid(4 / 4)
        (False, 0.0, 9.0, 2 * (1 / (1 + math.exp(-1 / 16)) - 0.25)),  # sigmoid(1/4 / 4)
        (True, 0.0, 0.9, 0.9),
        (True, 1.2, 9.0, 1.2),
    ],
)
def test_probability_weight_by_hand(multiply, lower, upper, expected):
    """pi = 1/4, alpha 2, mu 1/4, tau 4."""
    logp = torch.tensor([[math.log(0.25)]], requires_grad=True)
    found = probability_weights(logp, alpha=2, mu=0.25, tau=4, lower=lower, upper=upper, multiply=multiply)
    close(found, [[expected]])
    assert not found.requires_grad


@pytest.mark.parametrize("normalization", ["none", "group"])
def test_leave_one_out_knows_nothing_of_an_excluded_response(normalization):
    """Of 1, 0, 0 and an excluded 5 the others' means are 0, 1/2, 1/2; their stds 0 (so 1), 1/sqrt 2 twice."""
    step = batch([[0.0]] * 4, rewards=[1.0, 0.0, 0.0, 5.0], valid=[1, 1, 1, 0])
    found = group_advantages(step, normalization=normalization, eps=0.0, leave_one_out=True).values
    scale = 1.0 if normalization == "none" else math.sqrt(2)
    close(found, [1.0, -0.5 * scale, -0.5 * scale, 0.0])
    with pytest.raises(ValueError, match="not defined"):
        group_advantages(step, normalization="batch", leave_one_out=True)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_clip_tells_the_tokens_without_gradient():
    ratio = row(1.5, 1.5, 0.5, 0.5, 1.0, 5.0).requires_grad_()
    advantages = row(2, -2, 2, -2, 2, -2)
    value, is_clipped = clipped_policy_gradient(ratio, advantages, 0.2, 0.2, 3.0)
    (gradient,) = torch.autograd.grad(value.sum(), ratio)
    torch.testing.assert_close(value.detach(), row(2.4, -3, 1, -1.6, 2, -6))
    assert is_clipped.tolist() == [[1, 0, 0, 1, 0, 1]]
    torch.testing.assert_close(gradient, row(0, -2, 2, 0, 2, 0))
    assert not is_clipped.requires_grad


def test_k3_is_accurate_where_the_policies_are_close():
    distance = torch.tensor([[1e-4, -1e-4]], dtype=torch.float32)  # k3 = d^2 / 2 + d^3 / 6 + ...
    kl = kl_estimate(-distance, torch.zeros_like(distance), "k3")
    torch.testing.assert_close(kl, torch.full_like(kl, 5e-9), rtol=2e-3, atol=0)


def test_the_clamp_of_log_ratios_changes_no_value_within_it():
    gaps = torch.linspace(-MAX_LOG_RATIO, MAX_LOG_RATIO, 41)[None]
    zero = torch.zeros_like(gaps)
    assert torch.equal(importance_ratio(gaps, zero), gaps.exp())
    assert torch.equal(kl_estimate(-gaps, zero, "k3"), torch.expm1(gaps) - gaps)
    mean = sequence_importance_ratio(gaps[:, 1:], zero[:, 1:], torch.ones(1, 40, dtype=torch.bool))
    assert torch.equal(mean, gaps[:, 1:].mean(1, keepdim=True).exp().expand(1, 40))


def test_ratios_beyond_the_clamp_are_finite():
    far = torch.tensor([[100.0, -100.0, 90.0]], requires_grad=True)
    for value in (
        importance_ratio(far, torch.zeros(1, 3)),
        sequence_importance_ratio(far[:, :1], torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)),
        kl_estimate(-far, torch.zeros(1, 3), "k3"),
        weighted_k3(-far, torch.zeros(1, 3), torch.ones(1, 3)),
    ):
        (gradient,) = torch.autograd.grad(value.sum(), far)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient[0, 0] == 0
    assert kl_estimate(-far, torch.zeros(1, 3), "k3")[0, 1].item() == pytest.approx(99.0)  # as without clamp


def test_share_of_clamped_tokens_is_logged():
    """The policy moved by 100, -100, 1, 0 and 0 nats, and is 100 below the reference in the first alone."""
    current = row(-1.0, -101.0, -1.0, -1.0, -1.0)
    batch = TokenBatch(
        prev_logprobs=row(-101.0, -1.0, -2.0, -1.0, -1.0),
        reference_policy_logprobs=row(99.0, -101.0, -2.0, -1.0, -1.0),
        token_mask=torch.ones(1, 5),
        sample_mask=torch.ones(1),
        rewards=torch.ones(1),
        group_ids=torch.zeros(1, dtype=torch.int64),
    )
    objective = build_objective("grpo", reference_policy_kl_penalty=0.1)
    part = objective.prepare(batch).select(slice(None), next_token_logprobs=current)
    toks, seqs = global_counts(batch)
    _, metrics = objective.loss(part, global_valid_toks=toks, global_valid_seqs=seqs)
    assert metrics["ratio/clamped_fraction"].item() == pytest.approx(2 / 5)
    assert metrics["kl/clamped_fraction"].item() == pytest.approx(1 / 5)
