"""A small model that ``nemo-grpo eval`` can load."""

import pytest
from toy_policies import new_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return new_model(
        tmp_path_factory.mktemp("model"),
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=256,
    )  # fmt: skip
