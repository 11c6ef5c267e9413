"""Token weights and row factors multiplied into the advantages: the same loss, for every variant that may."""

from dataclasses import replace

import pytest
import torch
from steps import PARAMETERS

from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.small_steps import SEED, changed, example_step, loss_and_gradient

GROUPS = {"aggregation": "group_token_mean", "reference_policy_kl_penalty": 0.0}
CORRECTED = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 1.004,
    "truncated_importance_sampling_ratio_min": 0.996,
}
RANDOM = {"variant": "tr_grpo", "weighting": "random"}
PLAIN = {"gspo"}
"""Variants with neither: one ratio per response needs sequence_mean."""
CASES = {
    **{
        name: {"variant": name, **parameters, **GROUPS}
        for name, parameters in PARAMETERS.items()
        if name not in PLAIN
    },
    "dual clip": {"variant": "grpo", "ratio_clip_c": 1.1, **GROUPS},
    "no clip": {"variant": "grpo", "ratio_clip_min": None, "ratio_clip_max": None, **GROUPS},
    "corrected": {"variant": "dapo", **CORRECTED, **GROUPS},
    "weight inside": {"variant": "tr_grpo", "weight_placement": "inside", "upper": 1.2, **GROUPS},
    "random": {**RANDOM, "reference_policy_kl_penalty": 0.0},
    "random, plain penalty": {**RANDOM, "reference_policy_kl_penalty": 0.1, "kl_weighting": "none"},
    "random of groups": {**RANDOM, **GROUPS},
}


@pytest.mark.parametrize("case", CASES)
def test_folded_weights_give_the_same_loss_and_gradient(case):
    """Row by row; `found.folds` compares whole steps."""
    config = parse_loss_fn(CASES[case])
    assert config.found.folds
    batch = changed(example_step(), response_ids=torch.arange(5))
    if not config.needs_reference:
        batch = replace(batch, reference_policy_logprobs=None)
    loss, gradient, prepared = loss_and_gradient(config.build(), batch)
    rows = list(torch.arange(5).split(1))
    folded, of_folded, _ = loss_and_gradient(config.build(), batch, rows, folded=True)
    assert prepared.token_weights is not None or prepared.row_factors is not None
    torch.testing.assert_close(folded, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_folded, gradient, rtol=1e-12, atol=1e-12)


def test_folded_advantages_by_hand():
    batch = example_step()  # tokens: 4, 1, 0 in the first group, 3, 4 in the second
    prepared = (
        parse_loss_fn({"variant": "dr_grpo", "max_response_length": 7, **GROUPS})
        .build()
        .prepare(batch, seed=SEED)
    )
    folded = prepared.folded()
    centred = torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.35, -0.35], dtype=torch.float64)
    factors = torch.tensor([0.5, 0.5, 0.5, 5 / 14, 5 / 14], dtype=torch.float64)  # 5 responses / 2 groups / n
    expected = (centred * factors)[:, None] * batch.mask
    torch.testing.assert_close(folded.advantages, expected, rtol=1e-12, atol=1e-12)
    assert folded.row_factors is None
