"""The recipes of make cluster-quickstart and make cluster-smollm2 train the same thing on two engines."""

from pathlib import Path

import pytest

from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.dotted import leaves

RECIPES = Path(__file__).parents[3] / "recipes"

OF_THE_ENGINE = (
    "checkpointing.",
    "logger.",
    "nemo_grpo.evaluation.",  # of nemo-grpo eval
    "nemo_grpo.export.",
    "nemo_grpo.run_name",
    "nemo_grpo.target",
    "grpo.max_num_epochs",
    "grpo.val_batch_size",
    "grpo.reward_shaping.",  # off
    "policy.generation.vllm_cfg.",
    "policy.make_sequence_length_divisible_by",
    "policy.sequence_packing.",  # how many tokens a microbatch holds
    "policy.megatron_cfg.distributed_data_parallel_config.",
    "policy.megatron_cfg.optimizer.use_",  # where the optimizer's state is, and in what
)
"""Beginnings of keys in which they may differ: they change how an engine computes, not what."""


def settings(name):
    return dict(leaves(load_recipe(RECIPES / name).to_dict()))


def differing(a, b):
    return {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


@pytest.mark.parametrize(
    ("cluster", "embedded", "may_differ"),
    [
        ("cluster-quickstart", "cluster-quickstart-embedded", set()),
        # auto is NeMo-RL's bfloat16 where the processor has instructions for it
        ("cluster-smollm2-sft", "smollm2-sft", {"grpo.val_num_generations_per_prompt", "policy.precision"}),
        (
            "cluster-smollm2",
            "smollm2",
            # NeMo-RL validates by one sample of each problem, and demonstrations by the loss alone.
            # Each export has its folder. A bin of packed tokens holds a microbatch of the longest sequences.
            {
                "policy.precision",
                "policy.train_micro_batch_size",
                "policy.logprob_batch_size",
                "grpo.val_num_generations_per_prompt",
                "grpo.max_val_samples",
                "grpo.val_at_start",
                "policy.model_name",
                "policy.tokenizer.name",
            },
        ),
    ],
)
def test_both_engines_train_and_validate_alike(cluster, embedded, may_differ):
    ours, theirs = settings(f"{embedded}.yaml"), settings(f"{cluster}.yaml")
    assert not load_recipe(RECIPES / f"{cluster}.yaml").grpo.reward_shaping.enabled
    assert ours.pop("nemo_grpo.rewards.format") == 0.0  # NeMo-RL's environment leaves out what weighs 0
    assert {key for key in differing(theirs, ours) if not key.startswith(OF_THE_ENGINE)} == may_differ
    assert {"policy.megatron_cfg.optimizer.lr", "policy.precision", "grpo.max_val_samples"} <= theirs.keys()


def test_second_stage_of_cluster_smollm2_starts_from_the_firsts_export():
    first, second = (
        load_recipe(RECIPES / f"{name}.yaml") for name in ("cluster-smollm2-sft", "cluster-smollm2")
    )
    assert second.policy.model_name == f"{first.run_dir}/hf"


def test_task_objective_and_optimizer_are_the_quickstarts():
    embedded, quickstart = settings("cluster-quickstart-embedded.yaml"), settings("quickstart.yaml")
    megatron = ("policy.megatron_cfg.optimizer.", "policy.megatron_cfg.scheduler.")
    same = ("loss_fn.", "nemo_grpo.task.", "nemo_grpo.prompt.", *megatron, "policy.generation.", "grpo.num_")
    assert not [key for key in differing(embedded, quickstart) if key.startswith(same)]
