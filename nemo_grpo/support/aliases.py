"""Names that TRL, verl and OpenRLHF have for a recipe's keys: advice on unknown keys, docs/coming_from.md."""

from typing import NamedTuple

LIBRARIES = ("TRL", "verl", "OpenRLHF")
VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model")
"""Sections of verl's files whose names no section here has."""


class Alias(NamedTuple):
    """One key and its other names.

    Attributes: key: here.  trl, verl, openrlhf: names there, separated by spaces; empty: none.
        remark: what differs.
    """

    key: str
    trl: str = ""
    verl: str = ""
    openrlhf: str = ""
    remark: str = ""


TABLE = (
    Alias("grpo.num_prompts_per_step", "", "train_batch_size", "rollout_batch_size",
          "prompts, not responses"),
    Alias("grpo.num_generations_per_prompt", "num_generations", "n", "n_samples_per_prompt"),
    Alias("grpo.max_num_steps", "max_steps", "total_training_steps", "", "one step is one rollout"),
    Alias("grpo.max_num_epochs", "num_train_epochs", "total_epochs", "num_episodes",
          "set grpo.max_num_steps too"),
    Alias("grpo.val_period", "eval_steps", "test_freq", "eval_steps"),
    Alias("grpo.seed", "seed", "", "seed"),
    Alias("grpo.use_dynamic_sampling", "", "filter_groups", "dynamic_filtering"),
    Alias("grpo.overlong_filtering", "mask_truncated_completions"),
    Alias("loss_fn.variant", "loss_type", "adv_estimator loss_mode", "advantage_estimator",
          "`nemo-grpo variants` lists them"),
    Alias("loss_fn.reference_policy_kl_penalty", "beta", "kl_loss_coef kl_coef", "init_kl_coef",
          "a term of the loss; 0: no reference model"),
    Alias("loss_fn.reference_policy_kl_type", "", "kl_loss_type", "kl_estimator", "k3 is verl's low_var_kl"),
    Alias("loss_fn.ratio_clip_min", "epsilon", "clip_ratio clip_ratio_low", "eps_clip", "set both bounds"),
    Alias("loss_fn.ratio_clip_max", "epsilon_high", "clip_ratio_high", "eps_clip_high eps_clip_low_high"),
    Alias("loss_fn.ratio_clip_c", "delta", "clip_ratio_c", "dual_clip"),
    Alias("loss_fn.sequence_level_importance_ratios", "importance_sampling_level", "", "",
          "sequence is true; GSPO is loss_fn.variant=gspo"),
    Alias("loss_fn.aggregation", "", "loss_agg_mode", "",
          "token_mean, sequence_mean, group_token_mean, constant"),
    Alias("loss_fn.normalize_rewards", "scale_rewards", "norm_adv_by_std_in_grpo", "no_advantage_std_norm",
          "OpenRLHF's is the inverse"),
    Alias("loss_fn.use_importance_sampling_correction", "vllm_importance_sampling_correction",
          "tis_imp_ratio_cap", "enable_vllm_is_correction"),
    Alias("policy.model_name", "model_name_or_path", "path", "pretrain", "a folder or a Hub name"),
    Alias("policy.train_global_batch_size", "per_device_train_batch_size gradient_accumulation_steps",
          "ppo_mini_batch_size", "train_batch_size", "responses per optimizer update, of all ranks"),
    Alias("policy.train_global_batch_size", "steps_per_generation num_iterations", "ppo_epochs", "",
          "below prompts x generations: several updates per step; every response trains once"),
    Alias("policy.train_micro_batch_size", "", "ppo_micro_batch_size_per_gpu ppo_micro_batch_size",
          "micro_train_batch_size"),
    Alias("policy.logprob_batch_size", "", "log_prob_micro_batch_size_per_gpu", "micro_rollout_batch_size"),
    Alias("policy.sequence_packing.train_mb_tokens", "", "ppo_max_token_len_per_gpu",
          "train_max_tokens_per_gpu"),
    Alias("policy.max_total_sequence_length", "max_prompt_length max_model_len", "max_prompt_length",
          "prompt_max_len max_len", "prompt and response together"),
    Alias("policy.generation.max_new_tokens", "max_completion_length max_tokens", "max_response_length",
          "generate_max_len max_new_tokens"),
    Alias("policy.generation.backend", "use_vllm", "", "",
          "on a cluster; on this machine nemo_grpo.engine.generator"),
    Alias("policy.generation.temperature", "temperature", "temperature", "temperature"),
    Alias("policy.generation.top_p", "top_p", "top_p", "top_p"),
    Alias("policy.generation.top_k", "top_k", "top_k", "top_k"),
    Alias("policy.generation.stop_strings", "stop_strings stop", "stop", "stop"),
    Alias("policy.precision", "bf16 fp16 torch_dtype", "dtype param_dtype", "bf16 param_dtype",
          "bfloat16 or float32"),
    Alias("policy.max_grad_norm", "max_grad_norm", "grad_clip", "max_norm"),
    Alias("policy.megatron_cfg.optimizer.lr", "learning_rate", "lr", "actor_learning_rate"),
    Alias("policy.megatron_cfg.optimizer.weight_decay", "weight_decay", "weight_decay", "l2"),
    Alias("policy.megatron_cfg.scheduler.lr_warmup_iters", "warmup_steps", "lr_warmup_steps"),
    Alias("policy.megatron_cfg.scheduler.lr_decay_style", "lr_scheduler_type", "lr_scheduler_type",
          "lr_scheduler"),
    Alias("policy.megatron_cfg.peft", "peft_config", "", "", "{enabled: true, dim: 32, alpha: 64}"),
    Alias("policy.megatron_cfg.peft.dim", "lora_r", "lora_rank", "lora_rank", "with peft.enabled: true"),
    Alias("policy.megatron_cfg.peft.alpha", "lora_alpha", "lora_alpha", "lora_alpha"),
    Alias("policy.megatron_cfg.activation_checkpointing", "gradient_checkpointing",
          "enable_gradient_checkpointing", "gradient_checkpointing"),
    Alias("policy.generation.vllm_cfg.gpu_memory_utilization", "vllm_gpu_memory_utilization",
          "gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    Alias("policy.generation.vllm_cfg.tensor_parallel_size", "vllm_tensor_parallel_size",
          "tensor_model_parallel_size", "vllm_tensor_parallel_size",
          "vLLM's; the policy's is policy.megatron_cfg.tensor_model_parallel_size"),
    Alias("cluster.gpus_per_node", "", "n_gpus_per_node", "actor_num_gpus_per_node"),
    Alias("cluster.num_nodes", "", "nnodes", "actor_num_nodes"),
    Alias("checkpointing.save_period", "save_steps", "save_freq", "save_steps"),
    Alias("checkpointing.keep_top_k", "save_total_limit", "max_actor_ckpt_to_keep", "max_ckpt_num"),
    Alias("checkpointing.checkpoint_dir", "output_dir", "default_local_dir", "ckpt_path"),
    Alias("logger.wandb_enabled", "report_to", "logger", "use_wandb"),
    Alias("nemo_grpo.run_name", "run_name", "experiment_name", "wandb_run_name"),
    Alias("nemo_grpo.task", "train_dataset", "train_files val_files", "prompt_data",
          "a task's name, and its JSONL or Parquet files"),
    Alias("nemo_grpo.task.columns", "", "prompt_key", "input_key label_key",
          "{question: prompt, answer: reward_model.ground_truth} reads verl's files"),
    Alias("nemo_grpo.rewards", "reward_funcs reward_weights", "custom_reward_function", "remote_rm_url",
          "the task's own, or your function: {reward.py:score: 1.0}"),
)  # fmt: skip


