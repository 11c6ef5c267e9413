"""What a TokenBatch refuses, and what a preparation does with missing tensors."""

import pytest
import torch

from nemo_grpo import TokenBatch, UserError, build_objective
from nemo_grpo.core.advantages import overlong_penalty


def fields(**changes):
    base = {
        "prev_logprobs": torch.zeros(2, 3),
        "token_mask": torch.ones(2, 3),
        "sample_mask": torch.ones(2),
        "rewards": torch.tensor([1.0, 0.0]),
        "group_ids": torch.tensor([0, 0]),
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prev_logprobs": torch.zeros(3)}, r"prev_logprobs has shape \(3,\)"),
        ({"token_mask": torch.ones(2, 4)}, r"token_mask has shape \(2, 4\)"),
        ({"rewards": torch.zeros(2, 1)}, "rewards has shape"),
        ({"entropies": torch.zeros(1, 3)}, "entropies has shape"),
        ({"prev_logprobs": torch.zeros(2, 3, dtype=torch.bfloat16)}, "prev_logprobs is torch.bfloat16; use"),
        (
            {"entropies": torch.zeros(2, 3, dtype=torch.float64)},
            "entropies is torch.float64 and prev_logprobs",
        ),
        ({"group_ids": torch.zeros(2)}, "integer"),
        ({"sample_mask": torch.ones(2, device="meta")}, "meta"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TokenBatch(**fields(**changes))


def test_masks_of_any_dtype_become_bool():
    batch = TokenBatch(
        **fields(token_mask=torch.tensor([[1, 0, 1], [0, 0, 1]]), sample_mask=torch.tensor([1.0, 0.0]))
    )
    assert batch.mask.tolist() == [[True, False, True], [False, False, False]]


def test_generation_logprobs_default_to_prev_logprobs():
    batch = TokenBatch(**fields())
    assert batch.generation_logprobs is batch.prev_logprobs


def test_next_token_logprobs_have_no_default():
    assert TokenBatch(**fields()).next_token_logprobs is None


@pytest.mark.parametrize("name", ["token_mask", "sample_mask"])
def test_a_weight_in_a_mask_is_refused_with_its_place(name):
    mask = fields()[name].float()
    mask[1] = 0.5
    place = "1" if mask.ndim == 1 else "1, 0"
    with pytest.raises(ValueError, match=rf"{name}\[{place}\] is 0.5; a mask is 0 or 1"):
        TokenBatch(**fields(**{name: mask}))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"prev_logprobs": None}, r"prev_logprobs is None; give a \[B, T\] tensor"),
        ({"rewards": None}, r"rewards is None; give a \[B\] tensor"),
        ({"rewards": [1.0, 0.0]}, "rewards is a list; give a tensor"),
    ],
)
def test_a_field_that_is_no_tensor_is_refused_by_its_name(field, message):
    with pytest.raises(TypeError, match=message):
        TokenBatch(**fields(**field))


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_unless_the_response_is_left_out(reward):
    objective, rewards = build_objective("grpo"), torch.tensor([0.0, reward])
    with pytest.raises(ValueError, match=rf"rewards\[1\] is {reward}; leave a response out"):
        objective.prepare(TokenBatch(**fields(rewards=rewards)))
    kept = TokenBatch(**fields(rewards=rewards, sample_mask=torch.tensor([True, False])))
    assert objective.prepare(kept).advantages.isfinite().all()


COUNTS = {"global_valid_toks": 6, "global_valid_seqs": 2}


def test_a_loss_needs_a_prepared_batch():
    with pytest.raises(TypeError, match="what prepare returns, not a TokenBatch"):
        build_objective("grpo").loss(TokenBatch(**fields()), **COUNTS)


def test_a_loss_needs_the_current_policys_logprobs():
    objective = build_objective("grpo")
    with pytest.raises(ValueError, match="next_token_logprobs is missing"):
        objective.loss(objective.prepare(TokenBatch(**fields())), **COUNTS)


@pytest.mark.parametrize(
    ("name", "parameters", "missing"),
    [("erpo", {}, "entropies"), ("grpo", {"reference_policy_kl_penalty": 0.1}, "reference_policy_logprobs")],
)
def test_missing_tensors_are_named(name, parameters, missing):
    with pytest.raises(ValueError, match=f"{name} needs TokenBatch.{missing}"):
        build_objective(name, **parameters).prepare(TokenBatch(**fields()))


CORRECTED = {"use_importance_sampling_correction": True}


