"""Every rule about NeMo-RL: one cluster recipe that breaks it, the same recipe that just does not."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_grpo.errors import UserError
from nemo_grpo.recipe import load_recipe_dict
from nemo_grpo.recipe.checks import CLUSTER_CHECKS

M, G, P = "policy.megatron_cfg", "policy.generation", "policy"
V, OPT, PEFT, FP8 = f"{G}.vllm_cfg", f"{M}.optimizer", f"{M}.peft", f"{M}.fp8_cfg"
TP, PP = f"{M}.tensor_model_parallel_size", f"{M}.pipeline_model_parallel_size"
CP = f"{M}.context_parallel_size"
ETP = f"{M}.expert_tensor_parallel_size"
PACK, DYNAMIC = f"{P}.sequence_packing.enabled=true", f"{P}.dynamic_batching.enabled=true"
FUSED, OVERLAP = (
    f"{M}.use_fused_linear_logprobs=true",
    f"{M}.distributed_data_parallel_config.overlap_param_gather",
)
CORRECTED = "loss_fn.use_importance_sampling_correction=true"
APART = f"{G}.colocated={{enabled: false, resources: {{gpus_per_node: 1, num_nodes: 1}}}}"
ASYNC = [
    "grpo.async_grpo.enabled=true",
    f"{V}.async_engine=true",
    "cluster.gpus_per_node=2",
    APART,
    CORRECTED,
]
SEARCH, STOPS = "nemo_grpo.task.name=search_qa", f"{G}.stop_strings=[</search>, </answer>]"
DRAWS = "grpo.use_dynamic_sampling=true"

CASES: list[tuple[str, list[str], list[str], str]] = [
    ("model_comes_from_the_hub", ["nemo_grpo.warm_start={}"], ["nemo_grpo.warm_start=null"], "warm_start"),
    (
        "leave_one_out_is_decided",
        ["~grpo.use_leave_one_out_baseline"],
        ["grpo.use_leave_one_out_baseline=false"],
        "use_leave_one_out_baseline=null",
    ),
    (
        "validation_samples_as_training",
        [f"{G}.val_temperature=0.5"],
        [f"{G}.temperature=0.5"],
        "val_temperature=0.5 differs from temperature=1",
    ),
    ("validation_samples_as_training", [f"{G}.val_top_p=0.9"], [f"{G}.top_p=0.9"], "val_top_p=0.9"),
    ("validation_samples_as_training", [f"{G}.val_top_k=9"], [f"{G}.top_k=9"], "val_top_k=9"),
    (
        "progress_compares_like_with_like",
        ["loss_fn.variant=erpo", f"{G}.top_p=0.9"],
        [f"{G}.top_p=1.0"],
        "top_p=0.9, top_k=null: NeMo-RL then scores",
    ),
    (
        "progress_compares_like_with_like",
        ["loss_fn.variant=erpo", f"{G}.top_k=9"],
        ["loss_fn.variant=tr_grpo"],
        "top_p=1.0, top_k=9",
    ),
    (
        "validation_batches_are_whole",
        ["grpo.max_val_samples=64", "grpo.val_at_end=true"],  # one of NeMo-RL's batches holds 256
        ["grpo.max_val_samples=64", "grpo.val_at_end=true", "grpo.val_batch_size=32"],
        "val_batch_size=256 does not divide grpo.max_val_samples=64",
    ),
    (
        "scoring_batches_are_whole",
        [f"{P}.logprob_batch_size=3"],
        [f"{P}.logprob_batch_size=8"],
        "logprob_batch_size=3 does not divide the 8 sequences",
    ),
    ("scoring_batches_are_whole", [f"{P}.logprob_batch_size=3"], [PACK], "logprob_batch_size=3"),
    (
        "context_parallel_is_packed",
        [f"{CP}=2", "cluster.gpus_per_node=2", f"{P}.make_sequence_length_divisible_by=4"],
        [PACK],
        "context_parallel_size=2 works on packed sequences only",
    ),
    (
        "sequences_are_padded",
        [
            f"{TP}=2",
            f"{M}.sequence_parallel=true",
            "cluster.gpus_per_node=2",
            f"{P}.make_sequence_length_divisible_by=3",
        ],
        [f"{P}.make_sequence_length_divisible_by=2"],
        "divisible_by=3 is not a multiple of 2",
    ),
    ("batching_is_of_one_kind", [DYNAMIC, PACK], [f"{P}.sequence_packing.enabled=false"], "excludes"),
    ("batching_is_of_one_kind", [DYNAMIC, f"{PP}=2", "cluster.gpus_per_node=2"], [f"{PP}=1"], "one pipeline"),
    (
        "lora_is_explicit",
        [f"{PEFT}.enabled=true"],
        [f"{PEFT}.target_modules=[linear_qkv]"],
        r"target_modules=\[\] adapts",
    ),
    (
        "lora_is_explicit",
        [f"{PEFT}={{enabled: true, target_modules: [linear_qkv], lora_dtype: None}}"],
        [f"{PEFT}.lora_dtype=null"],
        "lora_dtype=None is a text",
    ),
    ("fused_logprobs", [FUSED, f"{OVERLAP}=false", PACK], [f"{P}.sequence_packing.enabled=false"], "packing"),
    ("fused_logprobs", [FUSED, f"{OVERLAP}=true"], [f"{OVERLAP}=false"], "overlap_param_gather=true"),
    ("fused_logprobs", [FUSED, f"{OVERLAP}=false", f"{G}.top_k=5"], [f"{G}.top_k=null"], "top_k=5"),
    (
        "refit_sends_updated_weights",
        ["cluster.gpus_per_node=2", f"~{OVERLAP}"],  # left out: NeMo-RL's base sets it
        [f"{OVERLAP}=false"],
        "overlap_param_gather=true .*each of the 2 ranks",
    ),
    (
        "refit_sends_updated_weights",
        ["cluster.gpus_per_node=2", f"{M}.distributed_data_parallel_config=null"],
        [f"{OPT}.use_distributed_optimizer=false"],
        "overlap_param_gather=true",
    ),
    (
        "refit_sends_updated_weights",
        [
            *("cluster.gpus_per_node=2", f"{CP}=2", PACK, f"{OVERLAP}=true"),
            f"{P}.make_sequence_length_divisible_by=4",
        ],
        [f"{OVERLAP}=false"],
        "each of the 2 ranks",
    ),
    (
        "refit_sends_updated_weights",  # one replica of the layers, two of each expert
        ["cluster.gpus_per_node=4", f"{TP}=4", f"{M}.expert_model_parallel_size=2", f"{OVERLAP}=true"],
        [f"{ETP}=2"],
        "each of the 2 ranks",
    ),
    (
        "chunked_logprobs",
        [f"{P}.logprob_chunk_size=64"],
        [f"{M}.defer_fp32_logits=true"],
        "logprob_chunk_size=64 needs",
    ),
    ("precision_is_bf16", [f"{P}.precision=float32"], [f"{P}.precision=bfloat16"], "precision=float32"),
    (
        "fp8_training_is_complete",
        [f"{FP8}.enabled=true", CORRECTED],
        [f"{M}.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES='1'"],
        "FP32_SCALES=null: blockwise",
    ),
    (
        "fp8_training_is_complete",
        [f"{FP8}={{enabled: true, fp8_recipe: tensorwise, fp8_param: true}}", CORRECTED],
        [f"{FP8}.fp8_param=false"],
        "fp8_param=true",
    ),
    ("fp8_cache", [f"{V}.kv_cache_dtype=fp8", CORRECTED], [f"{V}.precision=fp8"], "kv_cache_dtype=fp8 needs"),
    ("fp8_rollouts_are_corrected", [f"{V}.precision=fp8"], [CORRECTED], "correction=false: FP8 rounds"),
    (
        "optimizer_state",
        [f"{OPT}.use_precision_aware_optimizer=true", f"{OPT}.use_distributed_optimizer=false"],
        [f"{OPT}.use_distributed_optimizer=true"],
        "use_precision_aware_optimizer=true needs optimizer=adam",
    ),
    (
        "optimizer_state",
        [f"{OPT}.optimizer_cpu_offload=true"],
        [f"{OPT}.optimizer_offload_fraction=1.0"],
        "optimizer_offload_fraction=0.0 must be",
    ),
    ("experts_fit_the_ranks", [f"{ETP}=2"], ["cluster.gpus_per_node=2"], "expert_tensor_parallel_size=2 x"),
    (
        "recomputed_modules_exist",
        [f"{M}.recompute_modules=[core_atn]"],
        [f"{M}.recompute_modules=[core_attn]"],
        r"recompute_modules=\['core_atn'\]",
    ),
    (
        "rollout_engines",
        [f"{V}.tensor_parallel_size=2"],
        ["cluster.gpus_per_node=2"],
        "tensor_parallel_size=2 x .* does not tile the 1 GPUs",
    ),
    (
        "rollout_engines",
        [f"{V}.pipeline_parallel_size=2", "cluster.gpus_per_node=2"],
        [f"{V}.async_engine=true"],
        "needs .*async_engine=true",
    ),
    (
        "rollout_engines",
        [f"{V}.tensor_parallel_size=2", f"{V}.expert_parallel_size=3", "cluster.gpus_per_node=2"],
        [f"{V}.expert_parallel_size=2"],
        "expert_parallel_size=3 must be a multiple",
    ),
    (
        "separate_rollouts_have_gpus",
        [APART],
        ["cluster.gpus_per_node=2"],
        "gpus_per_node=1: rollouts apart .* the node's 1 GPUs",
    ),
    (
        "separate_rollouts_have_gpus",
        [APART, "cluster={num_nodes: 2, gpus_per_node: 1}", f"{G}.colocated.resources.num_nodes=2"],
        [f"{G}.colocated.resources.num_nodes=1"],
        "num_nodes=2, gpus_per_node=1: rollouts apart .* use 1 to 1",
    ),
    ("rollouts_have_room", [f"{V}.max_model_len=63"], [f"{V}.max_model_len=64"], "max_model_len=63"),
    ("rollouts_have_room", [f"{V}.gpu_memory_utilization=1.0"], [f"{V}.gpu_memory_utilization=0.9"], "=1.0"),
    ("async_steps_are_corrected", ASYNC[:-1], [CORRECTED], "NeMo-RL refuses to train on them uncorrected"),
    (
        "groups_may_be_split",
        ["loss_fn.variant=cw_grpo", "loss_fn.author_compat=true"],
        ["loss_fn.author_compat=false"],
        "author_compat=true needs one whole group",
    ),
    (
        "exports_are_of_whole_models",
        [
            "nemo_grpo.export.at_every_save=true",
            f"{PEFT}.enabled=true",
            f"{PEFT}.target_modules=[linear_qkv]",
        ],
        ["nemo_grpo.export.at_every_save=false"],
        "adapters are merged with the base model",
    ),
    (
        "exports_have_a_converter",
        ["nemo_grpo.export.at_every_save=true", "nemo_grpo.task={name: vision_counting}"],
        ["nemo_grpo.export.at_every_save=false"],
        "vision_counting trains a model that sees",
    ),
    (
        "training_has_an_epoch",
        ["grpo.max_num_epochs=0"],
        ["grpo.max_num_epochs=1"],
        "max_num_epochs=0: NeMo-RL would return before the first step",
    ),
    ("async_steps", [*ASYNC, DRAWS], ["grpo.use_dynamic_sampling=false"], "use_dynamic_sampling=true"),
    ("async_steps", [*ASYNC, f"{V}.async_engine=false"], [f"{V}.async_engine=true"], "async_engine=true"),
    (
        "async_steps",
        [*ASYNC, f"{G}.colocated.enabled=true"],
        [f"{G}.colocated.enabled=false"],
        "of their own",
    ),
    (
        "async_steps",
        [*ASYNC, "grpo.reward_shaping={enabled: true, overlong_buffer_length: 8}"],
        ["grpo.reward_shaping.enabled=false"],
        "reward_shaping.enabled=true",
    ),
    ("surplus_prompts", ["grpo.batch_multiplier=2"], [DRAWS], "batch_multiplier=2 needs"),
    (
        "episodes_have_turns",
        [SEARCH, STOPS],
        ["grpo.max_rollout_turns=2"],
        "max_rollout_turns=1: an episode of search_qa",
    ),
    (
        "length_penalty_sees_the_whole_response",
        [
            *(SEARCH, STOPS, "grpo.max_rollout_turns=2"),
            "grpo.reward_shaping={enabled: true, overlong_buffer_length: 8}",
        ],
        ["grpo.reward_shaping.stop_properly_penalty_coef=0.5"],
        "reward_shaping.enabled=true: NeMo-RL measures the first turn",
    ),
    (
        "turns_end_where_vllm_sees_it",
        [SEARCH, "grpo.max_rollout_turns=2"],
        [STOPS],
        "stop_strings=null: NeMo-RL starts vLLM without a tokenizer",
    ),
    (
        "turns_end_where_vllm_sees_it",
        [SEARCH, "grpo.max_rollout_turns=2", STOPS, f"{V}.skip_tokenizer_init=true"],
        [f"{V}.skip_tokenizer_init=false"],
        "leave policy.generation.vllm_cfg.skip_tokenizer_init out",
    ),
    (
        "checkpoints_are_ranked",
        ["checkpointing.metric_name=validation/accuracy"],
        ["checkpointing.metric_name=val:accuracy"],
        "metric_name=validation/accuracy must start .* use val:accuracy",
    ),
    (
        "saves_meet_validations",
        ["checkpointing.save_period=15"],
        ["checkpointing.metric_name=null"],
        "save_period=15 is not a multiple of grpo.val_period=10",
    ),
    ("saves_meet_validations", ["grpo.val_period=0"], ["grpo.val_period=5"], "grpo.val_period=0: a check"),
    (
        "checkpoints_are_ranked",
        ["logger.log_dir=null"],
        ["logger.log_dir=logs"],
        "logger.log_dir=null",
    ),
]


@pytest.fixture
def cluster_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """The small recipe, on one GPU of a cluster."""
    tree["grpo"]["use_leave_one_out_baseline"] = False
    tree["policy"] |= {"precision": "bfloat16", "make_sequence_length_divisible_by": 2}
    tree["policy"]["megatron_cfg"]["distributed_data_parallel_config"] = {"overlap_param_gather": False}
    tree["checkpointing"] = {"checkpoint_dir": "checkpoints"}
    tree["logger"] = {"log_dir": "logs"}
    tree["nemo_grpo"]["target"] = "cluster"
    return tree


@pytest.mark.parametrize(
    ("rule", "broken", "mended", "message"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_cluster_rule_refuses_the_broken_recipe_and_takes_the_mended_one(
    cluster_tree: dict[str, Any], rule: str, broken: list[str], mended: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe_dict(cluster_tree, broken)
    load_recipe_dict(cluster_tree, broken + mended)


def test_cluster_rules_leave_recipes_of_the_embedded_engine_alone(tree: dict[str, Any]) -> None:
    load_recipe_dict(tree, ["policy.precision=float32", f"{G}.val_temperature=0.5"])


def test_every_cluster_rule_has_a_case() -> None:
    tested = {name for name, *_ in CASES}
    untested = {r.__name__ for r in CLUSTER_CHECKS if not any(r.__name__.startswith(name) for name in tested)}
    assert untested == set()


def test_gpus_that_only_sample_do_not_train(cluster_tree: dict[str, Any]) -> None:
    cluster_tree["policy"] |= {"train_micro_batch_size": 1, "logprob_batch_size": 1}
    whole = load_recipe_dict(cluster_tree, ["cluster={num_nodes: 4, gpus_per_node: 2}"])
    assert (whole.world_size, whole.num_rollout_gpus) == (8, 0)
    resources = f"{G}.colocated={{enabled: false, resources: {{gpus_per_node: 2, num_nodes: 3}}}}"
    apart = load_recipe_dict(cluster_tree, ["cluster={num_nodes: 4, gpus_per_node: 2}", resources])
    assert (apart.world_size, apart.num_rollout_gpus, apart.data_parallel_size) == (2, 6, 2)
