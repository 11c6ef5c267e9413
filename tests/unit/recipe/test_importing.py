"""Configurations of TRL and verl as recipes: the values that mean something else there, and what is left."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_grpo.aliases import TABLE
from nemo_grpo.cli import app
from nemo_grpo.dotted import value_of
from nemo_grpo.errors import UserError
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.importing import CONVERSIONS, import_recipe

TRL = """
model_name_or_path: Qwen/Qwen2.5-Math-7B
bf16: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_generations: 16
max_prompt_length: 512
max_completion_length: 3072
learning_rate: 2.0e-6
lr_scheduler_type: constant_with_warmup
loss_type: dr_grpo
scale_rewards: none
beta: 0.04
epsilon: 0.1
max_steps: 100
save_steps: 50
report_to: [wandb]
reward_funcs: [accuracy]
log_level: info
"""
VERL = """
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, use_kl_in_reward: false}
data: {train_batch_size: 64, max_prompt_length: 1024, max_response_length: 2048, train_files: a.parquet}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-Math-7B, lora_rank: 0, lora_alpha: 16}
  actor:
    ppo_mini_batch_size: 16
    use_kl_loss: false
    kl_loss_coef: 0.001
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    loss_agg_mode: seq-mean-token-mean
    optim: {lr: 1.0e-6, lr_warmup_steps: -1}
    megatron: {tensor_model_parallel_size: 2, grad_offload: true}
  rollout: {n: 8, temperature: 1.0, top_k: -1, tensor_model_parallel_size: 4, gpu_memory_utilization: 0.6}
