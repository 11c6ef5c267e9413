"""A whole cluster run on this machine: what is prepared, and how its end is told. No Ray, no NeMo-RL."""

import sys
from pathlib import Path

import pytest

from benchmarks import cluster_run as run
from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal.environment import Stack
from nemo_grpo.support.dotted import leaves
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[3] / "recipes"
CLUSTER = RECIPES / "cluster-quickstart.yaml"


@pytest.fixture
def stack(tmp_path):
    return Stack(Path(sys.executable), tmp_path / "nemo-rl", Path(sys.executable))


@pytest.fixture
def overrides(tmp_path):
    return [f"nemo_grpo.runs_dir={tmp_path / 'runs'}", "grpo.seed=2"]


def test_recipe_keeps_its_steps_and_sizes_and_loses_what_needs_a_gpu(stack, overrides, tmp_path):
    given = load_recipe(CLUSTER, overrides)
    folder = run.prepare(given, CLUSTER, overrides, stack, resume=False)
    assert folder == tmp_path / "runs" / "cluster-quickstart"
    made = load_recipe(folder / "recipe.yaml")
    before, after = (dict(leaves(one.to_dict())) for one in (given, made))
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    of_a_gpu = ("policy.megatron_cfg.", "policy.generation.vllm_", "logger.monitor_gpus")
    models = {"policy.model_name", "policy.tokenizer.name"}
    assert {key for key in changed if not key.startswith(of_a_gpu)} == models
    assert after["policy.generation.vllm_kwargs.max_num_seqs"] == 128  # all rollouts of a step
    assert Path(after["policy.model_name"]).is_absolute()


def test_existing_run_is_kept_unless_resumed(stack, overrides):
    recipe = load_recipe(CLUSTER, overrides)
    folder = run.prepare(recipe, CLUSTER, overrides, stack, resume=False)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="holds a run; continue it with --resume"):
        run.prepare(recipe, CLUSTER, overrides, stack, resume=False)
    assert run.prepare(recipe, CLUSTER, overrides, stack, resume=True) == folder


def test_what_cannot_run_is_refused(stack, tmp_path):
    quickstart = RECIPES / "quickstart.yaml"
    with pytest.raises(UserError, match="embedded"):
        run.prepare(load_recipe(quickstart), quickstart, (), stack, resume=False)
    with pytest.raises(UserError, match="make venv-vllm"):
        run.prepare(load_recipe(CLUSTER), CLUSTER, (), Stack(stack.python, tmp_path, None), resume=False)
