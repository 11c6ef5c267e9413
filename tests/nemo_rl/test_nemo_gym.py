"""NeMo-Gym's path through NeMo-RL with a variant, from the data to the update; its servers are made up."""

import json
from pathlib import Path
from unittest.mock import patch

import nemo_rl
import pytest
import ray
import torch
import yaml
from nemo_rl.algorithms import grpo
from nemo_rl.data.collate_fn import rl_collate_fn
from torchdata.stateful_dataloader import StatefulDataLoader
from toy_gym import ANSWER, ASKED, SAID, TOLD, Gym
from toy_training import GENERATIONS, GRPO, PROMPTS, RECIPE, Generation, Run, character_tokenizer

from nemo_grpo.nemorl.config import load_run
from nemo_grpo.nemorl.nemo_rl_batches import configure_gym, fix_video_frames, set_up_data
from nemo_grpo.nemorl.trainer import trained_environments
from nemo_grpo.support.dotted import value_of

pytestmark = pytest.mark.usefixtures("private_ray", "names_are_restored")

BASE = Path(next(iter(nemo_rl.__path__))).parent / "examples" / "configs" / "grpo_math_1B_megatron.yaml"


def gym_run(folder):
    """A stock recipe with NeMo-Gym's environments, one more line, and a file of four problems."""
    problem = {"responses_create_params": {"input": [{"role": "user", "content": "?"}]}}
    rows = "".join(json.dumps(problem | {"agent_ref": {"name": "tools"}}) + "\n" for _ in range(4))
    (folder / "problems.jsonl").write_text(rows)
    data = {"dataset_name": "NemoGymDataset", "processor": "nemo_gym_data_processor", "env_name": "nemo_gym"}
    path = {"_override_": True, "data_path": str(folder / "problems.jsonl"), **data}
    recipe = {
        "defaults": str(BASE),
        "loss_fn": {"variant": "tr_grpo"},
        "grpo": RECIPE["grpo"] | {"max_val_samples": None, "val_batch_size": None, "max_num_steps": 1},
        "policy": {
            **{"train_global_batch_size": PROMPTS * GENERATIONS, "train_micro_batch_size": 2},
            **{"max_total_sequence_length": 16, "generation": {"max_new_tokens": 8}},
        },
        "env": {"should_use_nemo_gym": True, "nemo_gym": {"config_paths": []}},
        "data": {"train": path, "validation": path, "default": None},
        "checkpointing": {"enabled": False, "checkpoint_dir": str(folder / "run")},
        "logger": {"log_dir": str(folder / "logs")},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return load_run(folder / "mine.yaml")


@pytest.fixture
def gym(tmp_path):
    run, tokenizer = gym_run(tmp_path), character_tokenizer()
    config = run.master_config
    config.policy["generation"] |= {"stop_token_ids": [2]}  # as NeMo-RL fills it in from the tokenizer
    fix_video_frames(config)
    configure_gym(config, tokenizer)
    data, validation, *environments = set_up_data(run, tokenizer)
    assert environments == [{}, {}]
    made = Run(tmp_path, {}, run=run)
    generation = Generation(cfg=config.policy["generation"])
    loader = StatefulDataLoader(data, batch_size=PROMPTS, collate_fn=rl_collate_fn, drop_last=True)
    actor = ray.remote(Gym).remote(tokenizer)
    made.parts = made.parts._replace(dataloader=loader, policy_generation=generation, nemo_gym=actor)
    yield made, validation
    ray.kill(actor)


def test_configuration_is_the_one_of_nemo_rls_own_driver(gym):
    run, validation = gym
    config = run.run.master_config
    served = config.policy["generation"]["vllm_cfg"]
    assert (served["async_engine"], served["expose_http_server"]) == (True, True)
    assert config.policy["generation"]["stop_token_ids"] is None
    uses = getattr(grpo, "_should_use_nemo_gym", None) or grpo.should_use_nemo_gym
    assert uses(config)
    assert len(validation) == 4
    for key in ("max_val_samples", "val_batch_size"):
        assert value_of(config, f"grpo.{key}") == 4


def test_a_step_trains_on_what_nemo_gym_returns(gym, tmp_path):
    run, _ = gym
    environments = trained_environments(run.run, (), run.parts)
    with (
        patch(f"{GRPO}.refit_policy_generation", return_value={}),
        patch(f"{GRPO}.print_performance_metrics", return_value={}),
    ):
        run.run_trainer(environments, character_tokenizer())
    step = run.policy.trained[0]
    conversation = torch.tensor(ASKED + SAID + TOLD + ANSWER)
    assert (step["input_ids"][:, : len(conversation)] == conversation).all()
    by_policy = torch.tensor([0, 0, 0, 1, 1, 0, 1])
    assert (step["token_mask"][:, :7] == by_policy).all()
    # Rewards 1, 0, 0: mean 1/3, std (ddof 1) 0.5774; the second group has no signal.
    of_a_token = step["advantages"][:, 3].tolist()
    assert of_a_token[:GENERATIONS] == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-3)
    assert of_a_token[GENERATIONS:] == [0.0] * GENERATIONS
    assert (step["advantages"][:, :7] * (1 - by_policy) == 0).all()
    assert run.logged()["loss"] == pytest.approx(run.policy.losses[-1], rel=1e-5)
