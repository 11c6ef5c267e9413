"""A recipe small enough to see at a glance, and complete."""

import pytest


@pytest.fixture
def tree():
    """8 responses per step in one update of two microbatches, on one rank."""
    return {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 3},
        "loss_fn": {"variant": "grpo"},
        "policy": {
            "model_name": "some/model",
            "train_global_batch_size": 8,
            "train_micro_batch_size": 4,
            "max_total_sequence_length": 64,
            "precision": "float32",
            "megatron_cfg": {"optimizer": {"lr": 1e-3}},
            "generation": {"max_new_tokens": 16},
        },
        "nemo_grpo": {"run_name": "test", "task": {"name": "knights_knaves"}},
    }
