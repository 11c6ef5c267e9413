"""A whole cluster run on this machine: what is prepared, and how its end is told. No Ray, no NeMo-RL."""

import json
import logging
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks import cluster_run as run
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.rehearsal import stages
from nemo_grpo.rehearsal.environment import Stack
from nemo_grpo.support.dotted import leaves
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[3] / "recipes"
CLUSTER = RECIPES / "cluster-quickstart.yaml"
Driver = Callable[[str], tuple[int, Recipe]]


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
    fusions = ("apply_rope_fusion", "moe_permute_fusion", "bias_activation_fusion")
    assert changed == {
        "policy.model_name",
        "policy.tokenizer.name",
        "logger.monitor_gpus",
        *(f"policy.megatron_cfg.{name}" for name in fusions),
        "policy.megatron_cfg.optimizer.use_precision_aware_optimizer",
        "policy.generation.vllm_cfg.gpu_memory_utilization",
        "policy.generation.vllm_cfg.enforce_eager",
        *(key for key in before | after if key.startswith("policy.generation.vllm_kwargs")),
    }
    assert after["policy.generation.vllm_kwargs.max_num_seqs"] == 128  # all rollouts of a step
    assert after["policy.generation.vllm_kwargs.max_num_batched_tokens"] >= 256
    assert Path(after["policy.model_name"]).is_absolute()
    assert after["grpo.seed"] == 2


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
    with pytest.raises(UserError, match="--policy-of needs a recipe with a warm start"):
        run.write_policy(load_recipe(CLUSTER), tmp_path / "other")


def test_policy_is_the_warm_start_rounded_to_bf16(tmp_path, monkeypatch):
    source = tmp_path / "warm-start"
    tiny = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                       num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    exact = Qwen2ForCausalLM(tiny)
    exact.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("nemo_grpo.engine.warm_start.starting_policy", lambda *_: source)
    run.write_policy(load_recipe(RECIPES / "quickstart.yaml"), tmp_path / "policy")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto")
    assert made.dtype == torch.bfloat16
    for name, value in exact.state_dict().items():
        assert torch.equal(made.state_dict()[name], value.bfloat16()), name
    assert (tmp_path / "policy" / "tokenizer.json").read_text() == "{}"


@pytest.fixture
def driver(monkeypatch, stack, overrides):
    """Run `train` with a program in the driver's place; ``FOLDER`` in it is the run's folder."""

    @contextmanager
    def no_ray(_stack, folder, num_gpus):
        assert num_gpus == 1
        yield SimpleNamespace(environment={"PATH": ""}, sessions=(), end=None)

    monkeypatch.setattr(run, "ray_cluster", no_ray)

    def start(program):
        folder = run.prepare(load_recipe(CLUSTER, overrides), CLUSTER, overrides, stack, resume=False)
        recipe = load_recipe(folder / "recipe.yaml", ["grpo.max_num_steps=2", "checkpointing.save_period=10"])
        script = folder / "driver"
        script.write_text(f"#!{sys.executable}\nFOLDER = {str(folder)!r}\n{program}\n")
        script.chmod(0o755)
        return run.train(recipe, Stack(script, folder, None), folder), recipe

    return start


def test_driver_that_finishes_shows_its_steps(driver, caplog):
    rows = [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "loss/total": 0.1, "reward/mean": 0.5},
        {"step": 2, "loss/total": 0.1, "reward/mean": 0.625},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with caplog.at_level(logging.INFO):
        code, recipe = driver(f"open(FOLDER + '/metrics.jsonl', 'w').write({text!r})")
    assert code == 0
    assert run.standing(recipe) == "reward 0.625, validation 0.250"
    assert "NeMo-RL 2/2" in caplog.text


def test_refusal_stop_and_failure_are_told_apart(driver):
    with pytest.raises(UserError, match=r"(?s)refuses the recipe.*grpo\.seed is odd"):
        driver("print('error: grpo.seed is odd', flush=True); exit(2)")
    assert driver("exit(75)")[0] == 75
    with pytest.raises(stages.Failed, match="stopped before"):
        driver("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)")
    with pytest.raises(stages.Failed, match=r"(?s)exit code 3.*no more memory"):
        driver("print('no more memory', flush=True); exit(3)")
