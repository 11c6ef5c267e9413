"""Where NeMo-RL's own loss can express a variant, ours is the same number with the same gradient."""

import pytest
import torch
from losses import build_loss
from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl_steps import counts, current_logprobs, loss_data

from nemo_grpo.nemorl.loss import EXTREMES

NO_KL = {"reference_policy_kl_penalty": 0.0}
BOUNDS = {"truncated_importance_sampling_ratio": 1.02, "truncated_importance_sampling_ratio_min": 0.97}
CORRECTED = {"use_importance_sampling_correction": True, **NO_KL}
FORCED = {"force_on_policy_ratio": True}
SEQUENCES = {"token_level_loss": False, "sequence_level_importance_ratios": True}
CASES = {
    "grpo": ({"variant": "grpo"}, NO_KL),
    "grpo_kl": (
        {"variant": "grpo", "reference_policy_kl_penalty": 0.1, "kl_score_function_gradient": True},
        {"reference_policy_kl_penalty": 0.1},
    ),
    "grpo_k2": (
        {"variant": "grpo", "reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2",
         "kl_score_function_gradient": True},
        {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"},
    ),
    "grpo_sequence_mean": (
        {"variant": "grpo", "aggregation": "sequence_mean"},
        {"token_level_loss": False, **NO_KL},
    ),
    "dapo": ({"variant": "dapo"}, {"ratio_clip_max": 0.28, **NO_KL}),
    "dual_clip": ({"variant": "dapo", "ratio_clip_c": 3.0},
                  {"ratio_clip_max": 0.28, "ratio_clip_c": 3.0, **NO_KL}),
    "gspo": (
        {"variant": "gspo", "ratio_clip_min": 3e-2, "ratio_clip_max": 4e-2},
        {**SEQUENCES, "ratio_clip_min": 3e-2, "ratio_clip_max": 4e-2, **NO_KL},
    ),
    "gspo_corrected": (
        {"variant": "grpo", "aggregation": "sequence_mean", "sequence_level_importance_ratios": True,
         "use_importance_sampling_correction": True},
        {**SEQUENCES, **CORRECTED},
    ),
    "cispo": (
        {"variant": "cispo", "ratio_clip_min": 0.1, "ratio_clip_max": 0.15},
        {"use_cispo": True, "ratio_clip_min": 0.1, "ratio_clip_max": 0.15, **NO_KL},
    ),
    "cispo_kl": (
        {"variant": "cispo", "reference_policy_kl_penalty": 0.1, "kl_score_function_gradient": True},
        {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0, "reference_policy_kl_penalty": 0.1},
    ),
    "gpg": ({"variant": "gpg"}, {"disable_ppo_ratio": True, **NO_KL}),
    "corrected": ({"variant": "grpo", "use_importance_sampling_correction": True}, CORRECTED),
    "forced": ({"variant": "grpo", **FORCED}, {**FORCED, **NO_KL}),
    "forced_kl": (
        {"variant": "grpo", "reference_policy_kl_penalty": 0.1, "kl_score_function_gradient": True, **FORCED},
        {"reference_policy_kl_penalty": 0.1, **FORCED},
    ),
    **{
        kind: (
            {"variant": "grpo", "use_importance_sampling_correction": True, **BOUNDS,
             "truncated_importance_sampling_type": kind},
            {**CORRECTED, **BOUNDS, "truncated_importance_sampling_type": kind},
        )
        for kind in ("tis", "icepop", "seq-mask-tis")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_clipped_pg_loss(case):
    ours, stock = CASES[case]
    data = loss_data()
    results = []
    for loss_fn in (build_loss(ours), ClippedPGLossFn(ClippedPGLossConfig(**stock))):
        logprobs = current_logprobs(data).requires_grad_()
        loss, metrics = loss_fn(next_token_logprobs=logprobs, data=data, **counts(data))
        loss.backward()
        results.append((loss.detach(), logprobs.grad, metrics))
    (loss, gradient, metrics), (stock_loss, stock_gradient, stock_metrics) = results
    torch.testing.assert_close(loss, stock_loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, stock_gradient, rtol=1e-5, atol=1e-8)
    assert gradient.abs().sum() > 0
    compared = set(metrics) & set(stock_metrics) - _other_meaning(stock)
    assert compared > {"loss", "token_mult_prob_error", "approx_entropy"}
    for name in compared:
        assert metrics[name] == pytest.approx(stock_metrics[name], rel=1e-4, abs=2e-6), name


def _other_meaning(stock):
    """Metrics whose stock meaning follows a setting: ours are always of ratios, by k3, and token means."""
    if stock.get("disable_ppo_ratio"):  # the stock loss reports logprobs in their place
        return {"probs_ratio", "probs_ratio_clamped", *EXTREMES}
    if stock.get("sequence_level_importance_ratios"):
        return {"sampling_importance_ratio"}
    return (
        {"gen_kl_error", "policy_kl_error"} if stock.get("reference_policy_kl_type", "k3") != "k3" else set()
    )


def test_every_stock_metric_has_its_counterpart():
    data = loss_data()
    _, ours = build_loss({"variant": "grpo", "reference_policy_kl_penalty": 0.1})(
        current_logprobs(data), data, **counts(data)
    )
    _, stock = ClippedPGLossFn(ClippedPGLossConfig())(current_logprobs(data), data, **counts(data))
    assert set(stock) - set(ours) == {"positive_nll_loss"}  # of a term that no variant has
