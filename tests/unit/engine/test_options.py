"""From recipe sections to megatron-core's config fields, and what FP8 needs of a machine; no GPU is asked."""

import dataclasses
import re

import pytest
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_grpo.engine.megatron.model import transformer_config
from nemo_grpo.engine.megatron.options import (
    FP8_CAPABILITY,
    Machine,
    config_fields,
    fp8_alignment,
    fp8_hint,
    fp8_refusals,
    fp8_width_refusals,
)
from nemo_grpo.models import ModelSpec
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import Megatron
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import Limit
from nemo_grpo.recipe.tables import rows

CUDA = (13, 0)


def section(**keys) -> Megatron:
    return Megatron.model_validate({"optimizer": {"lr": 1e-6}, **keys})


def fp8(**keys) -> Megatron:
    return section(fp8_cfg={"enabled": True, **keys})


SPEC = ModelSpec("tiny", "qwen2", 32, 4, 4, 2, 64, 96, 64, False, 8, rope={"rope_type": "default"})


@pytest.mark.parametrize(
    ("megatron", "fields"),
    [
        (section(), {}),
        (section(fp8_cfg={"enabled": False, "fp8": "hybrid"}), {}),
        (fp8(), {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}),
        (
            section(
                fp8_cfg={"enabled": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
                model_overrides={"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2},
            ),
            {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": False, "first_last_layers_bf16": True}
            | {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2},
        ),
        (section(model_overrides={"first_last_layers_bf16": True}), {}),
        (
            section(activation_checkpointing=True),
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        (
            section(activation_checkpointing=True, recompute_granularity="selective"),
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        ),
    ],
)
def test_sections_become_config_fields_that_megatron_takes(megatron, fields):
    assert config_fields(megatron) == fields
    config = transformer_config(SPEC, Layout(), torch.bfloat16, **fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_megatron_has_every_recipe_and_field_that_is_named_here():
    assert set(FP8_CAPABILITY) <= {recipe.value for recipe in Fp8Recipe}
    (limit,) = [row for row in rows(Scope.EMBEDDED) if row.key == "policy.megatron_cfg.fp8_cfg.fp8_recipe"]
    assert isinstance(limit, Limit)
    assert set(FP8_CAPABILITY) == set(limit.allowed.values)
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert {"fp8", "fp8_recipe", "fp8_param", "first_last_layers_bf16", "transformer_impl"} <= known


@pytest.mark.parametrize(
    ("megatron", "machine", "message"),
    [
        (fp8(), Machine(None, True, None), "torch finds none; use false for BF16"),
        (fp8(), Machine((9, 0), False, CUDA), "not installed; run scripts/install_transformer_engine.sh"),
        (
            fp8(),
            Machine((8, 9), True, CUDA),
            "capability 9.0 and this GPU has 8.9; use fp8_recipe=delayed or tensorwise",
        ),
        (fp8(fp8_recipe="delayed"), Machine((8, 0), True, CUDA), "needs compute capability 8.9 .* use false"),
        (
            fp8(),
            Machine((9, 0), True, (12, 8)),
            "needs a torch for CUDA 12.9 or newer and this one is for 12.8; use fp8_recipe=delayed",
        ),
    ],
)
def test_fp8_is_refused_with_the_remedy(megatron, machine, message):
    (found,) = fp8_refusals(megatron, machine)
    assert re.search(message, found)


@pytest.mark.parametrize(
    ("recipe", "capability"), [("delayed", (8, 9)), ("tensorwise", (8, 9)), ("blockwise", (9, 0))]
)
def test_fp8_is_let_through_on_a_machine_that_has_it(recipe, capability):
    assert not list(fp8_refusals(fp8(fp8_recipe=recipe), Machine(capability, True, CUDA)))
    assert list(fp8_refusals(fp8(fp8_recipe=recipe), Machine((capability[0], capability[1] - 1), True, CUDA)))
    assert not list(fp8_refusals(section(), Machine(None, False, None)))  # nobody asked for it


def test_delayed_scaling_in_e4m3_gets_a_hint():
    assert "use fp8=hybrid" in (fp8_hint(fp8(fp8_recipe="delayed", fp8="e4m3")) or "")
    for good in (fp8(fp8_recipe="delayed", fp8="hybrid"), fp8(), section()):
        assert fp8_hint(good) is None


def test_fp8_needs_widths_of_sixteen():
    assert not list(fp8_width_refusals(SPEC, Layout(tensor=2), "blockwise"))  # 32, 64 / 2, 32 / 2
    (attention,) = fp8_width_refusals(SPEC, Layout(tensor=4), "delayed")  # 64 / 4 fits, 32 / 4 does not
    assert "num_attention_heads x head_dim / TP = 8 is not a multiple of 16" in attention


def test_blocks_of_a_shared_sequence_are_whole():
    """Transformer Engine gathers quantised inputs: its blocks of 128 may not span two ranks."""
    layout = Layout(tensor=2, sequence_parallel=True)
    (hidden,) = fp8_width_refusals(SPEC, layout, "blockwise")
    assert "hidden_size = 32 is not a multiple of 128" in hidden
    assert not list(fp8_width_refusals(SPEC, layout, "tensorwise"))
    multiples = {None: 1, "tensorwise": 16, "delayed": 16, "blockwise": 128}
    assert {recipe: fp8_alignment(recipe) for recipe in multiples} == multiples
