"""A small model that ``nemo-grpo eval`` can load."""

import pytest

from nemo_grpo.engine.warm_start import warm_start
from nemo_grpo.recipe.own import WarmStart
from nemo_grpo.tasks import Prompt, parse_task


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    settings = WarmStart(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=256, num_steps=3, batch_size=4, lr=3e-3, seed=0,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )  # fmt: skip
    return warm_start(settings, parse_task({"name": "knights_knaves"}).build(), Prompt())
