"""Numbers worked out by hand on two groups of two responses of three tokens, and every variant's limits."""

import math
from dataclasses import replace

import pytest
import torch

from nemo_grpo import TokenBatch, build_objective
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.checking.small_steps import counts, loss_and_gradient, random_step
from nemo_grpo.variants.erpo import ERPO

HALF, QUARTER, EIGHTH = math.log(0.5), math.log(0.25), math.log(0.125)


def on_policy(**changes) -> TokenBatch:
    """Group 7: rewards 1, 0. Group 9: rewards 1, 1. Current, previous and reference policy are the same.

    GRPO's advantages (ddof 1: std of 1, 0 is 1/sqrt(2)) are +-1/sqrt(2) in group 7 and 0 in group 9.
    """
    logprobs = torch.tensor(
        [[HALF, QUARTER, HALF], [HALF, EIGHTH, HALF], [HALF, HALF, HALF], [QUARTER, HALF, HALF]],
        dtype=torch.float64,
    )
    fields = {
        "next_token_logprobs": logprobs.clone().requires_grad_(),
        "prev_logprobs": logprobs,
        "reference_policy_logprobs": logprobs,
        "entropies": torch.zeros_like(logprobs),
        "token_mask": torch.ones(4, 3),
        "sample_mask": torch.ones(4),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64),
        "group_ids": torch.tensor([7, 7, 9, 9]),
    }
    return TokenBatch(**(fields | changes))


def moved(ratio: torch.Tensor) -> TokenBatch:
    """`on_policy`, and then the current policy has moved by this ratio of probabilities."""
    batch = on_policy()
    return replace(batch, next_token_logprobs=(batch.prev_logprobs + ratio.log()).requires_grad_())


A = 1 / math.sqrt(2)


