"""Which device a rank takes, and which layers, on hosts that are made up here."""

import logging

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs

from nemo_grpo import UserError
from nemo_grpo.engine import setup
from nemo_grpo.engine.megatron import layers, parallel
from nemo_grpo.engine.megatron.model import transformer_config
from nemo_grpo.models import ModelSpec
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.support import shipped

SPEC = ModelSpec("tiny", "qwen2", 32, 2, 4, 2, 64, 96, 64, False, 8, rope={"rope_type": "default"})


def recipe(device: str, num_gpus: int = 1):
    changes = [f"nemo_grpo.engine.device={device}", f"cluster.gpus_per_node={num_gpus}"]
    return load_recipe(shipped.recipe_file("quickstart"), changes)


@pytest.fixture
def gpus(monkeypatch):
    def host(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    return host


def test_each_rank_takes_the_gpu_of_its_local_rank(gpus, monkeypatch):
    gpus(2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert setup.choose_device(recipe("auto", 2)) == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert setup.choose_device(recipe("cuda", 2)) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"gpus_per_node=4: rank 2 of .* no GPU, torch finds 2; use 2"):
        setup.choose_device(recipe("auto", 4))


def test_a_device_that_cannot_be_had_is_refused(gpus):
    gpus(0)
    assert setup.choose_device(recipe("auto")) == setup.choose_device(recipe("cpu")) == torch.device("cpu")
    with pytest.raises(UserError, match="device=cuda: torch finds no CUDA device"):
        setup.choose_device(recipe("cuda"))
    gpus(1)
    with pytest.raises(UserError, match="hide it with CUDA_VISIBLE_DEVICES="):
        setup.choose_device(recipe("cpu"))


def test_a_ranks_gpu_is_the_current_device(monkeypatch):
    taken, cudnn = [], []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)
    parallel.initialize(Layout(), torch.device("cpu"), 0)
    assert taken == cudnn == []
    parallel.initialize(Layout(), torch.device("cuda", 1), 0)  # the groups are there, so no NCCL
    assert taken == [torch.device("cuda", 1)]
    assert cudnn == [False]  # it would plan anew for every length


@pytest.mark.parametrize(
    ("num_gpus", "installed", "dtype", "expected"),
    [
        (1, True, torch.bfloat16, "transformer_engine"),
        (1, True, torch.float32, "local"),
        (1, False, torch.bfloat16, "local"),
        (0, True, torch.bfloat16, "local"),
    ],
)
def test_transformer_engine_is_taken_where_it_can_run(
    gpus, monkeypatch, num_gpus, installed, dtype, expected
):
    gpus(num_gpus)
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", installed)
    assert layers.transformer_impl(dtype) == expected


def test_nothing_is_dropped_out():
    config = transformer_config(SPEC, Layout(), torch.bfloat16)
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)


def test_a_gpu_without_transformer_engine_is_told_so(gpus, caplog):
    parallel.initialize(Layout(), torch.device("cpu"), 0)
    config = transformer_config(SPEC, Layout(), torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        layers.block_spec(config)
        assert caplog.text == ""  # a CPU has no use for it
        gpus(1)
        layers.block_spec(config)
    assert "Transformer Engine is not installed: BF16 with the local layers" in caplog.text
