"""Every rule that spans keys: one recipe that breaks it, the same recipe that just does not."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_grpo.errors import UserError
from nemo_grpo.recipe import load_recipe_dict
from nemo_grpo.recipe.checks import ADVICE, CHECKS

GBS, MBS, LENGTH = (
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.max_total_sequence_length",
)
TP, PP = "policy.megatron_cfg.tensor_model_parallel_size", "policy.megatron_cfg.pipeline_model_parallel_size"
CP, EP = "policy.megatron_cfg.context_parallel_size", "policy.megatron_cfg.expert_model_parallel_size"
SP, OPTIMIZER = "policy.megatron_cfg.sequence_parallel", "policy.megatron_cfg.optimizer"
SCHEDULER, FP8 = "policy.megatron_cfg.scheduler", "policy.megatron_cfg.fp8_cfg"
GPUS, SHAPING, WARM = "cluster.gpus_per_node", "grpo.reward_shaping", "nemo_grpo.warm_start"

CASES: list[tuple[str, list[str], list[str], str]] = [
    ("megatron_is_on", ["policy.megatron_cfg.enabled=false"], [], "megatron_cfg.enabled=false"),
    ("model_is_named", ["policy.model_name=null"], [f"{WARM}={{}}"], "policy.model_name=null"),
    (
        "groups_have_a_spread",
        ["grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=8"],
        ["grpo.num_generations_per_prompt=2", "grpo.num_prompts_per_step=4"],
        "num_generations_per_prompt=1",
    ),
    ("step_splits_into_updates", [f"{GBS}=3", f"{MBS}=1"], [f"{GBS}=2"], f"{GBS}=3 .* 2 x 4 = 8; use 2 or 4"),
    ("step_splits_into_updates", [f"{GBS}=3"], [f"{GBS}=4"], f"{GBS}=3 .* = 8; use 4\n"),  # microbatches of 4
    ("step_splits_into_updates", [f"{GBS}=16"], [f"{GBS}=8"], f"{GBS}=16 .*; use 8$"),
    (
        "layout_fits_the_ranks",
        [f"{GPUS}=3", f"{TP}=2"],
        [f"{GPUS}=2"],
        "= 3 is not a multiple of .* = 2 x 1 x 1 = 2",
    ),
    ("layout_fits_the_ranks", [f"{GPUS}=2", f"{EP}=4"], [f"{EP}=2"], "expert_model_parallel_size=4"),
    ("update_splits_into_microbatches", [f"{GPUS}=4"], [f"{GPUS}=2"], "= 4 x 4; change"),
    ("prompt_has_room", [f"{LENGTH}=16"], [f"{LENGTH}=17"], "max_new_tokens=16"),
    (
        "loss_agrees",
        ["grpo.normalize_rewards=false"],
        ["loss_fn.normalize_rewards=false"],
        "grpo.normalize_rewards",
    ),
    (
        "loss_agrees",
        ["grpo.use_leave_one_out_baseline=true"],
        ["loss_fn.use_leave_one_out_baseline=true"],
        "use_leave_one_out_baseline=true, but grpo trains",
    ),
    (
        "loss_agrees",
        ["++grpo.adv_estimator={name: reinforce_plus_plus}"],
        ["++grpo.adv_estimator.name=grpo"],
        "adv_estimator.name=reinforce_plus_plus: the advantages are those of loss_fn.variant=grpo",
    ),
    (
        "loss_agrees",
        ["++grpo.adv_estimator={name: grpo, use_leave_one_out_baseline: true}"],
        ["loss_fn.use_leave_one_out_baseline=true"],
        "grpo.adv_estimator.use_leave_one_out_baseline=true, but grpo trains",
    ),
    (
        "loss_agrees",
        ["loss_fn.variant=gpg", "grpo.normalize_rewards=true"],
        ["grpo.normalize_rewards=false"],
        "grpo.normalize_rewards=true, but gpg",
    ),
    (
        "warmup_ends_before_the_decay",
        [f"{SCHEDULER}.lr_decay_iters=5", f"{SCHEDULER}.lr_warmup_iters=5"],
        [f"{SCHEDULER}.lr_warmup_iters=4"],
        "lr_warmup_iters=5",
    ),
    ("min_lr_is_below_lr", [f"{OPTIMIZER}.min_lr=0.1"], [f"{OPTIMIZER}.min_lr=1e-3"], "min_lr=0.1"),
    ("sequence_parallel_has_ranks", [f"{SP}=true"], [f"{TP}=2", f"{GPUS}=2"], "sequence_parallel=true"),
    (
        "sequence_splits_over_ranks",
        [f"{SP}=true", f"{TP}=2", f"{CP}=2", f"{GPUS}=4", f"{LENGTH}=60"],
        [f"{LENGTH}=64"],
        "=60 is not a multiple of 8",
    ),
    (
        "bins_hold_the_longest_sequence",
        ["policy.sequence_packing={enabled: true, train_mb_tokens: 63}"],
        ["policy.sequence_packing.train_mb_tokens=64"],
        "train_mb_tokens=63 is less than",
    ),
    (
        "scoring_matches_training_at_high_tp",
        [f"{TP}=4", f"{GPUS}=4", "policy.logprob_batch_size=2"],
        ["policy.logprob_batch_size=4"],
        "logprob_batch_size=2",
    ),
    ("fp8_preconditions", [f"{FP8}.enabled=true"], ["policy.precision=bfloat16"], "policy.precision=float32"),
    (
        "fp8_preconditions",
        [
            f"{FP8}.enabled=true",
            "policy.precision=bfloat16",
            f"{OPTIMIZER}.use_precision_aware_optimizer=true",
        ],
        [f"{OPTIMIZER}.use_precision_aware_optimizer=false"],
        "use_precision_aware_optimizer=true",
    ),
    (
        "fp8_recipe_can_leave_layers_out",
        [
            f"{FP8}.enabled=true",
            f"{FP8}.fp8_recipe=delayed",
            "policy.precision=bfloat16",
            "policy.megatron_cfg.model_overrides.first_last_layers_bf16=true",
        ],
        [f"{FP8}.fp8_recipe=tensorwise"],
        "first_last_layers_bf16=true: delayed scaling",
    ),
    (
        "overlong_buffer_fits",
        [f"{SHAPING}.enabled=true", f"{SHAPING}.overlong_buffer_length=16"],
        [f"{SHAPING}.overlong_buffer_length=15"],
        "overlong_buffer_length=16",
    ),
    (
        "early_stop_is_complete",
        ["grpo.stop_at_validation_threshold=0.9"],
        ["grpo.stop_at_validation_metric=accuracy"],
        "stop_at_validation_metric=null",
    ),
    (
        "rewards_count",
        ["nemo_grpo.rewards={accuracy: 0.0}"],
        ["nemo_grpo.rewards={format: 1.0}"],
        "every reward is 0",
    ),
    (
        "warm_start",
        [f"{WARM}.hidden_size=130"],
        [f"{WARM}.hidden_size=132"],
        "hidden_size=130 .*num_attention_heads=4",
    ),
    (
        "warm_start",
        [f"{WARM}.num_key_value_heads=3"],
        [f"{WARM}.num_key_value_heads=4"],
        "num_key_value_heads=3",
    ),
    (
        "warm_start",
        [f"{WARM}.num_key_value_heads=1", f"{TP}=2", f"{GPUS}=2"],
        [f"{WARM}.num_key_value_heads=2"],
        "num_key_value_heads=1 is not a multiple of TP=2",
    ),
    (
        "warm_start",
        [f"{WARM}.num_hidden_layers=3", f"{PP}=2", f"{GPUS}=2"],
        [f"{WARM}.num_hidden_layers=4"],
        "num_hidden_layers=3 is not a multiple of PP=2",
    ),
    (
        "warm_start",
        [f"{WARM}.max_position_embeddings=63"],
        [f"{WARM}.max_position_embeddings=64"],
        "=63 is less than",
    ),
    (
        "gpg_threshold_is_switched_on",
        ["loss_fn.variant=gpg", "loss_fn.valid_fraction_threshold=0.5"],
        ["grpo.use_dynamic_sampling=true"],
        "valid_fraction_threshold has no effect",
    ),
    (
        "erpo_has_a_reference",
        ["loss_fn.variant=erpo", "loss_fn.reference_policy_kl_penalty=0"],
        ["loss_fn.reference_policy_kl_penalty=1e-9"],
        "reference_policy_kl_penalty=0",
    ),
    (
        "erpo_has_entropies",
        ["loss_fn.variant=erpo", "policy.megatron_cfg.use_fused_linear_logprobs=true"],
        ["policy.megatron_cfg.use_fused_linear_logprobs=false"],
        "use_fused_linear_logprobs=true",
    ),
    (
        "released_loss_sees_whole_groups",
        ["loss_fn.variant=cw_grpo", "loss_fn.author_compat=true", f"{GBS}=2", f"{MBS}=1"],
        [f"{GBS}=4"],
        "train_global_batch_size=2 must be a multiple of grpo.num_generations_per_prompt=4",
    ),
    (
        "released_loss_sees_whole_groups",
        ["loss_fn.variant=cw_grpo", "loss_fn.author_compat=true", f"{GBS}=4", f"{MBS}=1", f"{GPUS}=2"],
        [f"{GBS}=8"],
        "one group for each of the 2 data-parallel ranks",
    ),
    (
        "advantages_are_not_clipped",
        ["loss_fn.variant=cw_grpo", "grpo.advantage_clip_low=-1"],
        ["loss_fn.variant=grpo"],
        "advantage_clip_low=-1: cw_grpo forbids it",
    ),
    (
        "data_plane_is_off",
        ["data_plane.enabled=true"],
        ["data_plane.enabled=false"],
        "data_plane.enabled=true",
    ),
]


@pytest.mark.parametrize(
    ("rule", "broken", "mended", "message"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_rule_refuses_the_broken_recipe_and_takes_the_mended_one(
    tree: dict[str, Any], rule: str, broken: list[str], mended: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe_dict(tree, broken)
    if rule != "megatron_is_on":
        load_recipe_dict(tree, broken + mended)


def test_every_rule_has_a_case() -> None:
    tested = {name for name, *_ in CASES}
    untested = [
        rule.__name__ for rule in CHECKS if not any(rule.__name__.startswith(name) for name in tested)
    ]
    assert untested == []


@pytest.mark.parametrize(
    "key", ["force_on_policy_ratio", "token_level_loss", "disable_ppo_ratio", "use_kl_in_reward"]
)
def test_stock_loss_keys_are_refused_with_a_remedy(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"loss_fn.{key}=true is not supported: ") as raised:
        load_recipe_dict(tree, [f"loss_fn.{key}=true"])
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["loss_fn.variant=dapo"], "dapo without"),
        (["loss_fn.variant=gpg"], "gpg without"),
        (["loss_fn.ratio_clip_max=0.3"], "with one update per step the ratio is 1"),
    ],
)
def test_advice_is_given_only_where_it_applies(
    tree: dict[str, Any], overrides: list[str], sentence: str
) -> None:
    assert load_recipe_dict(tree).advice() == []
    given = load_recipe_dict(tree, overrides).advice()
    assert len(given) == 1
    assert sentence in given[0]
    assert len(ADVICE) == 3
    mended = [*overrides, "grpo.use_dynamic_sampling=true", f"{GBS}=4"]
    assert load_recipe_dict(tree, mended).advice() == []


def test_a_resolved_recipe_gives_no_new_complaints(tree: dict[str, Any]) -> None:
    recipe = load_recipe_dict(tree, ["loss_fn.variant=gpg"])
    assert load_recipe_dict(recipe.to_dict()).advice() == recipe.advice()
