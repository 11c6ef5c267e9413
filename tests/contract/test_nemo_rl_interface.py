"""The NeMo-RL adapter fits the recorded interfaces of both tested versions; runs without NeMo-RL.

The records are written by scripts/record_nemo_rl.py.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_grpo.dotted import value_of
from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.config import sft_section
from nemo_grpo.nemorl.exchange import StepExchange
from nemo_grpo.nemorl.loss import ObjectiveLoss
from nemo_grpo.nemorl.sampling import dynamic_sampling_for
from nemo_grpo.nemorl.sft import OF_SETUP
from nemo_grpo.recipe import load_recipe
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.base import RatioConfig

OURS_ALONE = {
    "variant",
    "aggregation",
    "max_response_length",
    "advantage_eps",
    "normalize_rewards",
    "use_leave_one_out_baseline",
    "kl_score_function_gradient",
}
"""Keys of every ratio variant that NeMo-RL's loss does not have, or has elsewhere."""


@pytest.fixture(params=list(compat.TESTED))
def recorded(request) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(__file__).with_name(f"nemo_rl-{request.param}.json").read_text())
    return record | {"version": request.param}


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_every_name_of_the_table_was_there(recorded):
    expected = {name for name, versions in compat.NAMES.items() if recorded["version"] in versions}
    assert expected <= set(recorded["names"])


def test_sampling_has_the_signature_that_it_replaces(recorded):
    ours = dynamic_sampling_for(parse_loss_fn({"variant": "gpg"}), StepExchange())
    assert parameters(ours) == recorded["signatures"]["dynamic_sampling"]


def test_estimator_takes_every_call(recorded):
    assert len(recorded["advantage_calls"]) == 2, "synchronous and asynchronous training"
    for keywords in recorded["advantage_calls"]:
        inspect.signature(VariantEstimator.compute_advantage).bind(None, **dict.fromkeys(keywords))


def test_loss_takes_the_call_of_nemo_rls_own(recorded):
    assert parameters(ObjectiveLoss.__call__) == recorded["loss_call"]


def test_trainers_take_what_the_driver_gives_in_that_order(recorded):
    given = [
        *("policy", "policy_generation", "dataloader", "val_dataloader", "tokenizer", "loss_fn"),
        *("task_to_env", "val_task_to_env", "logger", "checkpointer", "grpo_save_state", "master_config"),
    ]
    for trainer in ("grpo_train", "async_grpo_train"):
        taken = [name.removeprefix("wrapped_") for name in recorded["signatures"][trainer]]
        assert taken[: len(given)] == given
    assert {"max_trajectory_age_steps", "teacher_worker_groups", "alias_to_group_alias"} <= set(
        recorded["signatures"]["async_grpo_train"]
    )
    assert {"processor", "policy_factory"} <= set(recorded["signatures"]["setup"])


def test_supervised_training_takes_and_returns_what_the_driver_does(recorded):
    given = ["policy", "train_dataloader", "val_dataloader", "tokenizer", "loss_fn", "master_config"]
    assert recorded["sft_train"] == [*given, "logger", "checkpointer", "sft_save_state"]
    assert recorded["sft_setup_arity"] == len(OF_SETUP)
    recipe = load_recipe(Path(__file__).parents[2] / "recipes/erpo/sft-qwen2.5-7b-1n8g.yaml")
    assert sorted(sft_section(recipe)) == recorded["sft_settings"]


def test_setup_returns_what_is_unpacked(recorded):
    assert recorded["setup_arity"] == len(compat.Setup._fields)


def test_keys_of_our_losses_mean_the_same_to_nemo_rl(recorded):
    assert set(RatioConfig.model_fields) - OURS_ALONE <= set(recorded["loss_keys"])


@pytest.mark.parametrize(
    ("config", "expected"),
    [({"grpo": {"a": 1}}, 1), (type("C", (), {"grpo": {"a": 1}})(), 1), ({"grpo": None}, 7), ({}, 7)],
)
def test_values_are_read_from_dictionaries_and_objects(config, expected):
    assert value_of(config, "grpo.a", 7) == expected
