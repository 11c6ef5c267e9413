"""A small policy that knows some arithmetic; heads of 32, the least that vLLM takes on a CPU."""

import pytest
from taught_policy import taught

from nemo_grpo.hf_folder import load_tokenizer
from nemo_grpo.recipe.own import WarmStart
from nemo_grpo.tasks import Prompt, encode_prompt, parse_task

TASK = {"name": "arithmetic", "num_digits": 2}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    settings = WarmStart(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=96, max_position_embeddings=512, num_steps=40, batch_size=16, lr=3e-3, seed=0,
    )  # fmt: skip
    return taught(settings, parse_task(TASK).build(), Prompt(), tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def tokenizer(model):
    return load_tokenizer(model)


@pytest.fixture(scope="session")
def prompts(tokenizer):
    return [encode_prompt(tokenizer, Prompt(), p) for p in parse_task(TASK).build().validation_problems(32)]
