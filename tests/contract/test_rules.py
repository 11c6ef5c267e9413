"""Every rule about recipes: a change of a shipped one breaks it, with the sentence that the user gets."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, get_args

import pytest
from broken_rows import BROKEN
from pydantic import BaseModel
from refused_recipes import REFUSED

from nemo_grpo.plan.hardware import HARDWARE
from nemo_grpo.plan.inputs import plan_input, shape_of
from nemo_grpo.plan.rules import problems
from nemo_grpo.recipe import (
    Recipe,
    advice,
    load_recipe,
    load_recipe_dict,
    refuse_unsupported,
    rows,
    tables,
    validation,
)
from nemo_grpo.recipe.conditions import ranks_hold_whole_replicas
from nemo_grpo.recipe.keys import is_known
from nemo_grpo.recipe.loader import apply_overrides, load_tree
from nemo_grpo.recipe.registry import RULES, Scope
from nemo_grpo.recipe.rows import Allowed, Kind, Number, Relation, always, in_words
from nemo_grpo.support.dotted import leaves
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = [  # 8 responses per step in one update of two microbatches, on one rank
    *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4"),
    *("policy.train_micro_batch_size=4", "policy.max_total_sequence_length=64"),
    *("policy.generation.max_new_tokens=16", "policy.sequence_packing.enabled=false"),
]
BASES: dict[str, tuple[str, list[str]]] = {
    "embedded": ("quickstart", [*SMALL, "policy.model_name=some/model"]),
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
M, G, NEW = "policy.megatron_cfg", "policy.generation", "nemo_grpo.new_model"
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
    "NEW": NEW, "SCHEDULER": f"{M}.scheduler",
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
    "grpo.val_period=0"
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
    ("_parse_loss_fn", "embedded", "loss_fn.token_level_loss=true",
     "token_level_loss=true is not .*aggregation", "-"),
    ("_parse_loss_fn", "embedded", "loss_fn.disable_ppo_ratio=true", "disable_ppo_ratio=true is not .*=gpg$",
     "-"),
    ("_parse_loss_fn", "embedded", "loss_fn.use_kl_in_reward=true", "use_kl_in_reward=true is not .*leave",
     "-"),
    ("a row", "stock", "nemo_grpo.target=embedded",
     "target=embedded: .*reads no data.train", "nemo_grpo.target=cluster"),
    ("a row", "stock", "$TP=2; $SP=true; $PAD=1", "divisible_by=1 is not a multiple of 2", "$PAD=2"),
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
    ("_reward_components_exist", "embedded", "nemo_grpo.rewards.accuracy=0.0; nemo_grpo.rewards.format=0.0",
     "every reward is 0", "nemo_grpo.rewards.format=1.0"),
    ("a row", "embedded", "$LENGTH=16", "max_new_tokens=16 is not below .*leaves no room", "$LENGTH=17"),
    ("a row", "cluster", "$LENGTH=15", "max_new_tokens=16 exceeds .*leaves no room", "$LENGTH=16"),
    # demonstrations
    ("validation_metrics_exist", "shown",
     "checkpointing.metric_name=val:accuracy; checkpointing.save_period=100",
     "has no metric 'validation/accuracy'", "checkpointing.metric_name=val:val_loss"),
    # across sections
    ("model_is_no_checkpoint_of_nemo", "small", "policy.model_name=base.nemo",
     "model_name=base.nemo is a NeMo 1 checkpoint", "policy.model_name=Qwen/Qwen2.5-1.5B"),
    ("updates_divide_the_step", "embedded", "$GBS=3; $MBS=1", "$GBS=3 .* 2 x 4 = 8; use 2 or 4", "$GBS=2"),
    ("updates_divide_the_step", "embedded", "$GBS=3", "$GBS=3 .* = 8; use 4$", "$GBS=4"),  # microbatches of 4
    ("updates_divide_the_step", "embedded", "$GBS=16", "$GBS=16 .*; use 8$", "$GBS=8"),
    ("updates_divide_the_step", "small logic", "$GBS=100", "train_global_batch_size=100 does not", "-"),
    ("a row", "embedded", "$GPUS=3; $TP=2", "= 3 is not a multiple of 2 .TP x PP x CP",
     "$GPUS=2"),
    ("grpo_section_agrees_with_the_loss", "embedded", "grpo.normalize_rewards=false",
     "grpo.normalize_rewards", "loss_fn.normalize_rewards=false"),
    ("grpo_section_agrees_with_the_loss", "embedded small",
     "grpo.use_leave_one_out_baseline=true", r"use_leave_one_out_baseline=true, but \w+ trains",
     "grpo.use_leave_one_out_baseline=false"),
    ("grpo_section_agrees_with_the_loss", "embedded", "loss_fn.variant=gpg; grpo.normalize_rewards=true",
     "grpo.normalize_rewards=true, but gpg", "grpo.normalize_rewards=false"),
    ("validation_metrics_exist", "embedded cluster", "checkpointing.metric_name=val:acuracy",
     "no metric 'validation/acuracy'; did you mean 'validation/accuracy'",
     "checkpointing.metric_name=val:accuracy"),
    ("validation_metrics_exist", "embedded cluster", "checkpointing.metric_name=val:nothing",
     "no metric 'validation/nothing'", "checkpointing.metric_name=val:reward"),
    ("validation_metrics_exist", "lora",
     "checkpointing.metric_name=val:aime2/accuracy; checkpointing.save_period=100",
     "no metric 'validation/aime2/accuracy'; did you mean 'validation/aime25/accuracy'",
     "checkpointing.metric_name=val:aime25/accuracy"),
    ("validation_metrics_exist", "stock", "checkpointing.metric_name=val:AIME2024/accuracy",
     "no metric 'validation/AIME2024/accuracy'",
     "data.validation=[{dataset_name: AIME2024}, {dataset_name: gsm8k}]; data.default.env_name=math"),
    ("validation_metrics_exist", "cluster",
     "$ASYNC; $CORRECTED; ++$RECOMPUTE; nemo_grpo.task={_override_: true, name: math, "
     "validation_files: {a: x, b: y}}; grpo.stop_at_validation_metric=validation/b/accuracy; "
     "grpo.stop_at_validation_threshold=1", "decides before each validation set has its own",
     "grpo.stop_at_validation_metric=accuracy"),
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
    ("validation_can_reach_the_threshold", "embedded small",
     "grpo.stop_at_validation_metric=val:accuracy; grpo.stop_at_validation_threshold=50",
     "threshold=50: validation/accuracy is at most 1, .* 0.5 for 50 %",
     "grpo.stop_at_validation_metric=val:accuracy; grpo.stop_at_validation_threshold=0.5"),
    ("validation_can_reach_the_threshold", "embedded",  # a length may be above 1
     "grpo.stop_at_validation_metric=val:pass@1; grpo.stop_at_validation_threshold=1.5", "pass@1 is at most",
     "grpo.stop_at_validation_metric=val:num_tokens; grpo.stop_at_validation_threshold=50"),
    ("embedded_checkpoints_are_ranked", "embedded", "checkpointing.save_period=3; grpo.val_period=4",
     "save_period=3 is no multiple of grpo.val_period=4: .*; use 4$",
     "checkpointing.save_period=4; grpo.val_period=4"),
    ("embedded_checkpoints_are_ranked", "embedded", "checkpointing.save_period=5; grpo.val_period=4",
     "use 8$", "checkpointing.save_period=5; grpo.val_period=4; checkpointing.metric_name=train:reward/mean"),
    ("keys_are_read", "embedded stock", "++grpo.num_val_generations_per_prompt=4",
     "prompt=4: no code of NeMo-RL reads this key; did you mean grpo.val_num_generations_per_prompt.$",
     "++grpo.num_val_generations_per_prompt=null; grpo.val_num_generations_per_prompt=4"),
    ("only_files_have_an_order", "embedded", "++data.shuffle=false", "makes its problems and has no file",
     "++data.shuffle=true"),
    ("data_name_the_environments_that_a_recipe_adds", "stock", "++env.code={num_workers: 2}",
     "env.code: no data set of the recipe names this environment",
     "++env.code={num_workers: 2}; ++data.default.env_name=code"),
    ("positive_examples_reach_the_loss", "stock", "++loss_fn={positive_example_nll_weight: 0.1}",
     "has no effect",
     "++loss_fn={positive_example_nll_weight: 0.0}"),
    ("dynamic_sampling_keeps_single_successes", "stock",
     "++loss_fn={}; ++grpo.use_dynamic_sampling=true; ++grpo.use_leave_one_out_baseline=true",
     "only correct response",
     "++loss_fn={}; ++grpo.use_dynamic_sampling=true; grpo.use_leave_one_out_baseline=false"),
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
    ("a row", "embedded", "$OPT.weight_decay=0.5; $SCHEDULER.end_weight_decay=0.1",
     "end_weight_decay=0.1 differs from .*=0.5: not supported", "$SCHEDULER.end_weight_decay=0.5"),
    ("a row", "embedded", "$G.top_p=0.9", "top_p=0.9: not supported .* use 1.0, and val_t",
     "$G.top_p=1.0; $G.val_top_p=0.9"),
    ("turns_are_limited_by_the_task", "embedded", "$SEARCH; grpo.max_rollout_turns=2",
     "max_rollout_turns=2: .* up to 4 turns all the same", "nemo_grpo.task.max_turns=2"),
    ("model_overrides_are_supported", "embedded", "$M.model_overrides={hidden_dropout: 0.1}",
     "model_overrides.hidden_dropout=0.1 is not supported",
     "$M.model_overrides={first_last_layers_bf16: true}"),
    ("updates_hold_whole_groups", "embedded", "$AUTHOR; $GBS=2; $MBS=1",
     "train_global_batch_size=2 must be a multiple of grpo.num_generations_per_prompt=4", "$GBS=4"),
    ("updates_hold_whole_groups", "embedded", "$AUTHOR; $GBS=4; $MBS=1; $GPUS=2",
     "one group for each of the 2 data-parallel ranks", "$GBS=8"),
    # NeMo-RL: training
    ("logprob_and_training_batches_match_at_high_tp", "cluster",
     "$TP=4; $GPUS=4; policy.logprob_batch_size=2", "logprob_batch_size=2 differs",
     "policy.logprob_batch_size=4"),
    ("logprob_and_training_batches_match_at_high_tp", "huge long", "policy.logprob_batch_size=2",
     "=2 differs", "-"),
    ("lora_layers_have_megatrons_names", "embedded lora",
     "$PEFT.enabled=true; $PEFT.target_modules=[q_proj, up_proj]", r"use \[linear_qkv, linear_fc1\]",
     "$PEFT.target_modules=[linear_qkv, linear_fc1]"),
    ("lora_layers_have_megatrons_names", "lora", "$PEFT.exclude_modules=[linear_qvk]", "mean 'linear_qkv'",
     "$PEFT.exclude_modules=['*.layers.0.*']"),
    ("lora_adapts_layers_of_the_decoder", "embedded",
     "$PEFT.enabled=true; $PEFT.target_modules=[output_layer]", "cannot adapt 'output_layer'",
     "$PEFT.target_modules=[linear_proj]"),
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
    ("settings_are_known_to_nemo_rl_0_7_0", "cluster", "$M.use_fused_linear_logprobs=true",
     "_logprobs=true: NeMo-RL 0.7.0 does not know this", "$M.use_fused_linear_logprobs=false"),
    ("loss_does_not_need_whole_groups", "cluster", "$AUTHOR", "author_compat=true needs one whole group",
     "loss_fn.author_compat=false"),
    # NeMo-RL: the single controller
    ("single_controller_trains_on_texts", "vision", "$CONTROLLER", "loads no processor for images", "-"),
    ("a row", "cluster", "$CONTROLLER; $CHUNK=1; loss_fn.variant=gpg",
     "streaming_train=1 is less than .*: gpg as set decides a response's",
     "loss_fn.use_alpha=false"),
    # NeMo-RL: the data plane
    ("a row", "lora", "$PLANE", "erpo needs the policy's entropies",
     "data_plane.enabled=false"),
    # NeMo-RL: checkpoints
    ("run_on_a_cluster_saves_checkpoints", "cluster", "checkpointing.enabled=false",
     "enabled=false: nothing is saved, and a job that reaches its time limit loses everything",
     "checkpointing.enabled=true"),
    ("training_metric_is_one_of_every_run", "cluster small", "checkpointing.metric_name=train:rewards",
     "metric_name=train:rewards is not a metric of every run, .*did you mean 'reward'",
     "checkpointing.metric_name=train:reward"),
    # NeMo-RL: rollouts
    ("a row", "cluster", "$G.val_temperature=0.5",
     "=0.5 differs from .*temperature=1", "$G.temperature=0.5"),
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
    ("vllm_layout_tiles_the_gpus", "cluster", "$V.tensor_parallel_size=2", "=2 x .* does not tile the 1 GPUs",
     "$GPUS=2"),
    ("vllm_layout_tiles_the_gpus", "cluster", "$V.tensor_parallel_size=2", "does not tile",
     "$G.backend=megatron"),
    ("vllm_layout_tiles_the_gpus", "small huge", "$V.tensor_parallel_size=3",
     "vllm_cfg.tensor_parallel_size=3", "-"),
    ("separate_rollouts_leave_gpus_to_train", "cluster", "$APART",
     "gpus_per_node=1: separate rollouts .* 1 GPUs", "$GPUS=2"),
    ("separate_rollouts_leave_gpus_to_train", "cluster",
     "$APART; cluster.num_nodes=2; $G.colocated.resources.num_nodes=2",
     "num_nodes=2, gpus_per_node=1: separate rollouts .* use 1 to 1", "$G.colocated.resources.num_nodes=1"),
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
    ("rollout_parallel_divides_the_model", "small fp8", "$V.tensor_parallel_size=8",
     "parallel_size=8 does not", "$V.tensor_parallel_size=2"),
    ("tensor_parallel_stays_on_a_node", "huge", "cluster={gpus_per_node: 4, num_nodes: 16}",
     "the 4 GPUs of a node", "-"),
    ("pipeline_stages_divide_the_layers", "small logic", "$PP=8", "size=8 leaves|not a multiple of", "$PP=1"),
    ("expert_parallel_divides_the_experts", "small logic", "$EP=2", "size=2: .* has no experts",
     "$EP=1"),
    ("sequences_fit_the_model", "fp8 dapo", "$LENGTH=8192", "=8192 exceeds max_position_embeddings=4096",
     "-"),
    ("stop_tokens_are_in_the_vocabulary", "small long", "policy.generation.stop_token_ids=[1, 152064]",
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
    ("training_fits_in_memory", "moe",
     "$M.activation_checkpointing=false; $MBS=4; policy.logprob_batch_size=4",
     "training needs .* most of it activations", "-"),
    ("training_fits_in_memory", "huge", "$TP=1; $SP=false; $PP=1", r"training needs .* most of it \w+ \(",
     "-"),
    ("rollouts_fit_in_memory", "fp8 huge", "$V.gpu_memory_utilization=0.1",
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


def given(overrides: str) -> list[str]:
    return Template(overrides).safe_substitute(SHORT).split("; ") if overrides else []


def loaded(base: str, overrides: str = "") -> Recipe:
    return load_recipe_dict(tree_of(base), given(overrides))


def refusals(base: str, load: Callable[[], Recipe], gpu: str = "h100") -> list[str]:
    """What speaks against the recipe: its own rules, its engine's, or the planner's."""
    try:
        recipe = load()
        if recipe.nemo_grpo.target == "embedded":
            refuse_unsupported(recipe)
        if base in ("embedded", "cluster"):  # models that are not published
            return []
        return problems(shape_of(recipe), plan_input(recipe), HARDWARE[gpu])
    except UserError as error:
        lines = str(error).splitlines()
        return [line.strip() for line in lines[1:]] or lines


NAMES_A_KEY = re.compile(r"[a-z_]+\.[\w.@]+(=|:|.* = | has| without)|(async_rl|reward_penalties)=")


def registered(rule: str) -> Scope | None:
    return next((scope for scope in Scope if rule in RULES[scope]), None)


@pytest.mark.parametrize(("rule", "base", "broken", "message", "fixed"), PARAMETERS)
def test_rule_refuses_the_broken_recipe_and_accepts_the_fixed_one(
    rule: str, base: str, broken: str, message: str, fixed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = registered(rule)
    pattern = Template(message).safe_substitute(SHORT)
    gpu = GPU.get(rule, "h100")
    messages_of = {
        Scope.ADVICE: lambda text: advice(loaded(base, text)),
        Scope.V0_7_0: lambda text: validation.messages(Scope.V0_7_0, loaded(base, text)),
    }.get(scope, lambda text: refusals(base, lambda: loaded(base, text), gpu))
    if fixed != "-":
        assert messages_of(f"{broken}; {fixed}") == []
    messages = messages_of(broken)
    assert any(re.search(pattern, line) for line in messages), messages
    for line in messages:
        assert NAMES_A_KEY.search(line), f"no key: {line}"
        assert scope is Scope.ADVICE or re.search(r"; \w|: \w|did you mean|must be", line), (
            f"no remedy: {line}"
        )
    if scope is not None:
        monkeypatch.setattr(validation, "table_messages", lambda scope, recipe: [])
        for place in Scope:
            monkeypatch.setitem(RULES, place, {rule: RULES[scope][rule]} if place is scope else {})
        alone = messages_of(broken)
        assert any(re.search(pattern, line) for line in alone), f"another rule says so: {messages}"


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
    assert len(names) == len(set(names)) > 40
    assert set(names) - {rule for rule, *_ in CASES} == set()


@pytest.mark.parametrize("base", BASES)
def test_recipes_of_the_cases_break_no_rule(base: str) -> None:
    assert refusals(base, lambda: loaded(base)) == []


ROWS = [(f"{row.where.name} [{row.when.__name__}] {row.rule}", row) for row in tables.ROWS]
CHANGES = [(recipe, change) for recipe, changes in BROKEN.items() for change in changes]


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the rows that wrote a message since the list was last cleared."""
    fired: list[str] = []

    def recorded(scope: Scope, recipe: Recipe) -> list[str]:
        messages = []
        for name, row in ROWS:
            message = row.message(recipe) if row.where is scope else None
            if message is not None:
                fired.append(name)
                messages.append(message)
        return messages

    monkeypatch.setattr(validation, "table_messages", recorded)
    return fired


