"""Sections declare what a continued run may change."""

import pytest

from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.continuity import _declared, deciding_settings
from nemo_grpo.recipe.schema import entries


@pytest.mark.parametrize("kind", ["PLACES", "EXTENDS"])
@pytest.mark.parametrize("name", ["quickstart", "cluster-quickstart"])
def test_every_declared_key_is_one_that_a_recipe_can_have(name, kind):
    recipe = load_recipe(name, ["policy.model_name=Qwen/Qwen2.5-1.5B"] if name.startswith("cluster") else [])
    known = {*entries(), *(key for key, _ in _fields(recipe))}
    assert set(_declared(recipe, kind)) <= known


def _fields(section, prefix=""):
    for name in type(section).model_fields:
        yield f"{prefix}{name}", name
        value = getattr(section, name)
        if hasattr(type(value), "model_fields"):
            yield from _fields(value, f"{prefix}{name}.")


PLACING = (
    "cluster.num_nodes=2",
    "data_plane={enabled: true}",
    "nemo_grpo.engine.num_threads=3",
    "policy.megatron_cfg.env_vars={A: b}",
    "policy.megatron_cfg.empty_unused_memory_level=2",
    "policy.sequence_packing.enabled=true",
)
EXTENDING = ("grpo.max_num_steps=77", "grpo.val_period=3", "policy.megatron_cfg.scheduler.lr_decay_iters=500")
DECIDING = ("grpo.seed=5", "policy.megatron_cfg.optimizer.lr=0.001", "policy.max_total_sequence_length=300")


@pytest.mark.parametrize("change", [*PLACING, *EXTENDING, *DECIDING])
def test_a_change_decides_results_unless_its_section_declares_it(change):
    before, after = (load_recipe("quickstart", overrides) for overrides in ([], [change]))
    changed = {may_extend: _differ(before, after, may_extend) for may_extend in (False, True)}
    assert changed == {False: change not in PLACING, True: change in DECIDING}


def _differ(before, after, may_extend):
    settings = (deciding_settings(recipe, may_extend=may_extend) for recipe in (before, after))
    return next(settings) != next(settings)
