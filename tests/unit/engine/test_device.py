"""Devices, layers and precision that a rank takes, on hosts that are made up here."""

import logging

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from processes import ROOT

from nemo_grpo import UserError
from nemo_grpo.engine.checks import choose_device
from nemo_grpo.engine.megatron import layers, parallel
from nemo_grpo.engine.megatron.model import transformer_config
from nemo_grpo.engine.setup import choose_precision
from nemo_grpo.models import ModelSpec
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.run.continuation import check_same_run
from nemo_grpo.support import machine, shipped

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
    assert choose_device(recipe("auto", 2)) == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device(recipe("cuda", 2)) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"gpus_per_node=4: rank 2 of .* no GPU, torch finds 2; use 2"):
        choose_device(recipe("auto", 4))


def test_a_device_that_cannot_be_had_is_refused(gpus):
    gpus(0)
    assert choose_device(recipe("auto")) == choose_device(recipe("cpu")) == torch.device("cpu")
    with pytest.raises(UserError, match="device=cuda: torch finds no CUDA device"):
        choose_device(recipe("cuda"))
    gpus(1)
    with pytest.raises(UserError, match="hide it with CUDA_VISIBLE_DEVICES="):
        choose_device(recipe("cpu"))


def test_a_ranks_gpu_is_the_current_device(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", taken.append)
    parallel.initialize(Layout(), torch.device("cpu"), 0)
    assert taken == []
    parallel.initialize(Layout(), torch.device("cuda", 1), 0)  # the groups are there, so no NCCL
    assert taken == [torch.device("cuda", 1), False]  # cuDNN would plan anew for every length


def test_transformer_engine_is_taken_where_it_can_run(gpus, monkeypatch):
    def taken(num_gpus, installed, dtype):
        gpus(num_gpus)
        monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", installed)
        return layers.transformer_impl(dtype)

    assert taken(1, True, torch.bfloat16) == "transformer_engine"
    assert taken(1, True, torch.float32) == taken(1, False, torch.bfloat16) == "local"
    assert taken(0, True, torch.bfloat16) == "local"


def test_a_gpu_without_transformer_engine_is_told_so(gpus, caplog):
    parallel.initialize(Layout(), torch.device("cpu"), 0)
    config = transformer_config(SPEC, Layout(), torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        layers.block_spec(config)
        assert caplog.text == ""  # a CPU has no use for it
        gpus(1)
        layers.block_spec(config)
    assert "Transformer Engine is not installed: BF16 with the local layers" in caplog.text


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WITHOUT, WITH = {"AuthenticAMD", "avx2"}, {"AuthenticAMD", "avx512_bf16"}


def recipe_with(precision: str) -> Recipe:
    return load_recipe(ROOT / "recipes/quickstart.yaml", [f"policy.precision={precision}"])


@pytest.fixture
def on(monkeypatch):
    def be(words: set[str]) -> None:
        monkeypatch.setattr(machine, "_words", lambda: frozenset(words))

    return be


@pytest.mark.parametrize(
    ("words", "device", "width", "asked", "expected"),
    [
        (WITHOUT, CPU, 576, "auto", "float32"),
        (WITH, CPU, 576, "auto", "bfloat16"),
        ({"amx_bf16"}, CPU, 576, "auto", "bfloat16"),
        (WITH, CPU, 128, "auto", "float32"),
        (WITHOUT, CUDA, 128, "auto", "bfloat16"),
        (WITH, CPU, 576, "float32", "float32"),
    ],
)
def test_auto_is_the_faster_one_for_the_machine_and_the_model(on, words, device, width, asked, expected):
    on(words)
    assert choose_precision(recipe_with(asked), device, width, None, leads=True).policy.precision == expected


def test_a_resumed_run_keeps_its_precision_on_another_processor(on, tmp_path):
    on(WITH)
    recipe, begun = recipe_with("auto"), tmp_path / "recipe.resolved.yaml"
    begun.write_text(choose_precision(recipe, CPU, 576, None, leads=True).to_yaml())
    on(WITHOUT)
    first = check_same_run(recipe, begun)
    assert choose_precision(recipe, CPU, 576, first, leads=True).policy.precision == "bfloat16"
    with pytest.raises(UserError, match=r"policy\.precision: bfloat16 -> float32"):
        check_same_run(recipe_with("float32"), begun)


@pytest.mark.parametrize(("words", "num_lines"), [(WITHOUT, 1), (WITH, 0)])
def test_bf16_without_instructions_is_said_once(on, words, num_lines, caplog):
    on(words)
    for leads in (True, False):
        choose_precision(recipe_with("bfloat16"), CPU, 576, None, leads=leads)
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == num_lines
    assert all("6 to 10 times as long" in line.getMessage() for line in lines)
