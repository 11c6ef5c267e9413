"""What a recipe's numbers become on their way into the parts of a run."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig

from nemo_grpo import UserError
from nemo_grpo.engine import run as run_module
from nemo_grpo.engine import setup
from nemo_grpo.engine.checks import Start, check_fp8_fits_the_model
from nemo_grpo.engine.learning import Learner, TrainingState
from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.recorder import Recorder
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support import shipped
from nemo_grpo.support.hf_folder import end_tokens

SCHEDULER = "policy.megatron_cfg.scheduler"


CPU = torch.device("cpu")


def recipe(*overrides: str):
    return load_recipe(shipped.recipe_file("quickstart"), list(overrides))


@pytest.fixture
def given(monkeypatch):
    """What `build_policy` hands on."""
    found: dict[str, object] = {}

    class Policy:
        def __init__(self, hf, optimizer, schedule, **further):
            found.update(further, hf=hf, optimizer=optimizer, schedule=schedule)

        def load_weights(self, tensors, *, keep_reference):
            found.update(tensors=tensors, keep_reference=keep_reference)

    monkeypatch.setattr(setup, "MegatronPolicy", Policy)
    monkeypatch.setattr(setup, "load_weights", lambda _: "its tensors")
    return found


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 7),
        (["policy.train_global_batch_size=16", "policy.train_micro_batch_size=16"], 14),  # two updates a step
        ([f"{SCHEDULER}.lr_warmup_iters=9"], 10),  # a step down at least
        ([f"{SCHEDULER}.lr_decay_iters=50"], 50),
    ],
)
def test_learning_rate_falls_until_the_last_update(given, overrides, expected):
    sizes = ["grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=7"]
    made = recipe(*sizes, f"{SCHEDULER}.lr_warmup_iters=0", *overrides)
    setup.build_policy(made, "folder", "the model's", CPU, keep_reference=True)
    assert given["schedule"].lr_decay_iters == expected
    assert (given["hf"], given["tensors"], given["keep_reference"]) == ("the model's", "its tensors", True)


def test_policy_gets_the_recipes_settings(given):
    made = recipe(
        *("policy.precision=bfloat16", "grpo.seed=5", "policy.megatron_cfg.optimizer.lr=0.125"),
        "policy.megatron_cfg.peft={enabled: true, dim: 4, alpha: 6, exclude_modules: [linear_fc1]}",
    )
    setup.build_policy(made, "folder", "the model's", CPU, keep_reference=False)
    assert (given["dtype"], given["seed"], given["keep_reference"]) == (torch.bfloat16, 5, False)
    assert given["optimizer"].lr == 0.125
    assert given["layout"] == made.policy.megatron_cfg.layout
    assert (given["lora"].dim, given["lora"].alpha) == (4, 6)
    assert given["lora"].targets == ("linear_qkv", "linear_proj", "linear_fc2")


def test_widths_of_the_model_that_fp8_cannot_have_are_refused(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 400}
    AutoConfig.for_model("qwen2", hidden_size=40, intermediate_size=64, **sizes).save_pretrained(tmp_path)
    of_model = f"policy.model_name={tmp_path}", "policy.precision=bfloat16"
    check_fp8_fits_the_model(recipe(*of_model))
    fp8 = "policy.megatron_cfg.fp8_cfg={enabled: true, fp8_recipe: tensorwise}"
    with pytest.raises(UserError, match=r"the model's hidden_size = 40 is not a multiple of 16"):
        check_fp8_fits_the_model(recipe(*of_model, fp8))


def test_a_launch_of_another_number_of_ranks_is_refused_before_they_meet(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(parallel, "initialize", Mock(side_effect=AssertionError("the ranks meet")))
    launched = recipe(f"nemo_grpo.runs_dir={tmp_path}")
    start = Start(CPU, launched.task.build())
    with pytest.raises(UserError, match=r"are 1 ranks, but 2 were launched; make them agree"):
        setup.set_up(launched, shipped.model("quickstart"), start)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, (7,)),
        ({"eos_token_id": [9, 7, 3]}, {"eos_token_id": 5}, (7, 9, 3)),
        ({"eos_token_id": None}, {"eos_token_id": 5}, (7, 5)),
        ({}, {"text_config": {"eos_token_id": [4]}}, (7, 4)),
    ],
)
def test_responses_end_where_the_models_folder_says(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    ends = end_tokens(tmp_path, SimpleNamespace(eos_token_id=7))
    assert ends == expected
    for sampling in (setup.training_sampling, setup.validation_sampling):
        assert sampling(recipe("policy.generation.stop_token_ids=[2]"), ends).stop_token_ids == (*expected, 2)


@pytest.mark.parametrize("eos", ["</s>", [1, None], -1, True, 2.0])
def test_an_end_of_sequence_that_is_no_token_id_is_refused(tmp_path, eos):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(
        UserError, match=r"config\.json: eos_token_id=.* must be a token's id or a list of ids"
    ):
        end_tokens(tmp_path, SimpleNamespace(eos_token_id=7))


@pytest.mark.parametrize(
    ("state", "stopping", "saves"),
    [
        ({"step": 6}, False, True),  # a multiple of save_period
        ({"step": 7}, False, False),
        ({"step": 7}, True, True),
        ({"step": 8}, False, True),  # the last
        ({"step": 7, "reached_goal": True}, False, True),
        ({"step": 7, "skipped_in_a_row": 1}, False, False),
    ],
)
def test_checkpoint_is_due_by_the_period_and_at_the_end(state, stopping, saves):
    made = recipe("checkpointing.save_period=3", "grpo.max_num_steps=8")
    state = TrainingState(**state)
    saver = Mock()
    recorder = Recorder(made, Mock(), saver, Mock())
    recorder.save_if_due(Learner(made, Mock(), Mock(), state), stopping=stopping)
    assert saver.save.called == saves


def test_recipe_is_checked_once_before_ranks_start(monkeypatch):
    started = Mock(return_value=3)
    monkeypatch.setattr(run_module, "launch", started)
    monkeypatch.setattr(run_module, "check", Mock(side_effect=UserError("the disk is full")))
    two = recipe("cluster.gpus_per_node=2")
    with pytest.raises(UserError, match="the disk is full"):
        run_module.run_recipe(two, ["train"], resume=True)
    started.assert_not_called()
    monkeypatch.setattr(run_module, "check", Mock())
    assert run_module.run_recipe(two, ["train"], resume=True) == 3
    started.assert_called_once_with(["train"], 2)