critic: {optim: {lr: 1.0e-5}}
trainer: {n_gpus_per_node: 8, nnodes: 2, total_training_steps: 200, save_freq: -1, logger: [console]}
"""


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "theirs.yaml").write_text(text)
    return tmp_path / "theirs.yaml"


def test_verls_plain_kl_becomes_a_penalty_that_pulls(tmp_path):
    text = VERL.replace("use_kl_loss: false", "use_kl_loss: true, kl_loss_type: kl".replace(", ", "\n    "))
    found = import_recipe(written(tmp_path, text))
    assert found.recipe["loss_fn"]["reference_policy_kl_type"] == "k1"
    assert found.recipe["loss_fn"]["kl_score_function_gradient"] is True


def test_trl_counts_batches_by_process_and_names_losses_otherwise(tmp_path):
    found = import_recipe(written(tmp_path, TRL), num_gpus=4)
    wanted = {
        "grpo.num_prompts_per_step": 4 * 8 * 4 // 16,
        "grpo.num_generations_per_prompt": 16,
        "policy.train_global_batch_size": 4 * 8 * 4,
        "policy.max_total_sequence_length": 3584,
        "policy.megatron_cfg.scheduler.lr_decay_style": "constant",
        "loss_fn.variant": "dr_grpo",
        "loss_fn.max_response_length": 3072,
        "loss_fn.normalize_rewards": False,
        "loss_fn.ratio_clip_min": 0.1,
        "loss_fn.ratio_clip_max": 0.1,
        "loss_fn.reference_policy_kl_penalty": 0.04,
        "logger.wandb_enabled": True,
        "cluster.gpus_per_node": 4,
    }
    assert found.library == "TRL"
    assert {key: value_of(found.recipe, key) for key in wanted} == wanted
    assert any(line.startswith("reward_funcs=") and "docs/own.md" in line for line in found.left)
    assert found.unknown == {"": ["log_level"]}


@pytest.mark.parametrize(("line", "scaled"), [("", True), ("scale_rewards: false\n", False)])
def test_trl_divides_by_the_groups_deviation_unless_told_otherwise(line, scaled, tmp_path):
    found = import_recipe(written(tmp_path, TRL.replace("scale_rewards: none\n", line)), num_gpus=4)
    assert value_of(found.recipe, "loss_fn.normalize_rewards") is scaled


def test_verl_nests_counts_prompts_and_switches_its_kl_term(tmp_path):
    found = import_recipe(written(tmp_path, VERL), ["actor_rollout_ref.rollout.n=4"])
    wanted = {
        "grpo.num_prompts_per_step": 64,
        "grpo.num_generations_per_prompt": 4,
        "policy.train_global_batch_size": 16 * 4,
        "policy.megatron_cfg.optimizer.lr": 1e-6,
        "policy.megatron_cfg.tensor_model_parallel_size": 2,
        "policy.generation.vllm_cfg.tensor_parallel_size": 4,
        "loss_fn.reference_policy_kl_penalty": 0.0,
        "loss_fn.ratio_clip_max": 0.28,
        "loss_fn.normalize_rewards": False,
        "cluster.num_nodes": 2,
    }
    assert {key: value_of(found.recipe, key) for key in wanted} == wanted
    for absent in ("checkpointing.save_period", "policy.generation.top_k", "policy.megatron_cfg.peft"):
        assert value_of(found.recipe, absent) is None
    assert value_of(found.recipe, "policy.megatron_cfg.scheduler.lr_warmup_iters") is None
    assert any(line.startswith("data.train_files=") for line in found.left)
    assert found.unknown["critic.optim"] == ["lr"]
    assert found.unknown["actor_rollout_ref.actor.megatron"] == ["grad_offload"]


@pytest.mark.parametrize(("text", "key"), [(TRL, "loss_type=gae"), (VERL, "algorithm.adv_estimator=gae")])
def test_a_loss_without_groups_is_left(tmp_path, text, key):
    found = import_recipe(written(tmp_path, text), [key])
    assert value_of(found.recipe, "loss_fn.variant") is None
    assert any(line.startswith(key.replace("=", '="')) for line in found.left)


@pytest.mark.parametrize("text", [TRL, VERL])
def test_what_is_written_is_a_recipe_once_the_task_is_chosen(tmp_path, text):
    mine = tmp_path / "mine.yaml"
    result = CliRunner().invoke(app, ["recipe", "import", str(written(tmp_path, text)), "-o", str(mine)])
    assert result.exit_code == 0, result.output
    assert "no counterpart: log_level" in result.output or "critic.optim: lr" in result.output
    with pytest.raises(UserError, match=r"task.name=\?\?\?: the recipe leaves this to you"):
        load_recipe(mine)
    recipe = load_recipe(mine, ["nemo_grpo.task.name=knights_knaves"])
    assert recipe.policy.model_name == "Qwen/Qwen2.5-Math-7B"


OTHERS = {"[1]": "no mapping", "grpo: {}\npolicy: {}": "a recipe already", "a: [": "valid YAML"}


@pytest.mark.parametrize(("text", "message"), OTHERS.items())
def test_other_files_are_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        import_recipe(written(tmp_path, text))


def test_every_conversion_is_of_a_key_in_the_table():
    assert set(CONVERSIONS) <= {alias.key for alias in TABLE}


CORRECTION = "use_importance_sampling_correction"


@pytest.mark.parametrize(
    ("line", "wanted", "left"),
    [
        ("loss_type: cispo\nepsilon_high: 5.0", {"ratio_clip_min": 1.0, "ratio_clip_max": 4.0}, None),
        ("loss_type: cispo", {"ratio_clip_min": None, "ratio_clip_max": None}, "epsilon_high"),
        ("loss_type: dapo\nepsilon_high: 0.28", {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}, None),
        ("loss_type: grpo\nepsilon: 0.0", {"ratio_clip_min": 0.0, "ratio_clip_max": 0.0}, None),
        ("loss_type: grpo", {"advantage_eps": 1e-4, "aggregation": "sequence_mean"}, None),
        ("loss_type: sapo", {"variant": None}, 'loss_type="sapo"'),
        ("loss_type: grpo\nuse_vllm: true", {CORRECTION: None}, "vllm_importance_sampling_correction is not"),
        ("loss_type: grpo\nvllm_importance_sampling_correction: true", {CORRECTION: None}, "vllm_importance"),
        ("loss_type: grpo\nvllm_importance_sampling_correction: false", {CORRECTION: None}, None),
    ],
)  # fmt: skip
def test_losses_of_trl(line, wanted, left, tmp_path):
    found = import_recipe(written(tmp_path, line))
    assert {key: value_of(found.recipe, f"loss_fn.{key}") for key in wanted} == wanted
    assert len(found.left) == (left is not None)
    assert all(one.startswith(str(left)) for one in found.left)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("loss_type: grpo", {"policy.megatron_cfg.scheduler.lr_decay_style": "linear",
                             "policy.generation.max_new_tokens": 512}),
        ("algorithm: {adv_estimator: grpo}", {"loss_fn.ratio_clip_c": 3.0,
                                              "policy.megatron_cfg.optimizer.weight_decay": 0.01}),
        ("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {tis_imp_ratio_cap: 2.0}}",
         {"loss_fn.use_importance_sampling_correction": True,
          "loss_fn.truncated_importance_sampling_type": "tis",
          "loss_fn.truncated_importance_sampling_ratio": 2.0}),
    ],
)  # fmt: skip
def test_defaults_of_the_library_are_written(text, wanted, tmp_path):
    found = import_recipe(written(tmp_path, text))
    assert {key: value_of(found.recipe, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    "text",
    [
        "loss_type: dr_grpo\nmax_steps: 9",
        "algorithm: {adv_estimator: dr_grpo}\ntrainer: {total_training_steps: 9}\n"
        "actor_rollout_ref: {rollout: {n: 8}}",
    ],
)
def test_a_loss_that_divides_by_the_longest_response_takes_the_limit(text, tmp_path):
    mine = tmp_path / "mine.yaml"
    result = CliRunner().invoke(app, ["recipe", "import", str(written(tmp_path, text)), "-o", str(mine)])
    assert result.exit_code == 0, result.output
    recipe = load_recipe(mine, ["nemo_grpo.task.name=knights_knaves", "policy.model_name=a"])
    assert recipe.loss_fn.max_response_length == recipe.policy.generation.max_new_tokens == 512
