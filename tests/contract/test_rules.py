"""Every rule about recipes: shipped ones keep it, a change breaks it, a second change repairs that."""

import re
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from nemo_grpo.plan.hardware import HARDWARE
from nemo_grpo.plan.presets import shape_of
from nemo_grpo.plan.rules import problems
from nemo_grpo.plan.setup import setup_of
from nemo_grpo.recipe import Recipe, advice, load_recipe, load_recipe_dict, refuse_unsupported
from nemo_grpo.recipe.embedded_rules import SUPPORTED
from nemo_grpo.recipe.loader import apply_overrides, load_tree
from nemo_grpo.recipe.registry import RULES, Scope
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
PROBLEMS = Path(__file__).with_name("three_problems.jsonl")
SHIPPED = sorted(p for p in RECIPES.rglob("*.yaml") if not {"base", "sweeps"} & {*p.parts})
SMALL = [  # 8 responses per step in one update of two microbatches, on one rank
    *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4"),
    *("policy.train_micro_batch_size=4", "policy.max_total_sequence_length=64"),
    *("policy.generation.max_new_tokens=16", "policy.sequence_packing.enabled=false"),
]
BASES: dict[str, tuple[str, list[str]]] = {
    "embedded": ("quickstart", [*SMALL, "policy.model_name=some/model", "nemo_grpo.warm_start=null"]),
    "cluster": (
        "cluster-quickstart",
        [*SMALL, "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false"],
    ),
    "small": ("cw_grpo/cw_grpo-r1-distill-qwen-1.5b-1n8g", []),
    "fp8": ("cw_grpo/cw_grpo-qwen2.5-math-7b-instruct-1n8g-fp8", []),
    "moe": ("cw_grpo/cw_grpo-qwen3-30b-a3b-4n8g", []),
    "lora": ("erpo/erpo-qwen2.5-7b-1n8g", []),
    "logic": ("tr_grpo/tr_grpo-qwen2.5-7b-instruct-1m-logic-1n8g", []),
    "search": ("tr_grpo/tr_grpo-qwen3-4b-instruct-2507-search-1n8g", []),
    "huge": ("tr_grpo/tr_grpo-llama-3.1-70b-instruct-logic-8n8g", []),
    "long": ("gpg/gpg-qwen2.5-32b-4n8g", []),
    "dapo": ("gpg/dapo-qwen2.5-math-7b-zero-6n8g", []),
    "vision": ("gpg/gpg-qwen2.5-vl-3b-geoqa-1n8g", []),
    "sft": ("quickstart-sft", []),
    "stock": (
        "cw_grpo/cw_grpo-r1-distill-qwen-1.5b-1n8g",
        [
            *("~nemo_grpo.task", "~nemo_grpo.prompt", "~nemo_grpo.rewards"),
            *("++data.train={dataset_name: gsm8k, env_name: math}", "++env.math.num_workers=1"),
        ],
    ),
    "shown": ("erpo/sft-qwen2.5-7b-1n8g", []),
}
M, G = "policy.megatron_cfg", "policy.generation"
SHORT = {
    "M": M, "G": G, "V": f"{G}.vllm_cfg", "OPT": f"{M}.optimizer", "PEFT": f"{M}.peft", "FP8": f"{M}.fp8_cfg",
    "TP": f"{M}.tensor_model_parallel_size", "PP": f"{M}.pipeline_model_parallel_size",
    "CP": f"{M}.context_parallel_size", "EP": f"{M}.expert_model_parallel_size",
    "ETP": f"{M}.expert_tensor_parallel_size", "SP": f"{M}.sequence_parallel",
    "GBS": "policy.train_global_batch_size", "MBS": "policy.train_micro_batch_size",
    "LENGTH": "policy.max_total_sequence_length", "GPUS": "cluster.gpus_per_node",
    "PAD": "policy.make_sequence_length_divisible_by", "PACKING": "policy.sequence_packing",
    "PACK": "policy.sequence_packing.enabled=true", "DYNAMIC": "policy.dynamic_batching.enabled=true",
    "FUSED": f"{M}.use_fused_linear_logprobs=true", "DRAWS": "grpo.use_dynamic_sampling=true",
    "MOST_DRAWS": "grpo.dynamic_sampling_max_gen_batches",
    "OVERLAP": f"{M}.distributed_data_parallel_config.overlap_param_gather",
    "CORRECTED": "loss_fn.use_importance_sampling_correction=true", "SHAPING": "grpo.reward_shaping",
    "WARM": "nemo_grpo.warm_start", "SCHEDULER": f"{M}.scheduler",
    "APART": f"{G}.colocated={{enabled: false, resources: {{gpus_per_node: 1, num_nodes: 1}}}}",
    "PLANE": "++data_plane.enabled=true",
    "AUTHOR": "loss_fn.variant=cw_grpo; loss_fn.author_compat=true",
    "SEARCH": "nemo_grpo.task={name: search_qa}; grpo.max_rollout_turns=4",
    "STOPS": f"{G}.stop_strings=[</search>, </answer>]",
}  # fmt: skip
SHORT["GYM"] = (
    "env.should_use_nemo_gym=true; ++env.nemo_gym={config_paths: []}; grpo.max_val_samples=null; "
    "grpo.val_batch_size=null"
)
SHORT["ASYNC"] = Template("grpo.async_grpo.enabled=true; $V.async_engine=true; $GPUS=2; $APART").substitute(
    SHORT
)
SHORT["RECOMPUTE"] = "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"
SHORT["CHUNK"] = "async_rl.min_groups_for_streaming_train"
SHORT["CONTROLLER"] = Template(
    "$PLANE; ++$CHUNK=2; $V.async_engine=true; $GPUS=2; $APART; checkpointing.metric_name=null; $CORRECTED; "
    "grpo.val_period=0; grpo.val_at_start=false; grpo.val_at_end=false"
).substitute(SHORT)


