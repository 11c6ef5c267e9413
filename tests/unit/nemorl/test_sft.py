"""What the driver hands to NeMo-RL's supervised training, without NeMo-RL."""

from unittest.mock import MagicMock

import pytest
import torch

from nemo_grpo.nemorl import config, sft
from nemo_grpo.recipe import load_recipe
from nemo_grpo.run.groups import Group, Scored
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.tasks import Problem

RECIPE = "erpo/sft-qwen2.5-7b-1n8g"


def test_section_is_the_recipes_loop():
    recipe = load_recipe(RECIPE, ["grpo.seed=3", "grpo.val_at_start=false"])
    section = config.sft_section(recipe)
    assert section == {
        "max_num_steps": 1572, "max_num_epochs": 3, "val_period": 100, "val_batches": -1,
        "val_global_batch_size": 144, "val_micro_batch_size": 2, "val_at_start": False, "val_at_end": True,
        "seed": 3, "only_unmask_final": False,
    }  # fmt: skip
    recipe = load_recipe(RECIPE, ["grpo.max_val_samples=250"])
    assert config.sft_section(recipe)["val_global_batch_size"] == 256, "whole microbatches of 8 ranks x 2"


def test_tree_has_the_sections_of_supervised_training_alone():
    tree = {name: {} for name in (*config.SFT_SECTIONS, "grpo", "loss_fn", "env")}
    tree["policy"] = {"model_name": "m", "generation": {"backend": "vllm"}, "megatron_cfg": {"enabled": True}}
    found = config.sft_tree(load_recipe(RECIPE), tree)
    assert set(found) == {*config.SFT_SECTIONS, "sft"}
    assert found["policy"] == {  # with generation NeMo-RL would prepare for sampling
        "model_name": "m",
        "megatron_cfg": {"enabled": True, "use_linear_ce_fusion_loss": False},
    }


def test_conversation_has_the_tokens_in_order_and_roles_where_the_loss_is():
    mask = torch.tensor([True, True, False, True, True])  # an observation between two turns
    response = Response(torch.arange(3, 8), torch.zeros(5), mask, truncated=False, text="")
    group = Group(Problem("p", "q", "a"), [1, 2], [Scored(response)])
    tokenizer = MagicMock(decode=lambda tokens: "".join(map(str, tokens)))
    data = sft.DemonstrationDataset([group].__getitem__, 1, tokenizer)
    datum = data[0]
    log = [(m["role"], m["token_ids"].tolist(), m["content"]) for m in datum["message_log"]]
    assert log == [
        ("user", [1, 2], "12"), ("assistant", [3, 4], "34"), ("environment", [5], "5"),
        ("assistant", [6, 7], "67"),
    ]  # fmt: skip
    assert (datum["length"], datum["loss_multiplier"], datum["idx"], len(data)) == (7, 1.0, 0, 1)
    with pytest.raises(IndexError):
        data[1]
