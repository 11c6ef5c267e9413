"""A small model that ``nemo-grpo eval`` can load."""

import pytest
from toy_policies import warm_started


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return warm_started(
        tmp_path_factory.mktemp("cache"),
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=256, num_steps=3, batch_size=4,
    )  # fmt: skip