# rule, recipes, what breaks it, what the message says, what then repairs it; "-": nothing short
# fmt: off
CASES: list[tuple[str, str, str, str, str]] = [
    # names and types of keys
    ("unknown key", "small huge", "grpo.max_num_stps=5", "max_num_stps=5: .*did you mean 'max_num_steps'",
     "-"),
    ("unknown key", "fp8", "$FP8.first_last_layers_bf16=true", "first_last_layers_bf16=true", "-"),
    ("_parse_loss_fn", "small lora", "loss_fn.force_on_policy_ratio=true",
     "force_on_policy_ratio=true: the advantages are shaped by", "~loss_fn.force_on_policy_ratio"),
    ("forced_ratio_makes_one_update_per_step", "search", "loss_fn.force_on_policy_ratio=true; $GBS=64",
     "force_on_policy_ratio=true: the ratio is 1 in the first of", "~loss_fn.force_on_policy_ratio"),
    ("_parse_loss_fn", "embedded", "loss_fn.token_level_loss=true",
     "token_level_loss=true is not .*aggregation", "-"),
    ("_parse_loss_fn", "embedded", "loss_fn.disable_ppo_ratio=true", "disable_ppo_ratio=true is not .*=gpg$",
     "-"),
    ("_parse_loss_fn", "embedded", "loss_fn.use_kl_in_reward=true", "use_kl_in_reward=true is not .*leave",
     "-"),
    ("task_settings_need_a_task", "stock", "nemo_grpo.target=embedded",
     "target=embedded: .*reads no data.train", "nemo_grpo.target=cluster"),
    ("task_settings_need_a_task", "stock", "nemo_grpo.rewards={format: 1.0}",
     "rewards: without nemo_grpo.task", "~nemo_grpo.rewards"),
    ("task_settings_need_a_task", "stock", "nemo_grpo.prompt={preset: gpg}", "prompt: without nemo_grpo.task",
     "~nemo_grpo.prompt"),
    ("environments_of_the_data_are_configured", "stock", "data.train.env_name=maths",
     "data.train.env_name=maths: .*which has math; add env.maths", "data.train.env_name=math"),
    ("_parse_task", "small", "nemo_grpo.task.name=maths", "did you mean 'math'", "nemo_grpo.task.name=math"),
    ("_run_name_is_a_folder_name", "embedded", "nemo_grpo.run_name=../x", "plain folder name",
     "nemo_grpo.run_name=x"),
    ("_run_name_is_a_folder_name", "embedded", "nemo_grpo.run_name='x$(touch y)'", "letters, digits and",
     "nemo_grpo.run_name=x-1.5_y"),
    ("_fill_in_the_preset", "embedded", "nemo_grpo.prompt={preset: gppg}",
     "'gppg' is unknown; did you mean 'gpg'", "nemo_grpo.prompt={preset: gpg}"),
    ("_template_has_a_slot", "embedded", "nemo_grpo.prompt={template: hello}", "put {question} there",
     "nemo_grpo.prompt={template: '{question}'}"),
    ("_open_think_tag_is_known_to_the_task", "logic", "nemo_grpo.task.think_is_open=false",
     "set nemo_grpo.task.think_is_open=true", "nemo_grpo.task.think_is_open=true"),
    ("_reward_components_exist", "small logic", "nemo_grpo.rewards.iou=1", "rewards.iou=1.0: task",
     "~nemo_grpo.rewards.iou"),
    ("_reward_components_exist", "embedded", "nemo_grpo.rewards.accuracy=1.0e30", "would vanish beside it",
     "nemo_grpo.rewards.accuracy=1.0e6"),
    ("_reward_components_exist", "embedded", "nemo_grpo.rewards.accuracy=0.0", "every reward is 0",
     "nemo_grpo.rewards.format=1.0"),
    # one section
    ("_one_backend_trains", "embedded small", "$M.enabled=false",
     "dtensor_cfg.enabled=false, $M.enabled=false: one of", "$M.enabled=true"),
    ("_one_backend_trains", "small", "policy.dtensor_cfg.enabled=true",
     "dtensor_cfg.enabled=true, $M.enabled=true: one of", "$M.enabled=false"),
    ("_min_lr_is_at_most_lr", "embedded small lora", "$OPT.min_lr=1", "min_lr=1.0 is above",
     "$OPT.min_lr=1e-8"),
    ("_warmup_ends_before_decay", "embedded small",
     "$SCHEDULER.lr_decay_iters=50; $SCHEDULER.lr_warmup_iters=50",
     "scheduler.lr_warmup_iters=50 must be less", "$SCHEDULER.lr_warmup_iters=49"),
    ("_sequence_parallel_needs_tensor_parallel", "embedded", "$SP=true", "cfg.sequence_parallel=true",
     "$TP=2; $GPUS=2"),
    ("_sequence_parallel_needs_tensor_parallel", "small lora search", "$SP=true", "sequence_parallel=true",
     "$SP=false"),
    ("_delayed_scaling_covers_all_layers", "fp8",
     "$FP8.fp8_recipe=delayed; $M.model_overrides.first_last_layers_bf16=true",
     "first_last_layers_bf16=true: delayed", "$FP8.fp8_recipe=tensorwise"),
    ("_heads_divide_the_width", "embedded", "$WARM={hidden_size: 132}",
     "warm_start.hidden_size=132 .*heads=4; use 136", "$WARM.hidden_size=136"),
    ("_heads_divide_the_width", "embedded", "$WARM={num_key_value_heads: 3}", "num_key_value_heads=3",
     "$WARM.num_key_value_heads=4"),
    ("_overlong_buffer_is_shorter_than_responses", "embedded",
     "$SHAPING.enabled=true; $SHAPING.overlong_buffer_length=16", "overlong_buffer_length=16 must",
     "$SHAPING.overlong_buffer_length=15"),
    ("_early_stop_has_metric_and_threshold", "embedded", "grpo.stop_at_validation_threshold=0.9",
     "grpo.stop_at_validation_metric=null", "grpo.stop_at_validation_metric=accuracy"),
    ("_early_stop_has_metric_and_threshold", "embedded", "grpo.stop_at_validation_metric=accuracy",
     "threshold=null", "grpo.stop_at_validation_threshold=0"),
    ("prompt_has_room", "embedded", "$LENGTH=16", "max_new_tokens=16 leaves no room", "$LENGTH=17"),
    ("prompt_has_room", "cluster", "$LENGTH=15", "max_new_tokens=16 leaves no room", "$LENGTH=16"),
    ("prompt_has_room", "small search", "$G.max_new_tokens=99999", "max_new_tokens=99999 leaves no room",
     "-"),
    ("_longest_sequence_splits_over_ranks", "embedded", "$SP=true; $TP=2; $CP=2; $GPUS=4; $LENGTH=60",
     "sequence_length=60 is not a multiple of 8", "$LENGTH=64"),
    ("_longest_sequence_splits_over_ranks", "logic", "$TP=3", "is not a multiple of 3 .2 CP", "$TP=2"),
    ("microbatches_hold_the_longest_sequence", "embedded", "$PACKING={enabled: true, train_mb_tokens: 63}",
     "train_mb_tokens=63 is less", "$PACKING.train_mb_tokens=64"),
    ("a_long_sequence_may_end_the_run", "small huge", "$PACKING.train_mb_tokens=100", "=100 is less", "-"),
    ("a_long_sequence_may_end_the_run", "small long", "$PACKING.logprob_mb_tokens=100", "=100 is less", "-"),
    ("_fp8_keeps_the_rest_in_bf16", "embedded", "$M.fp8_cfg.enabled=true", "policy.precision=float32: FP8",
     "policy.precision=bfloat16"),
    ("_packing_algorithm_exists", "small", "$PACKING.algorithm=modified_ffd",
     "sequence_packing.algorithm=modified_ffd is none .*valid: .*modified_first_fit_decreasing",
     "$PACKING.algorithm=modified_first_fit_decreasing"),
    ("groups_fit_the_objective", "embedded small dapo", "grpo.num_generations_per_prompt=1",
     "per_prompt=1 must be at least 2", "grpo.num_generations_per_prompt=4"),
    # demonstrations
    ("groups_fit_the_objective", "sft shown", "grpo.num_generations_per_prompt=2",
     "per_prompt=2: sft trains on one demonstration", "grpo.num_generations_per_prompt=1"),
    ("demonstrations_need_no_rollout_settings", "sft shown", "$DRAWS",
     "use_dynamic_sampling=true has no effect on sft", "grpo.use_dynamic_sampling=false"),
    ("demonstrations_need_no_rollout_settings", "sft shown", "grpo.overlong_filtering=true",
     "overlong_filtering=true has no effect on sft", "grpo.overlong_filtering=false"),
    ("demonstrations_make_one_update_per_step", "sft", "$GBS=32",
     "=32: a step of sft is one update on grpo.num_prompts_per_step=64", "$GBS=64"),
    ("demonstrations_make_one_update_per_step", "shown", "$GBS=8",
     "=8: a step of sft is one update on grpo.num_prompts_per_step=16", "$GBS=16"),
    ("demonstrations_train_to_the_last_step", "shown",
     "grpo.stop_at_validation_metric=val_loss; grpo.stop_at_validation_threshold=0.1",
     "metric=val_loss: NeMo-RL's sft has no early stop",
     "grpo.stop_at_validation_metric=null; grpo.stop_at_validation_threshold=null"),
    ("demonstrations_are_texts", "vision",
     "loss_fn={_override_: true, variant: sft}; grpo.num_generations_per_prompt=1; $GBS=16; "
     "grpo.use_dynamic_sampling=false; checkpointing.metric_name=null",
     "vision_math: sft has no demonstrations with images", "-"),
    ("validation_metrics_exist", "shown",
     "checkpointing.metric_name=val:accuracy; checkpointing.save_period=100",
     "has no metric 'validation/accuracy'", "checkpointing.metric_name=val:val_loss"),
    # across sections
    ("model_is_named", "embedded", "policy.model_name=null", "policy.model_name=null", "$WARM={}"),
    ("model_is_no_checkpoint_of_nemo", "small", "policy.model_name=base.nemo",
     "model_name=base.nemo is a NeMo 1 checkpoint", "policy.model_name=Qwen/Qwen2.5-1.5B"),
    ("warm_start_fits_the_layout", "embedded", "$WARM.num_key_value_heads=1; $TP=2; $GPUS=2",
     "num_key_value_heads=1 is not a multiple of TP=2", "$WARM.num_key_value_heads=2"),
    ("warm_start_fits_the_layout", "embedded", "$WARM.num_hidden_layers=3; $PP=2; $GPUS=2",
     "num_hidden_layers=3 is not a multiple of PP=2", "$WARM.num_hidden_layers=4"),
    ("warm_start_fits_the_layout", "embedded", "$WARM.max_position_embeddings=63", "=63 is less than",
     "$WARM.max_position_embeddings=64"),
    ("updates_divide_the_step", "embedded", "$GBS=3; $MBS=1", "$GBS=3 .* 2 x 4 = 8; use 2 or 4", "$GBS=2"),
    ("updates_divide_the_step", "embedded", "$GBS=3", "$GBS=3 .* = 8; use 4$", "$GBS=4"),  # microbatches of 4
    ("updates_divide_the_step", "embedded", "$GBS=16", "$GBS=16 .*; use 8$", "$GBS=8"),
    ("updates_divide_the_step", "small logic huge", "$GBS=100", "train_global_batch_size=100 does not", "-"),
    ("updates_average_whole_groups", "embedded", "loss_fn.aggregation=group_token_mean; $GBS=2; $MBS=1",
     "$GBS=2 is not a multiple of grpo.num_generations_per_prompt=4", "$GBS=4"),
    ("updates_average_whole_groups", "embedded cluster",
     "loss_fn.aggregation=group_token_mean; $GBS=4; grpo.overlong_filtering=true",
     "overlong_filtering=true leaves groups .* the 2 updates of a step; use $GBS=8", "$GBS=8"),
    ("updates_average_whole_groups", "cluster",
     "loss_fn.aggregation=group_token_mean; $GBS=4; grpo.seq_logprob_error_threshold=2",
     "threshold=2.0 leaves groups", "loss_fn.aggregation=token_mean"),
    ("layout_divides_the_ranks", "embedded", "$GPUS=3; $TP=2", "= 3 is not a multiple of .* = 2 x 1 x 1 = 2",
     "$GPUS=2"),
    ("layout_divides_the_ranks", "cluster", "$GPUS=2; $EP=4", "expert_model_parallel_size=4 does not",
     "$EP=2"),
    ("layout_divides_the_ranks", "huge", "$GPUS=6", "is not a multiple of", "-"),
    ("layout_divides_the_ranks", "small logic", "$TP=3; $SP=false", "= 3 x 1 x 1", "$TP=1"),
    ("microbatches_divide_the_update", "embedded", "$GPUS=4", "= 4 x 4; change", "$GPUS=2"),
    ("microbatches_divide_the_update", "logic", "$GPUS=6", "of 3 data-parallel ranks; change", "$GPUS=8"),
    ("grpo_section_agrees_with_the_loss", "embedded", "grpo.normalize_rewards=false",
     "grpo.normalize_rewards", "loss_fn.normalize_rewards=false"),
    ("grpo_section_agrees_with_the_loss", "embedded small moe lora logic search huge long dapo vision",
     "grpo.use_leave_one_out_baseline=true", r"use_leave_one_out_baseline=true, but \w+ trains",
     "grpo.use_leave_one_out_baseline=false"),
    ("grpo_section_agrees_with_the_loss", "embedded", "loss_fn.variant=gpg; grpo.normalize_rewards=true",
     "grpo.normalize_rewards=true, but gpg", "grpo.normalize_rewards=false"),
    ("reference_is_scored_for_a_penalty", "embedded logic",
     "loss_fn.reference_policy_kl_penalty=0.1; ++grpo.skip_reference_policy_logprobs_calculation=true",
     "calculation=true, but .*penalty=0.1 needs", "loss_fn.reference_policy_kl_penalty=0"),
    ("validation_metrics_exist", "embedded cluster", "checkpointing.metric_name=val:acuracy",
     "no metric 'validation/acuracy'; did you mean 'validation/accuracy'",
     "checkpointing.metric_name=val:accuracy"),
    ("validation_metrics_exist", "embedded",
     "grpo.stop_at_validation_metric=pass@3; grpo.stop_at_validation_threshold=1",
     "no metric 'validation/pass@3'", "grpo.stop_at_validation_metric=pass@4"),
    ("validation_metrics_exist", "cluster", "checkpointing.metric_name=val:pass_k",
     "no metric 'validation/pass_k'", "grpo.val_num_generations_per_prompt=2"),
    ("validation_metrics_exist", "cluster", "checkpointing.metric_name=val:greedy",
     "; valid: 'validation/acc|no metric", "checkpointing.metric_name=train:anything"),
    ("sampling_parameters_have_an_effect", "embedded",
     "loss_fn.variant=gpg; loss_fn.valid_fraction_threshold=0.5", "valid_fraction_threshold has no effect",
     "$DRAWS"),
    ("maximum_draws_are_the_variants", "embedded long", "loss_fn.variant=gpg; $DRAWS; $MOST_DRAWS=2",
     "$MOST_DRAWS=2: gpg draws up to 1 . loss_fn.max_resample_attempts=20 times; set the latter to 1 and",
     "$MOST_DRAWS=10"),
    # advice
    ("maximum_draws_are_replaced", "stock", "loss_fn={_override_: true, variant: gpg}; $DRAWS; $MOST_DRAWS=2",
     "$MOST_DRAWS=2: gpg draws up to", "$MOST_DRAWS=10"),
    ("variant_uses_its_dynamic_sampling", "embedded", "loss_fn.variant=dapo", "dapo without", "$DRAWS"),
    ("variant_uses_its_dynamic_sampling", "embedded", "loss_fn.variant=gpg", "gpg without", "$DRAWS"),
    ("keys_are_read", "embedded stock", "++grpo.num_val_generations_per_prompt=4",
     "prompt=4: no code of NeMo-RL reads this key; did you mean grpo.val_num_generations_per_prompt.$",
     "++grpo.num_val_generations_per_prompt=null; grpo.val_num_generations_per_prompt=4"),
    ("keys_are_read", "stock", "++grpo.use_best_at_k=true", "best_at_k=true: .* reads this key; remove it",
     "grpo.use_best_at_k=false"),
    ("clip_has_an_effect", "embedded", "loss_fn.ratio_clip_max=0.3",
     "with one update per step the ratio is 1",
     "$GBS=4"),
    ("learning_rate_suits_a_pretrained_model", "small lora", "$OPT.lr=1.0", "lr=1 moves every weight",
     "$OPT.lr=1e-5"),
    ("shared_gpus_keep_room_for_training", "small", "$V.gpu_memory_utilization=0.95",
     "=0.95 on GPUs that also train", "$V.gpu_memory_utilization=0.8"),
    # the embedded engine; the rows of its table have a test of their own
    ("settings_are_supported", "embedded", "$PACKING={enabled: true, algorithm: concatenative}",
     "algorithm=concatenative is not supported .* use first_fit_decreasing", "$PACKING.enabled=false"),
    ("settings_are_supported", "embedded", "$OPT.weight_decay=0.5; $SCHEDULER.end_weight_decay=0.1",
     "end_weight_decay=0.1 is not supported", "$SCHEDULER.end_weight_decay=0.5"),
    ("settings_are_supported", "embedded", "$G.top_p=0.9", "top_p=0.9 is not supported .* use 1.0, and val_t",
     "$G.top_p=1.0; $G.val_top_p=0.9"),
    ("task_has_no_images", "embedded", "nemo_grpo.task={name: vision_counting}", "need the cluster engine",
     "nemo_grpo.task={name: knights_knaves}"),
    ("turns_are_limited_by_the_task", "embedded", "$SEARCH; grpo.max_rollout_turns=2",
     "max_rollout_turns=2: .* up to 4 turns all the same", "nemo_grpo.task.max_turns=2"),
    ("selective_recompute_needs_activation_checkpointing", "embedded", "$M.recompute_granularity=selective",
     "acts only with $M.activation_checkpointing=true", "$M.activation_checkpointing=true"),
    ("recompute_modules_are_supported", "embedded", "$M.recompute_modules=[core_atn]",
     "core_atn is .*'core_attn'", "$M.recompute_modules=[core_attn, mlp]"),
    ("model_overrides_are_supported", "embedded", "$M.model_overrides={hidden_dropout: 0.1}",
     "model_overrides.hidden_dropout=0.1 is not supported",
     "$M.model_overrides={first_last_layers_bf16: true}"),
    ("updates_hold_whole_groups", "embedded", "$AUTHOR; $GBS=2; $MBS=1",
     "train_global_batch_size=2 must be a multiple of grpo.num_generations_per_prompt=4", "$GBS=4"),
    ("updates_hold_whole_groups", "embedded", "$AUTHOR; $GBS=4; $MBS=1; $GPUS=2",
     "one group for each of the 2 data-parallel ranks", "$GBS=8"),
    # NeMo-RL: training
    ("warm_start_is_for_the_embedded_engine", "cluster small logic", "$WARM={}", "warm_start={..}: its model",
     "$WARM=null"),
    ("leave_one_out_baseline_is_set", "cluster small logic", "~grpo.use_leave_one_out_baseline",
     "use_leave_one_out_baseline=null", "grpo.use_leave_one_out_baseline=false"),
    ("logprob_batches_divide_the_step", "cluster", "policy.logprob_batch_size=3",
     "logprob_batch_size=3 does not divide the 8 sequences", "policy.logprob_batch_size=8"),
    ("logprob_batches_divide_the_step", "cluster", "policy.logprob_batch_size=3", "logprob_batch_size=3",
     "$PACK"),
    ("logprob_batches_divide_the_step", "vision lora", "policy.logprob_batch_size=7", "=7 does not divide",
     "-"),
    ("logprob_and_training_batches_match_at_high_tp", "cluster",
     "$TP=4; $GPUS=4; policy.logprob_batch_size=2", "logprob_batch_size=2 differs",
     "policy.logprob_batch_size=4"),
    ("logprob_and_training_batches_match_at_high_tp", "huge long", "policy.logprob_batch_size=2",
     "=2 differs", "-"),
    ("context_parallel_needs_packing", "cluster", "$CP=2; $GPUS=2", "context_parallel_size=2 works on packed",
     "$PACK"),
    ("context_parallel_needs_packing", "lora vision", "$CP=2", "context_parallel_size=2 works on packed",
     "$CP=1"),
    ("sequence_padding_fits_the_layout", "cluster", "$TP=2; $SP=true; $GPUS=2; $PAD=3",
     "by=3 is not a multiple of 2", "$PAD=2"),
    ("sequence_padding_fits_the_layout", "fp8 moe huge long", "$PAD=1", "divisible_by=1 is not", "-"),
    ("dynamic_batching_excludes_packing_and_pipelines", "cluster", "$DYNAMIC; $PACK", "excludes",
     "$PACKING.enabled=false"),
    ("dynamic_batching_excludes_packing_and_pipelines", "small fp8 moe logic", "$DYNAMIC", "excludes", "-"),
    ("dynamic_batching_excludes_packing_and_pipelines", "cluster", "$DYNAMIC; $PP=2; $GPUS=2", "one pipeline",
     "$PP=1"),
    ("_layers_have_megatrons_names", "embedded lora",
     "$PEFT.enabled=true; $PEFT.target_modules=[q_proj, up_proj]", r"use \[linear_qkv, linear_fc1\]",
     "$PEFT.target_modules=[linear_qkv, linear_fc1]"),
    ("_layers_have_megatrons_names", "lora", "$PEFT.exclude_modules=[linear_qvk]", "mean 'linear_qkv'",
     "$PEFT.exclude_modules=['*.layers.0.*']"),
    ("lora_adapts_layers_of_the_decoder", "embedded",
     "$PEFT.enabled=true; $PEFT.target_modules=[output_layer]", "cannot adapt 'output_layer'",
     "$PEFT.target_modules=[linear_proj]"),
    ("lora_modules_and_dtype_are_named", "cluster", "$PEFT.enabled=true", r"target_modules=\[\] adapts",
     "$PEFT.target_modules=[linear_qkv]"),
    ("lora_modules_and_dtype_are_named", "lora", "$PEFT.target_modules=[]", r"target_modules=\[\] adapts",
     "-"),
    ("lora_modules_and_dtype_are_named", "lora", "$PEFT.lora_dtype=None", "lora_dtype=None is a string",
     "$PEFT.lora_dtype=null"),
    ("fused_logprobs_exclude_other_settings", "cluster", "$FUSED; $PACK", "packing",
     "$PACKING.enabled=false"),
    ("fused_logprobs_exclude_other_settings", "cluster", "$FUSED; $OVERLAP=true", "gather=true",
     "$OVERLAP=false"),
    ("fused_logprobs_exclude_other_settings", "cluster", "$FUSED; $G.top_k=5", "top_k=5", "$G.top_k=null"),
    ("fused_logprobs_exclude_other_settings", "cluster", "$FUSED; loss_fn.variant=erpo",
     "erpo, which needs entropies", "loss_fn.variant=tr_grpo"),
    ("fused_logprobs_exclude_other_settings", "small lora moe", "$FUSED", "use_fused_linear_logprobs=true",
     "-"),
    ("entropies_come_from_megatron", "lora", "++policy.dtensor_cfg.enabled=true; $M.enabled=false",
     "dtensor_cfg.enabled=true: erpo needs entropies", "policy.dtensor_cfg.enabled=false; $M.enabled=true"),
    ("nemo_gym_takes_data_as_it_is", "stock", "$GYM; grpo.max_val_samples=4",
     "max_val_samples=4: NeMo-Gym validates on the whole", "grpo.max_val_samples=null"),
    ("nemo_gym_takes_data_as_it_is", "stock", "$GYM; ~env.nemo_gym", "env.nemo_gym, .* is missing",
     "++env.nemo_gym={config_paths: []}"),
    ("nemo_gym_takes_data_as_it_is", "stock", "$GYM; ++env.nemo_gym.is_trajectory_collection=true",
     "trains nothing; use NeMo-RL's", "env.nemo_gym.is_trajectory_collection=false"),
    ("nemo_gym_takes_data_as_it_is", "stock", "$GYM; $G.top_k=9", "top_k=9: NeMo-RL asks", "$G.top_k=null"),
    ("nemo_gym_takes_data_as_it_is", "cluster", "$GYM", "beside nemo_grpo.task: both would", "-"),
    ("penalties_of_nemo_gym_need_its_rollouts", "cluster", "++grpo.invalid_tool_call_advantage=-5",
     "invalid_tool_call_advantage=-5.0 needs env.should", "grpo.invalid_tool_call_advantage=null"),
    ("penalties_of_nemo_gym_need_its_rollouts", "stock",
     "++reward_penalties={penalize_empty_final_answer: true}", "empty_final_answer=true needs env", "$GYM"),
    ("data_are_one_set", "cluster", "++data.use_multiple_dataloader=true",
     "dataloader=true: nemo_grpo.task is a single", "data.use_multiple_dataloader=false"),
    ("data_are_one_set", "stock", "$CONTROLLER; ++data.use_multiple_dataloader=true",
     "dataloader=true: async_rl reads", "data.use_multiple_dataloader=false"),
    ("nemo_gym_asks_for_no_stops", "stock", "$GYM; $G.stop_token_ids=[9]", "ids=.9.: NeMo-RL drops it",
     "$G.stop_token_ids=null"),
    ("images_are_read_with_the_new_weights", "vision", "$APART; $GPUS=2",
     "colocated.enabled=false: after a refit",
     "$V.async_engine=true; $V.reset_encoder_cache_after_weight_update=true"),
    ("refit_sends_updated_weights", "cluster", "$GPUS=2; ~$OVERLAP",  # left out: NeMo-RL's base sets it
     "overlap_param_gather=true .*each of the 2 ranks", "$OVERLAP=false"),
    ("refit_sends_updated_weights", "cluster", "$GPUS=2; ~$M.distributed_data_parallel_config",
     "overlap_param_gather=true", "$OPT.use_distributed_optimizer=false"),
    ("refit_sends_updated_weights", "cluster", "$GPUS=2; $CP=2; $PACK; $OVERLAP=true", "of the 2 ranks",
     "$OVERLAP=false"),
    ("refit_sends_updated_weights", "cluster", "$GPUS=4; $TP=4; $EP=2; $OVERLAP=true", "each of the 2 ranks",
     "$ETP=2"),
    ("chunked_logprobs_need_deferred_fp32_logits", "cluster small long", "policy.logprob_chunk_size=64",
     "logprob_chunk_size=64 needs", "$M.defer_fp32_logits=true"),
    ("precision_is_bf16", "cluster small fp8 moe lora logic search huge long dapo vision",
     "policy.precision=float32", "precision=float32", "policy.precision=bfloat16"),
    ("precision_is_bf16", "cluster", "policy.precision=auto", "precision=auto", "policy.precision=bfloat16"),
    ("blockwise_fp8_uses_fp32_scales", "cluster", "$FP8.enabled=true; $CORRECTED",
     "FP32_SCALES=null: blockwise", "$M.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES='1'"),
    ("blockwise_fp8_uses_fp32_scales", "fp8", "$M.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES='0'",
     "SCALES=0: blockwise", "-"),
    ("parameters_stay_in_bf16", "fp8", "$FP8.fp8_param=true", "fp8_param=true", "$FP8.fp8_param=false"),
    ("optimizer_settings_agree", "cluster",
     "$OPT.use_precision_aware_optimizer=true; $OPT.use_distributed_optimizer=false",
     "use_precision_aware_optimizer=true needs optimizer=adam", "$OPT.use_distributed_optimizer=true"),
    ("optimizer_settings_agree", "small huge", "$OPT.optimizer=sgd", "needs optimizer=adam",
     "$OPT.optimizer=adam"),
    ("optimizer_settings_agree", "cluster small", "$OPT.optimizer_cpu_offload=true",
     "offload_fraction=0.0 must be", "$OPT.optimizer_offload_fraction=1.0"),
    ("expert_parallel_divides_the_pipeline_stage", "cluster", "$ETP=2", "expert_tensor_parallel_size=2 x",
     "$GPUS=2"),
    ("expert_parallel_divides_the_pipeline_stage", "moe", "$ETP=5", "expert_tensor_parallel_size=5",
     "$ETP=1"),
    ("recompute_modules_exist", "cluster small", "$M.recompute_modules=[core_atn]",
     r"recompute_modules=\['core_atn'\]", "$M.recompute_modules=[core_attn]"),
    ("loss_does_not_need_whole_groups", "cluster", "$AUTHOR", "author_compat=true needs one whole group",
     "loss_fn.author_compat=false"),
    ("no_other_advantage_estimator_is_set", "cluster", "++grpo.adv_estimator={name: reinforce_plus_plus}",
     "name=reinforce_plus_plus: advantages come from loss_fn.variant=grpo",
     "grpo.adv_estimator.name=grpo"),
    ("no_other_advantage_estimator_is_set", "cluster",
     "++grpo.adv_estimator={name: grpo, use_leave_one_out_baseline: true}",
     "grpo.adv_estimator.use_leave_one_out_baseline=true, but grpo trains", "~grpo.adv_estimator"),
    ("shaped_advantages_are_not_clipped", "small lora long", "grpo.advantage_clip_high=5",
     "advantage_clip_high=5", "grpo.advantage_clip_high=null"),
    ("shaped_advantages_are_not_clipped", "cluster", "loss_fn.variant=cw_grpo; grpo.advantage_clip_low=-1",
     "advantage_clip_low=-1 would clip", "loss_fn.variant=grpo"),
    ("reference_policy_is_loaded", "lora", "loss_fn.reference_policy_kl_penalty=0",
     "reference_policy_kl_penalty=0", "loss_fn.reference_policy_kl_penalty=1e-9"),
    # NeMo-RL: the single controller
    ("single_controller_has_its_parts", "cluster", "$CONTROLLER; data_plane.enabled=false",
     "reads its data plane; set data_plane.enabled=true", "data_plane.enabled=true"),
    ("single_controller_has_its_parts", "stock",
     "$CONTROLLER; $M.enabled=false; policy.dtensor_cfg.enabled=true", "only NeMo-RL's Megatron workers",
     "$M.enabled=true; policy.dtensor_cfg.enabled=false"),
    ("single_controller_has_its_parts", "cluster", "$CONTROLLER; $G.backend=megatron",
     "backend=megatron: use vllm or sglang", "$G.backend=vllm"),
    ("single_controller_has_its_parts", "cluster", "$CONTROLLER; $V.async_engine=false",
     "samples prompt by prompt; set .*async_engine=true", "$V.async_engine=true"),
    ("single_controller_has_its_parts", "cluster", "$CONTROLLER; grpo.val_at_end=true",
     "never validates; set grpo.val_period=0", "grpo.val_at_end=false"),
    ("single_controller_has_its_parts", "cluster", "$CONTROLLER; checkpointing.metric_name=val:accuracy",
     "metric_name=val:accuracy with async_rl", "checkpointing.metric_name=train:reward"),
    ("single_controller_has_its_parts", "vision", "$CONTROLLER", "loads no processor for images", "-"),
    ("single_controller_steps_add_up", "cluster", "$CONTROLLER; $CHUNK=3", "streaming_train=3 exceeds",
     "$CHUNK=2"),
    ("single_controller_steps_add_up", "cluster", "$CONTROLLER; $GBS=4", "batch_size=4 with async_rl",
     "$GBS=8"),
    ("single_controller_steps_add_up", "cluster", "$CONTROLLER; async_rl.max_buffered_rollouts=3",
     "max_buffered_rollouts=3: in_order with max_lookahead_versions=1 waits for 4",
     "++async_rl.sampler.max_lookahead_versions=0"),
    ("chunks_of_a_step_are_independent", "cluster", "$CONTROLLER; $CHUNK=1; loss_fn.variant=gpg",
     "streaming_train=1: gpg as set decides a response's advantages by", "loss_fn.use_alpha=false"),
    ("chunks_of_a_step_are_independent", "cluster",
     "$CONTROLLER; $CHUNK=1; loss_fn.aggregation=group_token_mean; grpo.seq_logprob_error_threshold=2",
     "threshold=2 leaves groups of different sizes", "$CHUNK=2"),
    ("chunks_divide_among_ranks", "cluster", "$CONTROLLER; $CHUNK=1; $MBS=8",
     "num_generations_per_prompt=4 is not a multiple of 8", "$PACKING.enabled=true"),
    ("single_controller_reads_the_keys", "cluster", "$CONTROLLER; $DRAWS",
     "use_dynamic_sampling=true has no effect", "grpo.use_dynamic_sampling=false"),
    ("single_controller_reads_the_keys", "cluster", "$CONTROLLER; grpo.advantage_clip_low=-1",
     "advantage_clip_low=-1.0 has no effect .*to null", "grpo.advantage_clip_low=null"),
    ("older_rollouts_are_corrected", "cluster",
     "$CONTROLLER; loss_fn.use_importance_sampling_correction=false; ++$V.enable_prefix_caching=false",
     "sampler.name=in_order: rollouts are older", "++async_rl.sampler.max_lookahead_versions=0"),
    # NeMo-RL: the data plane
    ("data_plane_trains_synchronously", "cluster", "$PLANE; grpo.async_grpo.enabled=true; $CORRECTED",
     "asynchronous trainer does not read the data plane", "grpo.async_grpo.enabled=false"),
    ("data_plane_trains_synchronously", "shown", "$PLANE", "sft trains without rollouts",
     "data_plane.enabled=false"),
    ("data_plane_brings_what_the_loss_reads", "lora", "$PLANE", "erpo needs the policy's entropies",
     "data_plane.enabled=false"),
    ("data_plane_brings_what_the_loss_reads", "logic",
     "$PLANE; loss_fn.aggregation=group_token_mean", "the weights of .* reach beyond them, into a KL penalty",
     "loss_fn.reference_policy_kl_penalty=0"),
    ("data_plane_brings_what_the_loss_reads", "logic",
     "$PLANE; loss_fn.weighting=random; loss_fn.aggregation=token_mean", "=token_mean. reach beyond them",
     "loss_fn.kl_weighting=none"),
    ("data_plane_brings_what_the_loss_reads", "logic",
     "$PLANE; loss_fn.weighting=random; loss_fn.weight_placement=inside; loss_fn.upper=1.2; "
     "loss_fn.aggregation=token_mean; "
     "loss_fn.reference_policy_kl_penalty=0", "into a KL penalty or a clip",
     "loss_fn.weight_placement=outside"),
    ("data_plane_brings_what_the_loss_reads", "logic",
     "$PLANE; loss_fn.weighting=random; loss_fn.aggregation=token_mean; loss_fn.kl_weighting=none; "
     "loss_fn.force_on_policy_ratio=true", "leaves nothing by which", "loss_fn.force_on_policy_ratio=false"),
    ("data_plane_sets_no_advantages_by_message", "stock",
     "$GYM; $PLANE; ++grpo.malformed_thinking_advantage=-5", "malformed_thinking_advantage=-5 with data_pl",
     "grpo.malformed_thinking_advantage=null"),
    ("weighted_advantages_are_not_clipped", "cluster",
     "$PLANE; loss_fn.aggregation=group_token_mean; grpo.advantage_clip_low=-1", "low=-1 with .* would clip",
     "loss_fn.aggregation=token_mean"),
    ("data_plane_draws_whole_groups", "long", "$PLANE; grpo.use_dynamic_sampling=true",
     "without gpg's valid_fraction_threshold and max_resample_attempts", "grpo.use_dynamic_sampling=false"),
    ("data_plane_draws_whole_groups", "cluster",
     "$PLANE; grpo.use_dynamic_sampling=true; grpo.use_leave_one_out_baseline=true; "
     "loss_fn.use_leave_one_out_baseline=true", "drops the only correct response",
     "grpo.use_leave_one_out_baseline=false; loss_fn.use_leave_one_out_baseline=false"),
    # NeMo-RL: checkpoints
    (
        "number_of_checkpoints_is_set", "cluster", "checkpointing.keep_top_k=null",
        "keep_top_k=null: NeMo-RL wants a number", "checkpointing.keep_top_k=4",
    ),
    ("checkpoint_metric_has_a_prefix", "cluster small huge", "checkpointing.metric_name=validation/accuracy",
     "metric_name=validation/accuracy must start .* use val:accuracy",
     "checkpointing.metric_name=val:accuracy"),
    ("training_metric_is_one_of_every_run", "cluster small", "checkpointing.metric_name=train:rewards",
     "metric_name=train:rewards is not a metric of every run, .*did you mean 'reward'",
     "checkpointing.metric_name=train:reward"),
    ("checkpoints_are_ranked_by_a_validation", "embedded", "checkpointing.metric_name=train:reward",
     "metric_name=train:reward: the embedded engine ranks", "checkpointing.metric_name=null"),
    ("output_folders_are_set", "cluster", "logger.log_dir=null", "logger.log_dir=null",
     "logger.log_dir=logs"),
    ("output_folders_are_set", "small", "checkpointing.checkpoint_dir=null", "checkpoint_dir=null", "-"),
    ("checkpoints_are_saved_at_validations", "cluster", "checkpointing.save_period=15",
     "save_period=15 is not a multiple of grpo.val_period=10", "checkpointing.metric_name=null"),
    ("checkpoints_are_saved_at_validations", "cluster", "grpo.val_period=0", "grpo.val_period=0: a check",
     "grpo.val_period=5"),
    ("checkpoints_are_saved_at_validations", "small logic dapo", "checkpointing.save_period=7",
     "save_period=7 is not", "-"),
    # NeMo-RL: rollouts
    ("validation_samples_like_training", "cluster", "$G.val_temperature=0.5",
     "=0.5 differs from temperature=1", "$G.temperature=0.5"),
    ("validation_samples_like_training", "small fp8 moe lora logic search huge long dapo vision",
     "$G.val_temperature=0.1", "val_temperature=0.1 differs", "~$G.val_temperature"),
    ("validation_samples_like_training", "cluster", "$G.val_top_p=0.9", "val_top_p=0.9", "$G.top_p=0.9"),
    ("validation_samples_like_training", "cluster", "$G.val_top_k=9", "val_top_k=9", "$G.top_k=9"),
    ("reference_and_policy_are_scored_alike", "lora", "$G.top_p=0.9", "top_p=0.9, top_k=null: NeMo-RL",
     "$G.top_p=1.0"),
    ("reference_and_policy_are_scored_alike", "cluster", "loss_fn.variant=erpo; $G.top_k=9",
     "top_p=1.0, top_k=9", "loss_fn.variant=tr_grpo"),
    ("number_of_validation_problems_is_set", "embedded cluster", "grpo.max_val_samples=null",
     "max_val_samples=null leaves it to NeMo-Gym", "grpo.max_val_samples=256"),
    ("number_of_validation_problems_is_set", "cluster", "grpo.val_batch_size=null", "batch_size=null leaves",
     "grpo.val_batch_size=4"),
    ("validation_files_hold_the_validation_problems", "small",
     f"nemo_grpo.task.validation_files=[{PROBLEMS}]; grpo.max_val_samples=4",
     "max_val_samples=4: .*validation_files has 3 problems; use 3 or fewer", "grpo.max_val_samples=3"),
    ("validation_files_hold_the_validation_problems", "small",
     f"nemo_grpo.task.validation_files=[{RECIPES.parent}/README.md]",
     r"validation_files: .*README.md:1: not JSON",
     f"nemo_grpo.task.validation_files=[{PROBLEMS}]; grpo.max_val_samples=3"),
    ("validation_has_a_whole_batch", "cluster stock", "grpo.max_val_samples=64; ++grpo.val_batch_size=256",
     "val_batch_size=256 exceeds grpo.max_val_samples=64", "grpo.val_batch_size=64"),
    ("validation_has_a_whole_batch", "cluster", "grpo.max_val_samples=255; ~grpo.val_batch_size",
     "val_batch_size=256 exceeds grpo.max_val_samples=255",
     "grpo.val_period=0; grpo.val_at_start=false; grpo.val_at_end=false; checkpointing.metric_name=null"),
    ("validation_batches_divide_the_problems", "cluster", "grpo.max_val_samples=100; grpo.val_batch_size=64",
     "val_batch_size=64 does not divide grpo.max_val_samples=100: .* only, 64 problems",
     "grpo.val_batch_size=25"),
    ("prefixes_are_read_with_the_new_weights", "cluster", "$ASYNC; $CORRECTED",
     "async_grpo.recompute_kv_cache_after_weight_updates=false: after a refit",
     "++$RECOMPUTE; ++grpo.async_grpo.in_flight_weight_updates=true"),
    ("prefixes_are_read_with_the_new_weights", "cluster", "$ASYNC; $CORRECTED",
     "set it to true, or the cache to false", "++$V.enable_prefix_caching=false"),
    ("prefixes_are_read_with_the_new_weights", "cluster", "$ASYNC; $CORRECTED; ++$RECOMPUTE",
     "NeMo-RL 0.7.0 reads it only with", "$V.enable_prefix_caching=false"),
    ("prefixes_are_read_with_the_new_weights", "stock", "$CONTROLLER",
     "async_rl.recompute_kv_cache_after_weight_updates=false: after a refit",
     "++async_rl.recompute_kv_cache_after_weight_updates=true"),
    ("prefixes_are_read_with_the_new_weights", "stock", "$CONTROLLER", "after a refit", "$G.backend=sglang"),
    ("fp8_kv_cache_needs_fp8_weights", "small huge", "$V.kv_cache_dtype=fp8; $CORRECTED", "dtype=fp8 needs",
     "$V.kv_cache_dtype=auto"),
    ("fp8_needs_importance_sampling_correction", "cluster", "$V.precision=fp8", "correction=false: FP8",
     "$CORRECTED"),
    ("fp8_needs_importance_sampling_correction", "fp8", "loss_fn.use_importance_sampling_correction=false",
     "correction=false: FP8 rounds", "$CORRECTED"),
    ("vllm_layout_tiles_the_gpus", "cluster", "$V.tensor_parallel_size=2", "=2 x .* does not tile the 1 GPUs",
     "$GPUS=2"),
    ("vllm_layout_tiles_the_gpus", "cluster", "$V.tensor_parallel_size=2", "does not tile",
     "$G.backend=megatron"),
    ("vllm_max_model_len_covers_the_longest_sequence", "cluster", "$V.max_model_len=63", "max_model_len=63",
     "$G.backend=sglang"),
    ("vllm_layout_tiles_the_gpus", "small huge vision", "$V.tensor_parallel_size=3",
     "vllm_cfg.tensor_parallel_size=3", "-"),
    ("vllm_layout_tiles_the_gpus", "cluster", "$V.pipeline_parallel_size=2; $GPUS=2",
     "needs .*async_engine=true", "$V.async_engine=true"),
    ("vllm_layout_tiles_the_gpus", "small long", "$V.pipeline_parallel_size=2", "needs .*async_engine=true",
     "-"),
    ("vllm_layout_tiles_the_gpus", "cluster", "$V.tensor_parallel_size=2; $V.expert_parallel_size=3; $GPUS=2",
     "expert_parallel_size=3 must be a multiple", "$V.expert_parallel_size=2"),
    ("separate_rollouts_leave_gpus_to_train", "cluster", "$APART",
     "gpus_per_node=1: separate rollouts .* 1 GPUs", "$GPUS=2"),
    ("separate_rollouts_leave_gpus_to_train", "cluster",
     "$APART; cluster.num_nodes=2; $G.colocated.resources.num_nodes=2",
     "num_nodes=2, gpus_per_node=1: separate rollouts .* use 1 to 1", "$G.colocated.resources.num_nodes=1"),
    ("vllm_max_model_len_covers_the_longest_sequence", "cluster", "$V.max_model_len=63", "max_model_len=63",
     "$V.max_model_len=64"),
    ("vllm_max_model_len_covers_the_longest_sequence", "small search", "$V.max_model_len=100",
     "max_model_len=100 is less",
     "-"),
    ("async_grpo_settings_agree", "cluster", "$ASYNC; $CORRECTED; $DRAWS", "sampling=true",
     "grpo.use_dynamic_sampling=false"),
    ("async_grpo_settings_agree", "cluster", "$ASYNC; $CORRECTED; $V.async_engine=false", "async_engine=true",
     "$V.async_engine=true"),
    ("async_grpo_settings_agree", "cluster", "$ASYNC; $CORRECTED; $G.colocated.enabled=true", "separate GPUs",
     "$G.colocated.enabled=false"),
    ("async_grpo_settings_agree", "cluster",
     "$ASYNC; $CORRECTED; $SHAPING={enabled: true, overlong_buffer_length: 8}", "reward_shaping.enabled=true",
     "$SHAPING.enabled=false"),
    ("async_grpo_settings_agree", "cluster", "$ASYNC; $CORRECTED; grpo.reward_scaling.enabled=true",
     "reward_scaling.enabled=true", "grpo.reward_scaling.enabled=false"),
    ("async_grpo_settings_agree", "small long vision", "grpo.async_grpo.enabled=true",
     "async_grpo.enabled=true", "-"),
    ("async_grpo_needs_importance_sampling_correction", "cluster", "$ASYNC", "train on them uncorrected",
     "$CORRECTED"),
    ("batch_multiplier_needs_dynamic_sampling", "cluster small logic", "grpo.batch_multiplier=2", "=2 needs",
     "$DRAWS"),
    ("max_rollout_turns_covers_the_task", "cluster", "$SEARCH; $STOPS; grpo.max_rollout_turns=3",
     "=3: a response to search_qa", "nemo_grpo.task.max_turns=3"),
    ("max_rollout_turns_covers_the_task", "search", "grpo.max_rollout_turns=1",
     "max_rollout_turns=1: a response", "-"),
    ("overlong_penalty_needs_responses_of_one_turn", "cluster",
     "$SEARCH; $STOPS; $SHAPING={enabled: true, overlong_buffer_length: 8}",
     "reward_shaping.enabled=true: NeMo-RL measures only the first turn",
     "$SHAPING.stop_properly_penalty_coef=0.5"),
    ("overlong_penalty_stays_in_its_bounds", "cluster",
     "$SHAPING={enabled: true, overlong_buffer_length: 4, max_response_length: 15}",
     "max_response_length=15 is less than $G.max_new_tokens=16: NeMo-RL's penalty exceeds",
     "$SHAPING.max_response_length=16"),
    ("overlong_penalty_stays_in_its_bounds", "cluster",
     "$SHAPING={enabled: true, overlong_buffer_length: 4, max_response_length: 15}", "=15 is less",
     "$SHAPING.stop_properly_penalty_coef=0.5"),
    ("vllm_stops_at_the_end_of_a_turn", "cluster", "$SEARCH",
     "stop_strings=null: NeMo-RL starts vLLM without", "$STOPS"),
    ("vllm_stops_at_the_end_of_a_turn", "cluster", "$SEARCH; $STOPS; $V.skip_tokenizer_init=true",
     r"set it to \[</search>, </answer>\], and leave $V.skip_tokenizer_init out",
     "$V.skip_tokenizer_init=false"),
    # the planner: shapes
    ("model in the table", "small fp8", "policy.model_name=Qwen/Qwen2.5-8B", "did you mean 'Qwen/Qwen2.5-7B'",
     "-"),
    ("model_can_be_converted", "vision", "policy.model_name=Qwen/Qwen2-VL-2B-Instruct",
     "no conversion for qwen2_vl", "-"),
    ("tensor_parallel_divides_the_model", "fp8 logic", "$TP=8; $SP=true",
     "size=8 does not divide num_attention", "$TP=2"),
    ("rollout_parallel_divides_the_model", "small fp8 logic", "$V.tensor_parallel_size=8",
     "parallel_size=8 does not", "$V.tensor_parallel_size=2"),
    ("tensor_parallel_stays_on_a_node", "huge", "cluster={gpus_per_node: 4, num_nodes: 16}",
     "the 4 GPUs of a node", "-"),
    ("pipeline_stages_divide_the_layers", "small logic", "$PP=8", "size=8 leaves|not a multiple of", "$PP=1"),
    ("expert_parallel_divides_the_experts", "small logic long", "$EP=2", "size=2: .* has no experts",
     "$EP=1"),
    ("expert_parallel_divides_the_experts", "moe", "$EP=3", "expert_model_parallel_size=3", "$EP=8"),
    ("sequences_fit_the_model", "fp8 dapo", "$LENGTH=8192", "=8192 exceeds max_position_embeddings=4096",
     "-"),
    ("stop_tokens_are_in_the_vocabulary", "small long logic", "policy.generation.stop_token_ids=[1, 152064]",
     r"ids=\[1, 152064\]: 152064 is not below vocab_size=15", "policy.generation.stop_token_ids=[1]"),
    ("fp8_blocks_divide_the_layers", "moe", "$V.precision=fp8; $CORRECTED", "rank holds feed-forward 192",
     "-"),
    ("fp8_recipe_is_for_this_gpu", "fp8", "$FP8.fp8_recipe=mxfp8", "fp8_recipe=mxfp8 needs Blackwell", "-"),
    ("gpu_has_fp8", "fp8", "$MBS=1", "enabled=true: this GPU has no FP8",
     "$FP8.enabled=false; $V.precision=bfloat16"),
    ("images_exclude_context_parallel", "vision", "$CP=2; $PACK", "are not split over ranks", "$CP=1"),
    # the planner: memory
    ("training_fits_in_memory", "small", "$MBS=24; grpo.num_prompts_per_step=16",
     "training needs .* most of it logits", "$MBS=1"),
    ("training_fits_in_memory", "moe", "$M.activation_checkpointing=false",
     "training needs .* most of it activations", "-"),
    ("training_fits_in_memory", "huge", "$TP=1; $SP=false; $PP=1", r"training needs .* most of it \w+ \(",
     "-"),
    ("rollouts_fit_in_memory", "fp8 huge long", "$V.gpu_memory_utilization=0.1",
     "utilization=0.1: after weights", "-"),
    ("rollouts_fit_in_memory", "huge", "$V.tensor_parallel_size=1; $V.gpu_memory_utilization=0.9",
     "hand|after", "-"),
]
# fmt: on
PARAMETERS = [
    pytest.param(*case[:1], base, *case[2:], id=f"{case[0]}-{base}")
    for case in CASES
    for base in case[1].split()
]