def advice_on(name: str, *, also_same: bool = False) -> str:
    """``"; TRL's delta is loss_fn.ratio_clip_c"`` and the remark, for another library's name; else empty.

    Args: also_same: for a key with this very name here, too, as it stood in another section.
    """
    found: dict[Alias, list[str]] = {}
    for alias in TABLE:
        for library, names in zip(LIBRARIES, (alias.trl, alias.verl, alias.openrlhf), strict=True):
            if name in names.split() and (also_same or not alias.key.endswith(f".{name}")):
                found.setdefault(alias, []).append(f"{library}'s")
    parts = [
        f"{' and '.join(libraries)} {name} is {alias.key}" + f" ({alias.remark})" * bool(alias.remark)
        for alias, libraries in found.items()
    ]
    return f"; {', '.join(parts)}" if parts else ""


def advice_on_verl(key: str) -> str:
    """As `advice_on`, for a key below one of verl's sections; else empty."""
    section, name = key.partition(".")[0], key.rpartition(".")[2]
    if section not in VERL_SECTIONS:
        return ""
    found = "" if section in ("critic", "reward_model") else advice_on(name, also_same=True)
    return found or "; it is verl's, and no key here stands for it; leave it out"


def markdown() -> str:
    """The table of docs/coming_from.md."""
    lines: list[tuple[str, ...]] = [("here", *LIBRARIES, "remark"), ("---",) * 5]
    for alias in TABLE:
        names = (", ".join(f"`{name}`" for name in column.split()) for column in alias[1:4])
        lines.append((f"`{alias.key}`", *names, alias.remark))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
