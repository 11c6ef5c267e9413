"""Every variant against its equations written as plain loops, on random steps."""

import oracles
import pytest
from hypothesis import assume, given, settings
from steps import steps

from nemo_grpo import TokenBatch, build_objective
from nemo_grpo.variants.small_steps import loss_and_gradient

CASES = [
    ("grpo", {"reference_policy_kl_penalty": 0.1}, lambda s: oracles.grpo(s, beta=0.1)),
    ("dr_grpo", {"max_response_length": 7}, lambda s: oracles.dr_grpo(s, 7)),
    ("dapo", {}, lambda s: oracles.grpo(s, high=0.28)),
    ("gspo", {}, oracles.gspo),
    ("gspo", {"ratio_clip_min": 0.05, "ratio_clip_max": 0.1}, lambda s: oracles.gspo(s, 0.05, 0.1)),
    ("cispo", {}, oracles.cispo),
    (
        "cispo",
        {"ratio_clip_min": 0.1, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.1},
        lambda s: oracles.cispo(s, 0.1, 0.2, beta=0.1),
    ),
    ("cw_grpo", {}, oracles.cw_grpo),
    ("tr_grpo", {}, oracles.tr_grpo),
    (
        "tr_grpo",
        {"weight_placement": "inside", "upper": 1.2},
        lambda s: oracles.tr_grpo(s, placement="inside", upper=1.2),
    ),
    ("erpo", {"num_buckets": 2}, lambda s: oracles.erpo(s, buckets=2)),
    ("erpo", {}, oracles.erpo),
    ("gpg", {}, oracles.gpg),
    ("gpg", {"reference_policy_kl_penalty": 0.1}, lambda s: oracles.gpg(s, beta=0.1)),
    (
        "grpo",
        {"aggregation": "group_token_mean", "reference_policy_kl_penalty": 0.1},
        lambda s: oracles.mean_over_groups(oracles.grpo, s, beta=0.1),
    ),
    ("tr_grpo", {"aggregation": "group_token_mean"}, lambda s: oracles.mean_over_groups(oracles.tr_grpo, s)),
    (
        "gpg",  # of a single group alpha is 1
        {"aggregation": "group_token_mean", "use_alpha": False},
        lambda s: oracles.mean_over_groups(oracles.gpg, s),
    ),
]


def as_lists(batch: TokenBatch) -> oracles.Step:
    """Groups of counting responses of counting tokens."""
    groups: dict[int, list[oracles.Response]] = {}
    for row in range(len(batch.rewards)):
        if not batch.sample_mask[row]:
            continue
        mask = batch.token_mask[row]
        groups.setdefault(int(batch.group_ids[row]), []).append(
            {
                "cur": batch.next_token_logprobs[row][mask].tolist(),
                "prev": batch.prev_logprobs[row][mask].tolist(),
                "ref": batch.reference_policy_logprobs[row][mask].tolist(),
                "ent": batch.entropies[row][mask].tolist(),
                "r": batch.rewards[row].item(),
            }
        )
    return list(groups.values())


@pytest.mark.parametrize(("name", "parameters", "oracle"), CASES)
@settings(max_examples=60, deadline=None)
@given(batch=steps())
def test_loss_equals_the_equations(name, parameters, oracle, batch):
    assume(batch.mask.any())
    value, _, _ = loss_and_gradient(build_objective(name, **parameters), batch)
    assert value.item() == pytest.approx(oracle(as_lists(batch)), rel=1e-9, abs=1e-12)