def all_messages(recipe: str) -> list[str]:
    """Messages of the rules and, if they accept the recipe, those of NeMo-RL 0.7.0 and the advice."""
    base, _, overrides = recipe.partition(" ")
    try:
        accepted = loaded(base, overrides)
    except UserError:
        return refusals(base, lambda: loaded(base, overrides))
    of_its_engine = refusals(base, lambda: accepted)
    return [*of_its_engine, *validation.messages(Scope.V0_7_0, accepted), *advice(accepted)]


def with_change(recipe: str, change: str) -> str:
    return f"{recipe}; {change}" if " " in recipe else f"{recipe} {change}"


@pytest.mark.parametrize("recipe", BROKEN)
def test_recipe_whose_rows_are_broken_is_accepted_before(recipe: str) -> None:
    base, _, overrides = recipe.partition(" ")
    assert refusals(base, lambda: loaded(base, overrides)) == []


@pytest.mark.parametrize(("recipe", "change"), CHANGES)
def test_change_breaks_a_row_whose_message_has_key_and_remedy(
    recipe: str, change: str, fired: list[str]
) -> None:
    all_messages(recipe)
    before = set(fired)
    fired.clear()
    messages = all_messages(with_change(recipe, change))
    assert set(fired) - before != set(), "the change breaks no row"
    for message in messages:
        assert NAMES_A_KEY.search(message), message
        assert "; " in message or ": " in message, f"no remedy: {message}"


