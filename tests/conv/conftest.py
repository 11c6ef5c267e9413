"""Models and checkpoints that the converter tests share; made once per session."""

import os
from functools import cache

import pytest
import torch
from conv_models import CONFIGS, save_model

from checkpoints_conv.hf_to_megatron import hf_to_megatron

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)  # forked ranks must not inherit a thread pool


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory):
    """family -> model folder, made on demand."""
    return cache(lambda family: save_model(family, tmp_path_factory.mktemp("hf") / family))


@pytest.fixture(scope="session")
def megatron_checkpoints(tmp_path_factory, hf_models):
    """family -> its streamed Megatron checkpoint, made on demand."""
    return cache(
        lambda family: hf_to_megatron(hf_models(family), tmp_path_factory.mktemp("megatron") / family)
    )


@pytest.fixture(params=CONFIGS)
def family_name(request):
    """Every family."""
    return request.param


@pytest.fixture
def source(hf_models):
    return hf_models("qwen2")


@pytest.fixture
def checkpoint(megatron_checkpoints):
    return megatron_checkpoints("qwen2")