def spelt_out(parameters):
    """Parameters of a truncation have a long beginning."""
    long = {name: f"truncated_importance_sampling_{name}" for name in ("type", "ratio", "ratio_min")}
    return {long.get(name, name): value for name, value in parameters.items()}


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("dr_grpo", {}, "aggregation=constant divides by max_response_length"),
        ("grppo", {}, "did you mean 'grpo'"),
        ("ppo", {}, "loss_fn.variant='ppo' is not a variant"),
        ("grpo", {"ratio_clip_mx": 0.2}, "did you mean 'ratio_clip_max'"),
        ("gpg", {"ratio_clip_max": 0.2}, "loss_fn.ratio_clip_max is not a parameter of gpg"),
        ("grpo", {"ratio_clip_max": "0.2"}, "loss_fn.ratio_clip_max='0.2'"),
        ("grpo", {"ratio_clip_max": None}, "a clip has two sides"),
        ("grpo", {"ratio_clip_c": 0.5}, "greater than 1"),
        ("clip_cov", {"covariance_min": 9.0}, "must be below covariance_max"),
        ("tr_grpo", {"lower": 1.5}, "must not exceed"),
        ("tr_grpo", {"reference_policy_kl_type": "k2"}, "kl_weighting=inside is defined"),
        (
            "grpo",
            {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.1},
            "set kl_score_function_gradient=true",
        ),
        ("erpo", {"entropy_momentum": 0.5}, "no effect with entropy_statistics=group; set"),
        ("gpg", {"use_alpha": 0}, "loss_fn.use_alpha=0: .*boolean"),
        ("cw_grpo", {"author_compat": True, "scope": "batch"}, "author_compat=true is the released code"),
        # another algorithm
        ("gspo", {"aggregation": "token_mean"}, "aggregation=token_mean: .* use sequence_mean"),
        ("gspo", {"sequence_level_importance_ratios": False}, "one ratio per response"),
        ("cispo", {"sequence_level_importance_ratios": True}, "whose weights are of tokens"),
        ("cispo", {"ratio_clip_c": 3.0}, "whose clip leaves every gradient"),
        ("grpo", {"use_cispo": True}, "use loss_fn.variant=cispo"),
        ("sft", {"aggregation": "sequence_mean"}, "=sequence_mean: sft has no parameters; leave it out"),
        ("sft", {"ratio_clip_min": 0.1}, "ratio_clip_min is not a parameter of sft"),
        # weights that are not positive, or constant
        ("tr_grpo", {"weighting": "reverse", "upper": 2.0}, "must be positive; use upper < 2"),
        ("tr_grpo", {"tau_convention": "divide"}, "to every token"),
        ("tr_grpo", {"tau_convention": "divide", "weighting": "reverse"}, "to every token"),
        ("tr_grpo", {"tau": 0.5}, "to every token"),
        ("tr_grpo", {"lower": 1.2, "upper": 1.2}, "to every token"),
        ("tr_grpo", {"alpha": 0.0, "lower": 0.5}, "to every token"),
        ("grpo", CORRECTED | {"type": "tis"}, "set type and ratio together"),
        ("grpo", CORRECTED | {"ratio": 2.0}, "set type and ratio together"),
        ("grpo", CORRECTED | {"ratio_min": 0.5}, "ratio_min with them"),
        ("grpo", CORRECTED | {"type": "icepop", "ratio": 2.0}, "icepop needs a lower bound"),
        ("grpo", CORRECTED | {"type": "seq-mask-tis", "ratio": 2.0}, "seq-mask-tis needs a lower bound"),
        (
            "grpo",
            CORRECTED | {"type": "tis", "ratio": 2.0, "ratio_min": 2.5},
            "_ratio_min=2.5 is above _ratio=2.0",
        ),
    ],
)
def test_bad_parameters_are_refused_with_the_remedy(name, parameters, message):
    with pytest.raises(UserError, match=message):
        build_objective(name, **spelt_out(parameters))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tr_grpo", {"weighting": "reverse", "upper": 1.99}),
        ("tr_grpo", {"tau": 0.5, "allow_constant_weight": True}),
        ("grpo", CORRECTED | {"type": "tis", "ratio": 2.0}),
    ],
)
def test_parameters_within_the_rules_are_taken(name, parameters):
    assert build_objective(name, **spelt_out(parameters))


def test_overlong_penalty_by_hand():
    """L_max 20, buffer 8: free up to 12, then one eighth of the penalty per token, all of it from 20 on."""
    penalty = overlong_penalty(
        torch.tensor([3, 12, 13, 16, 20, 25]), max_response_length=20, buffer_length=8, penalty=0.5
    )
    assert penalty.tolist() == [0.0, 0.0, -0.0625, -0.25, -0.5, -0.5]