def test_grpo_clips_by_hand():
    ratio = torch.tensor(
        [[1.5, 0.5, 1.1], [1.5, 0.5, 1.1], [9.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64
    )
    batch, o = moved(ratio), build_objective("grpo", advantage_eps=0.0)
    loss, gradient, prepared = loss_and_gradient(o, batch)
    assert prepared.advantages[:, 0].tolist() == pytest.approx([A, -A, 0, 0], rel=1e-7)
    # A > 0: min(1.5, 1.2) + 0.5 + 1.1;  A < 0: -(1.5 + max(0.5, 0.8) + 1.1)
    assert loss.item() == pytest.approx(-(A * (1.2 + 0.5 + 1.1) - A * (1.5 + 0.8 + 1.1)) / 12)
    assert gradient[0].tolist() == pytest.approx([0, -0.5 * A / 12, -1.1 * A / 12])  # clipped above
    assert gradient[1].tolist() == pytest.approx([1.5 * A / 12, 0, 1.1 * A / 12])  # clipped below
    metrics = o.loss(prepared, **counts(batch))[1]
    assert metrics["loss/policy"].item() == pytest.approx(loss.item())
    assert metrics["ratio/clip_fraction"].item() == pytest.approx(2 / 12)
    assert metrics["ratio/mean"].item() == pytest.approx((2 * 3.1 + 6 * 9) / 12)
    assert prepared.metrics["reward/group_std"].item() == pytest.approx(A / 2)  # of 1/sqrt 2 and 0


@pytest.mark.parametrize(("how", "share"), [("token_mean", 3 / 9), ("group_token_mean", 1 / 2)])
def test_a_mean_over_groups_weighs_a_long_group_no_more_by_hand(how, share):
    """Group 7 has 3 of the 9 tokens and the only signal: loss -(A ln p of row 0 - A ln p of row 1) / 3."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]])
    o = build_objective("gpg", aggregation=how, use_alpha=False)
    loss, gradient, _ = loss_and_gradient(o, on_policy(token_mask=mask))
    assert loss.item() == pytest.approx(-share * (0.5 * (HALF + QUARTER) - 0.5 * HALF) / 3)
    assert gradient[0].tolist() == pytest.approx([-share * 0.5 / 3] * 2 + [0])


def test_updates_of_whole_groups_take_the_mean_over_their_own_groups():
    """Two updates per step divide by their own 2 sequences: each is the loss of its group alone."""
    o = build_objective("gpg", aggregation="group_token_mean", use_alpha=False)
    batch = on_policy(rewards=torch.tensor([1.0, 0, 1, 0], dtype=torch.float64),
                      token_mask=torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]))  # fmt: skip
    prepared = o.prepare(batch)
    for rows in (slice(0, 2), slice(2, 4)):
        alone = batch.select(rows)
        update = o.loss(prepared.select(rows), **counts(alone))[0]
        assert update.item() == pytest.approx(o.loss(o.prepare(alone), **counts(alone))[0].item())


def test_dr_grpo_by_hand():
    loss, gradient, _ = loss_and_gradient(build_objective("dr_grpo", max_response_length=10), on_policy())
    assert loss.item() == pytest.approx(0.0)
    # A = 1 - 1/2, four sequences of at most 10
    assert gradient[0, 0].item() == pytest.approx(-0.5 / (4 * 10))


def test_dapo_clips_higher():
    batch = moved(torch.tensor(1.25))
    _, grpo, _ = loss_and_gradient(build_objective("grpo"), batch)
    _, dapo, _ = loss_and_gradient(build_objective("dapo"), batch)
    assert grpo[0, 0] == 0
    assert dapo[0, 0].item() == pytest.approx(-1.25 * A / 12, rel=1e-5)


def test_gspo_clips_whole_responses_by_hand():
    """Ratios 1.21, 1, 1 / 1.1: geometric means 1.1^(1/3) = 1.0323 above the clip at 1.02."""
    batch = moved(torch.tensor([[1.21, 1.0, 1 / 1.1]] * 4, dtype=torch.float64))
    o = build_objective("gspo", ratio_clip_min=0.02, ratio_clip_max=0.02, advantage_eps=0.0)
    loss, gradient, _ = loss_and_gradient(o, batch)
    ratio = 1.1 ** (1 / 3)
    assert loss.item() == pytest.approx(-(1.02 * A - ratio * A) / 4)  # four responses
    assert not gradient[0].any()  # clipped as a whole: a token below 1 does not move either
    assert gradient[1].tolist() == pytest.approx([ratio * A / (4 * 3)] * 3)


def test_cispo_bounds_weights_and_keeps_every_gradient_by_hand():
    """Weights 1.3, 0.5 and 1.1 of ratios 1.5, 0.5 and 1.1: the gradient is -w A / 12 for every token."""
    batch = moved(torch.tensor([[1.5, 0.5, 1.1]] * 4, dtype=torch.float64))
    o = build_objective("cispo", ratio_clip_max=0.3, advantage_eps=0.0)
    loss, gradient, _ = loss_and_gradient(o, batch)
    weights = torch.tensor([1.3, 0.5, 1.1], dtype=torch.float64)
    logprobs = batch.next_token_logprobs.detach()
    assert loss.item() == pytest.approx(-(weights * A * (logprobs[0] - logprobs[1])).sum().item() / 12)
    torch.testing.assert_close(gradient[0], -weights * A / 12)
    torch.testing.assert_close(gradient[1], weights * A / 12)
    bounded = build_objective("cispo", ratio_clip_min=0.4, ratio_clip_max=0.3, advantage_eps=0.0)
    assert loss_and_gradient(bounded, batch)[1][0, 1].item() == pytest.approx(-0.6 * A / 12)


def test_maxrl_divides_by_the_mean_reward_by_hand():
    """One success of four: mean 1/4, so the success counts 3 and each failure -1, in 12 tokens."""
    one, all_rows = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), torch.tensor([7] * 4)
    o = build_objective("maxrl", advantage_eps=0.0)
    loss, gradient, prepared = loss_and_gradient(o, on_policy(rewards=one, group_ids=all_rows))
    assert prepared.advantages[:, 0].tolist() == pytest.approx([3, -1, -1, -1])
    assert loss.item() == pytest.approx(0, abs=1e-12)  # every ratio is 1, and 3 - 1 - 1 - 1 = 0
    assert gradient[:, 1].tolist() == pytest.approx([-3 / 12, 1 / 12, 1 / 12, 1 / 12])
    assert prepared.metrics["maxrl/mean_below_zero"] == 0
    eighth = on_policy(rewards=one / 8, group_ids=all_rows)  # the unit of the reward does not matter
    torch.testing.assert_close(o.prepare(eighth).advantages, prepared.advantages)
    with_eps = build_objective("maxrl", advantage_eps=0.25).prepare(
        on_policy(rewards=one, group_ids=all_rows)
    )
    torch.testing.assert_close(with_eps.advantages, prepared.advantages / 2)


def test_maxrl_learns_nothing_from_a_group_whose_mean_is_not_above_zero():
    """Group 7: 1, -1 (mean 0); group 9: 0, -1 (mean -1/2, counted); then 3, -1 (mean 1): +2, -2."""
    o = build_objective("maxrl", advantage_eps=0.0)
    prepared = o.prepare(on_policy(rewards=torch.tensor([1.0, -1, 0, -1], dtype=torch.float64)))
    assert not prepared.advantages.any()
    assert prepared.metrics["maxrl/mean_below_zero"] == 0.5
    assert prepared.metrics["groups/valid_fraction"] == 0
    prepared = o.prepare(on_policy(rewards=torch.tensor([3.0, -1, 0, 0], dtype=torch.float64)))
    assert prepared.advantages[:, 0].tolist() == pytest.approx([2, -2, 0, 0])


DPPO_RATIO = torch.tensor([[1.5, 1.5, 0.2], [0.5, 6.0, 1.1], [1.9, 1.9, 1.9], [1.9, 1.9, 1.9]])


def test_dppo_masks_what_moved_too_far_in_the_advantages_direction_by_hand():
    """Probabilities of group 7, threshold 0.2, A = 1/2 and -1/2; group 9 has A = 0.

    A > 0:  1/2 -> 0.75 moved +0.25: masked;  1/4 -> 0.375 by +0.125: kept;  1/2 -> 0.1 by -0.4: returns, kept
    A < 0:  1/2 -> 0.25 moved -0.25: masked;  1/8 -> 0.75 by +0.625: returns, kept, its weight 6 bounded to 5;
            1/2 -> 0.55 by +0.05: kept
    """
    batch, o = moved(DPPO_RATIO.double()), build_objective("dppo")
    loss, gradient, prepared = loss_and_gradient(o, batch)
    of_first = 1.5 * math.log(0.375) + 0.2 * math.log(0.1)
    of_second = 5 * math.log(0.75) + 1.1 * math.log(0.55)
    assert loss.item() == pytest.approx(-(0.5 * of_first - 0.5 * of_second) / 12, rel=1e-6)
    assert gradient[0].tolist() == pytest.approx([0, -1.5 * 0.5 / 12, -0.2 * 0.5 / 12], rel=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 5 * 0.5 / 12, 1.1 * 0.5 / 12], rel=1e-6)
    assert not gradient[2:].any()
    metrics = o.loss(prepared, **counts(batch))[1]
    assert metrics["dppo/masked_fraction"].item() == pytest.approx(2 / 12)
    unbounded = loss_and_gradient(build_objective("dppo", ratio_max=None), batch)[1]
    assert unbounded[1, 1].item() == pytest.approx(6 * 0.5 / 12, rel=1e-6)


def test_dppo_compares_with_the_sampler_and_not_with_the_scored_policy():
    batch, o = moved(DPPO_RATIO.double()), build_objective("dppo")
    loss, gradient, _ = loss_and_gradient(o, batch)
    scored_elsewhere = replace(
        batch, prev_logprobs=batch.prev_logprobs - 3, generation_logprobs=batch.prev_logprobs
    )
    again, of_again, _ = loss_and_gradient(o, scored_elsewhere)
    assert torch.equal(again, loss)
    assert torch.equal(of_again, gradient)
    for key, remedy in (
        (
            {"use_importance_sampling_correction": False},
            "the ratio is to the sampler, which is the correction",
        ),
        ({"truncated_importance_sampling_type": "tis"}, "ratio_max bounds the weight"),
        ({"ratio_clip_max": 0.2}, "whose mask replaces the clip"),
    ):
        with pytest.raises(UserError, match=remedy):
            build_objective("dppo", **key)


def test_sapo_gates_by_the_sigmoid_of_its_temperature_by_hand():
    """Ratios 1, 1 + ln 3 and 1 - ln 3 / 2; tau 1 where A > 0, tau 2 where A < 0.

    tau 1: sigmoid(0, ln 3, -ln 3 / 2) = 1/2, 3/4, 1 / (1 + sqrt 3);  tau 2: 1/2, 9/10, 1/4
    """
    log_3 = math.log(3)
    batch = moved(torch.tensor([[1, 1 + log_3, 1 - log_3 / 2]] * 4, dtype=torch.float64))
    o = build_objective("sapo", tau_positive=1.0, tau_negative=2.0, advantage_eps=0.0)
    loss, gradient, prepared = loss_and_gradient(o, batch)
    last = 1 / (1 + math.sqrt(3))
    # f = 4 s / tau, the mean over 3 tokens and 4 responses, group 9 without signal
    assert loss.item() == pytest.approx(
        -(A * 4 * (1 / 2 + 3 / 4 + last) - A * 2 * (1 / 2 + 9 / 10 + 1 / 4)) / 12
    )
    shares = [[1, 3 / 4, 4 * last * (1 - last)], [1, 9 / 25, 3 / 4]]  # 4 s (1 - s)
    ratios = (1, 1 + log_3, 1 - log_3 / 2)
    for row, sign in ((0, -1), (1, 1)):
        expected = [sign * share * rho * A / 12 for share, rho in zip(shares[row], ratios, strict=True)]
        assert gradient[row].tolist() == pytest.approx(expected)
    rows = prepared.select(torch.tensor([0, 1]), next_token_logprobs=batch.next_token_logprobs[:2])
    share = o.loss(rows, global_valid_toks=6, global_valid_seqs=2)[1]["sapo/gradient_share"]
    assert share.item() == pytest.approx((sum(shares[0]) + sum(shares[1])) / 6)


def test_sapo_in_the_first_update_is_grpo_averaged_by_response():
    _, gradient, _ = loss_and_gradient(build_objective("sapo"), on_policy())
    _, expected, _ = loss_and_gradient(build_objective("grpo", aggregation="sequence_mean"), on_policy())
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(UserError, match="whose gate replaces the clip"):
        build_objective("sapo", ratio_clip_min=0.2)


def test_clip_cov_removes_the_token_of_highest_covariance_by_hand():
    """c = (logp - mean)(A - 0); mean logp = -14 ln 2 / 12, so the three tokens above 0.5 are known."""
    batch = on_policy()
    mean = (8 * HALF + 2 * QUARTER + EIGHTH + HALF) / 12
    expected = [(x - mean) * A for x in (HALF, QUARTER, HALF)] + [
        (x - mean) * -A for x in (HALF, EIGHTH, HALF)
    ]
    o = build_objective(
        "clip_cov", covariance_min=0.5, covariance_max=5.0, clip_fraction=1.0, advantage_eps=0.0
    )
    prepared = o.prepare(batch)
    removed = (prepared.advantages[:2] == 0).flatten().tolist()
    assert removed == [0.5 < c < 5 for c in expected] == [False, False, False, False, True, False]
    _, gradient, _ = loss_and_gradient(o, batch)
    assert gradient[1, 1] == 0
    assert gradient[1, 0].item() == pytest.approx(A / 12)


def test_cw_grpo_by_hand():
    """Centred logp, in ln2/3: response 0 has (1, -2, 1), response 1 (2, -4, 2)."""
    third = math.log(2) / 3
    c = [third * A, -2 * third * A, third * A, -2 * third * A, 4 * third * A, -2 * third * A]
    sigma = math.sqrt(sum(x * x for x in c) / 6 - (sum(c) / 6) ** 2)
    w = [math.exp(-(x**2) / (2 * sigma**2)) for x in c]
    w = [x * 6 / sum(w) for x in w]
    o = build_objective("cw_grpo", advantage_eps=0.0, reference_policy_kl_penalty=0.0)
    _, gradient, prepared = loss_and_gradient(o, on_policy())
    assert prepared.advantages[:2].flatten().tolist() == pytest.approx(
        [x * A for x in w[:3]] + [-x * A for x in w[3:]]
    )
    assert gradient[0, 0].item() == pytest.approx(-w[0] * A / 3 / 4)  # sequence mean of 4
    assert sum(w) == pytest.approx(6)
    assert prepared.metrics["cw_grpo/weight_mean"].item() == pytest.approx(1.0)
    assert [x < 0.5 for x in w].count(True) == 1
    assert prepared.metrics["cw_grpo/weight_below_half"].item() == pytest.approx(1 / 12)


def test_tr_grpo_by_hand():
    """pi = 1/2: sigmoid(4.5) = 0.989, w = 1.4; pi = 1/8: sigmoid(1.125) = 0.755, w = 1.01. Reverse: 2 - w."""
    off = {"advantage_eps": 0.0, "reference_policy_kl_penalty": 0.0}
    small = 2 * (1 / (1 + math.exp(-1.125)) - 0.25)
    assert small == pytest.approx(1.00983, rel=1e-5)
    reverse = {"weighting": "reverse", "kl_weighting": "none"}
    for how, weights in (({}, (1.4, small)), (reverse, (2 - 1.4, 2 - small))):
        _, gradient, _ = loss_and_gradient(build_objective("tr_grpo", **off, **how), on_policy())
        assert (-gradient[0, 0], gradient[1, 1]) == pytest.approx([w * A / 12 for w in weights])


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "cw_grpo", "tr_grpo", "gpg", "dppo", "sapo"])
@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_the_distance_to_a_reference_is_measured_where_it_is_penalised(name, penalty):
    """Eight tokens are a quarter of a nat likelier than under the reference, four an eighth less likely."""
    o, batch = build_objective(name, reference_policy_kl_penalty=penalty), on_policy()
    distance = torch.tensor([[0.25, 0.25, -0.125]])
    prepared = o.prepare(replace(batch, reference_policy_logprobs=batch.prev_logprobs - distance))
    assert ("kl/reference" in o.loss(prepared, **counts(batch))[1]) == (penalty > 0)
    if penalty:
        assert prepared.metrics["kl/step_start"].item() == pytest.approx((8 * 0.25 - 4 * 0.125) / 12)


def test_a_step_is_drawn_with_seed_0_unless_one_is_given():
    o, batch = build_objective("tr_grpo", weighting="random"), on_policy()
    default, zero, one = (o.prepare(batch, **how).token_weights for how in ({}, {"seed": 0}, {"seed": 1}))
    assert torch.equal(default, zero)
    assert not torch.equal(default, one)


def test_tr_grpo_kl_by_hand():
    """Eq. 11 at pi = pi_ref is w - ln w - 1, its gradient in logp is 1 - w."""
    o = build_objective("tr_grpo", reference_policy_kl_penalty=0.5, advantage_eps=0.0)
    batch = on_policy(
        rewards=torch.ones(4, dtype=torch.float64), token_mask=torch.tensor([[1, 0, 0]] * 3 + [[0, 1, 1]])
    )
    loss, gradient, _ = loss_and_gradient(o, batch)
    assert loss.item() == pytest.approx(0.5 * (1.4 - math.log(1.4) - 1))  # every counting token has pi = 1/2
    assert gradient[0, 0].item() == pytest.approx(0.5 * (1 - 1.4) / 5)


def test_tr_grpo_with_equal_weights_is_grpo():
    batch = random_step([3, 4, 2, 4], [1.0, 0, 0, 0], [0] * 4, seed=1)
    shared = {"ratio_clip_max": 0.24, "reference_policy_kl_penalty": 0.1}
    grpo = loss_and_gradient(build_objective("grpo", **shared), batch)
    equal = loss_and_gradient(build_objective("tr_grpo", weighting="equal", **shared), batch)
    torch.testing.assert_close(equal[0], grpo[0])
    torch.testing.assert_close(equal[1], grpo[1])


def test_tr_grpo_printed_placement_stops_the_gradient_of_likely_tokens():
    inside = {"weight_placement": "inside", "reference_policy_kl_penalty": 0.0}
    with pytest.warns(UserWarning, match=r"upper=1.4 > 1 \+ ratio_clip_max=1.24: .*clipped_at_unit_ratio"):
        o = build_objective("tr_grpo", **inside)
    batch, name = on_policy(), "tr_grpo/clipped_at_unit_ratio"
    _, gradient, prepared = loss_and_gradient(o, batch)
    assert gradient[0].abs().max() == 0  # pi = 1/2, 1/4: w = 1.4, 1.31 > 1.24
    assert gradient[1, 0] != 0
    assert o.loss(prepared, **counts(batch))[1][name].item() == pytest.approx(3 / 12)
    for other in ({"weight_placement": "outside"}, {"ratio_clip_min": None, "ratio_clip_max": None}):
        o = build_objective("tr_grpo", **inside | other)
        assert o.loss(loss_and_gradient(o, batch)[2], **counts(batch))[1][name] == 0


def test_erpo_by_hand():
    """Group 7, one bucket: entropies (0,0,3 | 0,0,0), progress (1,0,0 | 0,0,0) x 0.1, A = +-1/sqrt(2)."""
    entropies = torch.zeros(4, 3, dtype=torch.float64)
    entropies[0, 2] = 3.0
    reference = on_policy().prev_logprobs.clone()
    reference[0, 0] -= 1.0
    batch = on_policy(entropies=entropies, reference_policy_logprobs=reference)
    delta = 1e-4

    # z of (0,0,3,0,0,0): mean 0.5, std sqrt(1.25); of progress (0.1,0,0,0,0,0): mean 1/60, std 0.1 sqrt(5)/6
    h_low, s_std = -0.5 / (math.sqrt(1.25) + delta), 0.1 * math.sqrt(5) / 6
    h_high = 2.5 / (math.sqrt(1.25) + delta)
    gate = [1 / (1 + math.exp(-5 * h)) for h in (h_low, h_low, h_high, h_low, h_low, h_low)]
    s = [(0.1 - 1 / 60) / (s_std + delta)] + [(-1 / 60) / (s_std + delta)] * 5
    psi = [g * sign * z for g, sign, z in zip(gate, (1, 1, 1, -1, -1, -1), s, strict=True)]
    mean = sum(psi) / 6
    psi = [x / (math.sqrt(sum((y - mean) ** 2 for y in psi) / 6) + delta) for x in psi]
    raw = [a + 0.2 * x for a, x in zip((A, A, A, -A, -A, -A), psi, strict=True)]
    mean = sum(raw) / 6
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / 6)
    expected = [(x - mean) / (std + delta) for x in raw]

    prepared = build_objective("erpo", num_buckets=1, advantage_eps=0.0).prepare(batch)
    assert prepared.advantages[:2].flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert (prepared.advantages[2:] == 0).all()  # equal rewards
    four = torch.ones(1, 4, dtype=torch.bool)
    assert ERPO(num_buckets=2).buckets(four).tolist() == [[0, 1, 1, 1]], "floor(K t / T), at most K - 1"


def test_erpos_moving_statistics_by_hand():
    """12 entropies of 1 and then 12 of 3, momentum 0.75: mean 1.5, variance 0.25 0.75 2^2."""
    o = build_objective("erpo", entropy_statistics="moving", entropy_momentum=0.75, gamma=1.0)
    first = o.prepare(on_policy(entropies=torch.ones(4, 3, dtype=torch.float64)))
    assert first.carried == {"mean": 1.0, "variance": 0.0}
    assert first.metrics["erpo/gate_mean"] == pytest.approx(0.5)  # no spread yet
    entropies = torch.full((4, 3), 3.0, dtype=torch.float64)
    second = o.prepare(on_policy(entropies=entropies, carried=first.carried))
    assert second.carried == pytest.approx({"mean": 0.75 * 1 + 0.25 * 3, "variance": 0.75 * 0.25 * 4})
    gate = 1 / (1 + math.exp(-(3 - 1.5) / (math.sqrt(0.75) + 1e-4)))
    assert second.metrics["erpo/gate_mean"] == pytest.approx(gate)
    nothing = o.prepare(on_policy(token_mask=torch.zeros(4, 3), carried=second.carried))
    assert nothing.carried == second.carried


def test_gpg_by_hand():
    """M = 2 of B = 4 sequences carry no signal, alpha = 2; A = +-1/2; loss = -2 (ln terms) / 12."""
    loss, gradient, prepared = loss_and_gradient(build_objective("gpg"), on_policy())
    assert prepared.metrics["gpg/alpha"] == 2
    total = 0.5 * (HALF + QUARTER + HALF) - 0.5 * (HALF + EIGHTH + HALF)
    assert loss.item() == pytest.approx(-2 * total / 12)
    assert gradient[0].tolist() == pytest.approx([-2 * 0.5 / 12] * 3)
    plain, _, prepared = loss_and_gradient(build_objective("gpg", use_alpha=False), on_policy())  # Table 1
    assert (plain.item(), prepared.metrics["gpg/alpha"]) == (pytest.approx(-total / 12), 1)


def test_gpg_without_signal_counts_the_step():
    o = build_objective("gpg")
    assert o.prepare(on_policy(rewards=torch.ones(4, dtype=torch.float64))).metrics["gpg/no_signal"] == 1


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "cw_grpo", "tr_grpo", "erpo", "clip_cov", "gpg", "maxrl", "dppo", "sapo"]
)
def test_groups_of_equal_rewards_and_of_one_response_have_advantages_of_exactly_0(name):
    """0.3 summed eight times and divided by eight is not 0.3: the rule must not rest on arithmetic."""
    for rewards, groups in (([0.3] * 8, [0] * 8), ([1.0, 0.0, 2.0], [1, 2, 3])):
        batch = random_step([3] * len(rewards), rewards, groups)
        assert (build_objective(name, advantage_eps=0.0).prepare(batch).advantages == 0).all()


def test_gpg_draws_once_and_then_as_often_again_as_it_may():
    config = parse_loss_fn({"variant": "gpg", "valid_fraction_threshold": 0.7, "max_resample_attempts": 3})
    assert config.resampling(99) == (0.7, 4)


def test_corrected_policy_loss_is_logged_with_its_sign_by_hand():
    """Every response was sampled at half of its probability: weight 2, truncated to 1.5."""
    batch = on_policy()
    batch = replace(batch, generation_logprobs=batch.prev_logprobs - math.log(2))
    o = build_objective(
        "grpo", advantage_eps=0.0, aggregation="sequence_mean", reference_policy_kl_penalty=0.0,
        use_importance_sampling_correction=True, truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.5,
    )  # fmt: skip
    prepared = o.prepare(
        replace(batch, token_mask=torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]]))
    )
    metrics = o.loss(prepared, **counts(prepared.batch))[1]  # of six tokens: 3 A - A
    assert metrics["loss/policy"].item() == pytest.approx(-1.5 * 2 * A / 6)


def test_supervised_loss_is_the_mean_cross_entropy_of_the_tokens_that_count():
    """Two demonstrations of 3 and 1 tokens, -log p of 1, 2, 3 and 6 nats: 12 / 4, whatever rewards say."""
    logprobs = torch.tensor(
        [[-1.0, -2.0, -3.0], [-6.0, -50.0, -50.0]], dtype=torch.float64, requires_grad=True
    )
    mask = torch.tensor([[True, True, True], [True, False, False]])
    objective = build_objective("sft")
    batch = TokenBatch(
        prev_logprobs=torch.zeros_like(logprobs),
        token_mask=mask,
        sample_mask=torch.ones(2, dtype=torch.bool),
        rewards=torch.tensor([0.0, 0.0], dtype=torch.float64),
        group_ids=torch.tensor([0, 1]),
    )
    rows = objective.prepare(batch).select(slice(None), next_token_logprobs=logprobs)
    loss, metrics = objective.loss(rows, global_valid_toks=4.0, global_valid_seqs=2.0)
    assert loss.item() == pytest.approx(3.0)
    assert float(metrics["loss/total"]) == pytest.approx(3.0)
    loss.backward()
    assert torch.equal(logprobs.grad, -mask.double() / 4)
