"""A small policy that knows some puzzles."""

import pytest
from taught_policy import SMALL, taught

from nemo_grpo.support.hf_folder import load_tokenizer
from nemo_grpo.tasks import Prompt, encode_prompt, parse_task

TASK = {"name": "knights_knaves"}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return taught(SMALL, parse_task(TASK).build(), Prompt(), tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def tokenizer(model):
    return load_tokenizer(model)


@pytest.fixture(scope="session")
def prompts(tokenizer):
    return [encode_prompt(tokenizer, Prompt(), p) for p in parse_task(TASK).build().validation_problems(32)]