GPU = {"gpu_has_fp8": "a100"}
"""Rule -> the kind of GPU that it is about; else h100."""


@cache
def tree_of(base: str) -> dict[str, Any]:
    """A shipped recipe with the overrides of ``BASES``; interpolations still follow a case's."""
    recipe, overrides = BASES[base]
    return apply_overrides(load_tree(RECIPES / f"{recipe}.yaml"), overrides)


def loaded(base: str, overrides: str = "") -> Recipe:
    given = Template(overrides).safe_substitute(SHORT).split("; ") if overrides else []
    return load_recipe_dict(tree_of(base), given)


def refusals(base: str, overrides: str = "", gpu: str = "h100") -> list[str]:
    """What speaks against the recipe: its own rules, its engine's, or the planner's."""
    try:
        recipe = loaded(base, overrides)
        if recipe.nemo_grpo.target == "embedded":
            refuse_unsupported(recipe)
        if base in ("embedded", "cluster"):  # models that are not published
            return []
        return problems(shape_of(recipe), setup_of(recipe), HARDWARE[gpu])
    except UserError as error:
        lines = str(error).splitlines()
        return [line.strip() for line in lines[1:]] or lines


def registered(rule: str) -> Scope | None:
    return next((scope for scope in Scope if rule in RULES[scope]), None)