def test_every_row_fires_for_some_change(fired: list[str]) -> None:
    for recipe, change in CHANGES:
        all_messages(with_change(recipe, change))
    names = [name for name, _ in ROWS]
    assert len(names) == len(set(names)) > 200, "two rows say the same"
    assert set(names) - set(fired) == set(), "these need a change in broken_rows.py"


def test_every_condition_leaves_some_recipe_alone() -> None:
    """With the test before: each condition holds for one recipe and not for another."""
    recipes = [loaded(base, overrides) for base, _, overrides in (text.partition(" ") for text in BROKEN)]
    # a row refuses the recipes whose ranks do not hold whole replicas
    never_false = (always, ranks_hold_whole_replicas)
    conditions = {row.when for _, row in ROWS if row.when not in never_false}
    assert [condition.__name__ for condition in conditions if all(map(condition, recipes))] == []


@pytest.mark.parametrize(("text", "sentence"), REFUSED.values(), ids=REFUSED)
def test_written_recipe_is_refused_with_this_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    assert sentence in refusals("embedded", lambda: load_recipe(path))


def test_rows_name_keys_of_a_recipe() -> None:
    """A misspelt key would be null, and its row would hold for every recipe or for none."""
    declared = {key for key, _ in leaves(loaded("cluster").to_dict())}
    for name, row in ROWS:
        keys = [row.first, row.second] if isinstance(row, Relation) else [row.key]
        for key in keys:
            known = isinstance(key, Number) or is_known(key) or key in declared or key in DERIVED
            assert known, f"{name}: {key}"


