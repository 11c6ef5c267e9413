"""Every cluster recipe through NeMo-RL's own configuration class and the checks of its `setup`."""

import inspect
import os
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from nemo_rl.algorithms import grpo, sft
from nemo_rl.algorithms.reward_functions import apply_reward_shaping

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.config import load_run, sft_section
from nemo_grpo.nemorl.exit_status import LAST_PREFIX
from nemo_grpo.nemorl.loss import ObjectiveLoss
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.rules import validation_metrics
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

ROOT = Path(__file__).parents[2]
RECIPES = sorted(
    path for folder in ("cw_grpo", "erpo", "gpg", "tr_grpo") for path in (ROOT / "recipes" / folder).glob("*")
)


class ReachedTheCluster(Exception):
    """`setup` has made all its checks and asks for GPUs."""


SUPERVISED = [path for path in RECIPES if path.stem.startswith("sft-")]
SAMPLED = [path for path in RECIPES if path not in SUPERVISED]


def check_setup(trainer, config, monkeypatch):
    """NeMo-RL's `setup` of one of its trainers, up to where it asks for GPUs."""
    monkeypatch.setattr(trainer, "RayVirtualCluster", MagicMock(side_effect=ReachedTheCluster))
    for name in ("Logger", "set_seed"):
        monkeypatch.setattr(trainer, name, MagicMock())
    problems = list(range(10_000))
    with pytest.raises(ReachedTheCluster):
        trainer.setup(config, MagicMock(), problems, problems)


@pytest.mark.parametrize("path", SUPERVISED, ids=[path.stem for path in SUPERVISED])
def test_supervised_recipe_passes_nemo_rls_own_checks(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = load_run(path)
    config, recipe = run.master_config, run.recipe
    check_setup(sft, config, monkeypatch)
    assert set(sft_section(recipe)) == set(sft.SFTConfig.model_fields), "no setting is left to NeMo-RL"
    assert "generation" not in config.policy
    assert config.sft.max_num_steps == recipe.grpo.max_num_steps
    assert recipe.grpo.max_val_samples == 140
    assert config.sft.val_global_batch_size == 144  # whole microbatches of 2 on 8 ranks
    assert value_of(config, "policy.train_global_batch_size") == recipe.grpo.num_prompts_per_step
    assert value_of(config, "policy.megatron_cfg.scheduler.lr_decay_iters") == recipe.grpo.max_num_steps
    assert value_of(config, "policy.megatron_cfg.peft.enabled")
    yaml.safe_dump(config.model_dump())


@pytest.mark.parametrize("path", SAMPLED, ids=[path.stem for path in SAMPLED])
def test_recipe_passes_nemo_rls_own_checks(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = load_run(path)
    config, recipe = run.master_config, run.recipe
    check_setup(grpo, config, monkeypatch)
    penalty = getattr(recipe.loss_fn, "reference_policy_kl_penalty", 0.0)
    assert config.loss_fn.reference_policy_kl_penalty == penalty, "decides whether the reference is loaded"
    corrects = recipe.loss_fn.use_importance_sampling_correction
    assert config.loss_fn.use_importance_sampling_correction == corrects
    assert not value_of(config, "grpo.use_leave_one_out_baseline")
    assert value_of(config, "policy.megatron_cfg.optimizer.lr") == recipe.policy.megatron_cfg.optimizer.lr
    assert value_of(config, "policy.megatron_cfg.scheduler.lr_decay_iters") == recipe.grpo.max_num_steps
    assert value_of(config, "policy.megatron_cfg.enabled")
    assert not value_of(config, "policy.dtensor_cfg.enabled", False)
    assert value_of(config, "cluster.num_nodes") == recipe.cluster.num_nodes
    assert Path(value_of(config, "checkpointing.checkpoint_dir")).is_absolute()
    yaml.safe_dump(config.model_dump())  # NeMo-RL writes it into every checkpoint
    assert ObjectiveLoss(recipe.loss_fn).config == recipe.loss_fn


@pytest.mark.parametrize("trainer", [grpo.grpo_train, grpo.async_grpo_train, sft.sft_train])
def test_a_trainer_logs_a_steps_times_last(trainer):
    assert re.findall(r'prefix="(.*)"', inspect.getsource(trainer))[-1] == LAST_PREFIX


def test_fp8_recipe_carries_nemo_rls_fp8_settings():
    config = load_run(ROOT / "recipes/cw_grpo/cw_grpo-r1-distill-qwen-1.5b-1n8g-fp8.yaml").master_config
    megatron = config.policy["megatron_cfg"]
    assert megatron["fp8_cfg"] | {"enabled": True, "fp8_recipe": "blockwise"} == megatron["fp8_cfg"]
    assert megatron["env_vars"]["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    assert config.policy["generation"]["vllm_cfg"]["precision"] == "fp8"
    assert config.loss_fn.use_importance_sampling_correction


RECIPE = ROOT / "recipes/gpg/dapo-qwen2.5-math-7b-zero-6n8g.yaml"


@pytest.mark.parametrize(("given", "longest"), [([], 3072), (["max_response_length=4000"], 4000)])
def test_length_penalty_ends_where_responses_do(given, longest):
    settings = ("enabled=true", "overlong_buffer_length=512", *given)
    run = load_run(RECIPE, [f"++grpo.reward_shaping.{setting}" for setting in settings])
    shaping = value_of(run.master_config, "grpo.reward_shaping")
    assert value_of(shaping, "max_response_length") == longest
    assert value_of(shaping, "overlong_buffer_length") == 512
    asked, said = ({"role": role, "token_ids": torch.zeros(9)} for role in ("user", "assistant"))
    logs = [[asked, said | {"token_ids": torch.zeros(n)}] for n in (longest - 512, longest)]
    batch = {"total_reward": torch.ones(2), "message_log": logs}
    assert apply_reward_shaping(batch, shaping)["total_reward"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "override",
    [
        "grpo.val_num_generations_per_prompt=4",
        "++policy.megatron_cfg.checkpoint.async_save=true",
        "++policy.megatron_cfg.model_overrides={first_last_layers_bf16: true}",
        "++checkpointing.ft_save_period=5",
        "++policy.megatron_cfg.moe_aux_loss_coeff=0.01",
    ],
)
def test_keys_that_0_7_0_would_ignore_are_refused_there(override):
    assert compat.check() in compat.TESTED
    if compat.version() == compat.V0_7_0:
        with pytest.raises(UserError, match=override.lstrip("+").split("=")[0]):
            load_run(RECIPE, [override])
    else:
        load_run(RECIPE, [override])


def test_validation_measures_what_recipes_may_ask_for():
    source = inspect.getsource(grpo.validate)
    recipe = load_recipe(ROOT / "recipes/cluster-quickstart.yaml", ["grpo.val_num_generations_per_prompt=2"])
    names = set(validation_metrics(recipe)) - ({"pass_k"} if compat.version() == compat.V0_7_0 else set())
    assert {name for name in names if f'"{name}":' in source or f'val_metrics["{name}"]' in source} == names


def test_workers_log_the_mean_over_a_steps_updates():
    """So `RolloutCheck` and the rehearsal judge what is logged as it is."""
    worker = Path(os.environ["NEMO_RL_SRC"], "nemo_rl/models/policy/workers/megatron_policy_worker.py")
    assert "x[k] / num_global_batches" in worker.read_text()