@pytest.mark.parametrize(("rule", "base", "broken", "message", "fixed"), PARAMETERS)
def test_rule_refuses_the_broken_recipe_and_accepts_the_fixed_one(
    rule: str, base: str, broken: str, message: str, fixed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, pattern = registered(rule), Template(message).safe_substitute(SHORT)
    gpu = GPU.get(rule, "h100")
    asked = (
        (lambda text: advice(loaded(base, text)))
        if scope is Scope.ADVICE
        else lambda text: refusals(base, text, gpu)
    )
    if fixed != "-":
        assert asked(f"{broken}; {fixed}") == []
    found = asked(broken)
    assert any(re.search(pattern, line) for line in found), found
    for line in found:
        assert re.search(r"[a-z_]+\.[\w.@]+(=|:|.* = | has| without)", line), f"no key: {line}"
        assert scope is Scope.ADVICE or re.search(r"; \w|: \w|did you mean|must be", line), (
            f"no remedy: {line}"
        )
    if scope is not None:
        for place in Scope:
            monkeypatch.setitem(RULES, place, {rule: RULES[scope][rule]} if place is scope else {})
        alone = asked(broken)
        assert any(re.search(pattern, line) for line in alone), f"another rule says so: {found}"


def models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A recipe's classes of sections; what variants and tasks validate is tested with them."""
    fields = [t for f in model.model_fields.values() for t in (f.annotation, *get_args(f.annotation))]
    below = [t for t in fields if isinstance(t, type) and issubclass(t, BaseModel)]
    return {model}.union(*(models(t) for t in below if t.__module__.startswith("nemo_grpo.recipe.")))


def test_every_rule_has_a_case_and_no_name_is_taken_twice() -> None:
    names = [name for rules in RULES.values() for name in rules]
    for model in models(Recipe):
        decorators = model.__pydantic_decorators__
        names += [*decorators.field_validators, *decorators.model_validators]
    assert len(names) == len(set(names)) > 80
    assert set(names) - {rule for rule, *_ in CASES} == set()
    assert len(PARAMETERS) >= 200


@pytest.mark.parametrize("base", BASES)
def test_recipes_of_the_cases_break_no_rule(base: str) -> None:
    assert refusals(base) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_rule_speaks_against_a_shipped_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    if recipe.nemo_grpo.target == "embedded":
        refuse_unsupported(recipe)
    resolved = load_recipe_dict(recipe.to_dict())
    assert advice(resolved) == advice(recipe)  # writing defaults out changes nothing


UNSUPPORTED: dict[str, str] = {
    "checkpointing.checkpoint_must_save_by": "'00:01:00'", "grpo.adv_estimator": "{name: grpo}",
    "grpo.batch_multiplier": "2", "grpo.max_num_epochs": "2", "grpo.val_start_at": "3",
    "nemo_grpo.engine.generator": "vllm", "policy.generation.stop_strings": "[x]",
    "policy.hf_config_overrides": "{a: 1}", "policy.precision": "float16", "policy.tokenizer.name": "other",
    "policy.tokenizer.chat_template": "x", "policy.tokenizer.chat_template_kwargs": "{a: 1}",
    f"{M}.env_vars": "{A: '1'}", f"{M}.expert_model_parallel_size": "1", f"{M}.mtp_num_layers": "1",
    f"{M}.optimizer.optimizer": "sgd", f"{M}.fp8_cfg.fp8_recipe": "mxfp8", f"{M}.peft.dropout": "0.1",
    f"{M}.peft.lora_A_init_method": "kaiming", f"{M}.peft.lora_B_init_method": "xavier",
    f"{M}.peft.lora_dtype": "float32", "policy.sequence_packing.algorithm": "concatenative",
    "checkpointing.save_optimizer": "false", f"{M}.scheduler.end_weight_decay": "0.9",
    f"{M}.scheduler.start_weight_decay": "0.9", "grpo.reward_shaping.stop_properly_penalty_coef": "0.5",
    "grpo.advantage_clip_high": "1", "grpo.advantage_clip_low": "-1",
    "reward_penalties": "{penalize_empty_final_answer: true}", "async_rl": "{}",
    "checkpointing.ft_save_period": "5", "data.max_input_seq_length": "9",
    "policy.generation.bad_words": "[x]", "policy.generation.quant_cfg": "x",
    "policy.generation.top_k": "5", "policy.generation.top_p": "0.9",
    "policy.pretrained_checkpoint": "{path: x, format: megatron}", "policy.quant_cfg": "x",
}  # fmt: skip
"""A value that the embedded engine lacks; ``true`` for all other keys."""


@pytest.mark.parametrize("key", SUPPORTED)
def test_embedded_engine_refuses_every_setting_that_it_lacks(key: str) -> None:
    where = SUPPORTED[key].where
    switch = f"++{where}=true; policy.precision=bfloat16; " if where else ""
    value = UNSUPPORTED.get(key, "true")
    if key.endswith("expert_model_parallel_size"):
        switch, value = "$GPUS=2; ", "2"
    assert refusals("embedded", f"{switch}++{key}={value}")[0].startswith(f"{key}=")