DERIVED = ("nemo_grpo.task.num_turns",)
"""Properties that rows name as if they were keys."""


def test_every_row_prints_in_one_line_without_a_recipe() -> None:
    lines = [in_words(row) for _, row in ROWS]
    assert all("\n" not in line and " object at " not in line for line in lines)
    assert (
        "CLUSTER [trains asynchronously] grpo.use_dynamic_sampling must be null or false: "
        "grpo.async_grpo.enabled=true does not work with it; switch one of them off"
    ) in lines
    assert (
        "ALL [learns from demonstrations] grpo.num_generations_per_prompt must be 1: "
        "{loss_fn.variant} trains on one demonstration per prompt; use 1"
    ) in lines


@pytest.mark.parametrize(
    ("kind", "holding", "broken"),
    [
        (rows.DIVIDES, (2, 6), (6, 2)), (rows.IS_MULTIPLE_OF, (6, 2), (2, 6)), (rows.EQUALS, (2, 2), (2, 3)),
        (rows.IS_AT_MOST, (2, 2), (3, 2)), (rows.IS_BELOW, (1, 2), (2, 2)),
        (rows.IS_AT_LEAST, (2, 2), (1, 2)),
        (rows.NEEDS, (True, 2), (True, 1)), (rows.NEEDS, ("auto", 0), (2, "auto")),
        (rows.EXCLUDES, (2, 1), (2, 2)),
    ],
)  # fmt: skip
def test_relations_by_hand(kind: Kind, holding: tuple[Any, Any], broken: tuple[Any, Any]) -> None:
    assert kind.holds(*holding)
    assert not kind.holds(*broken)


@pytest.mark.parametrize(
    ("allowed", "holding", "broken"),
    [
        (rows.TWO_OR_MORE, 2, 1), (rows.ABOVE_0, 1, 0), (rows.ABOVE_0, 0.1, None), (rows.NOT_EMPTY, [0], []),
        (rows.NOT_NULL, 0, None), (rows.OF_TRAINING, None, "val:x"), (rows.OF_EITHER, "val:x", "x"),
        (rows.OF_VALIDATION, None, "train:x"), (rows.one_of(None, 1), None, 0),
        (rows.items_of("a", "b"), ["a"], ["a", "c"]), (rows.items_of("a", "b"), None, ["c"]),
    ],
)  # fmt: skip
def test_allowed_values_by_hand(allowed: Allowed, holding: Any, broken: Any) -> None:
    assert allowed.holds(holding)
    assert not allowed.holds(broken)
