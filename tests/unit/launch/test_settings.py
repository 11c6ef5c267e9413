import pytest
from unit.launch.shell import ROOT, bash

from nemo_grpo.launch.preflight import shell_settings
from nemo_grpo.recipe import load_recipe

RECIPE = ROOT / "recipes/quickstart.yaml"


def sourced(settings, name):
    return bash(f'{settings}printf %s "${name}"').stdout


def test_settings_survive_a_shell_whatever_the_names(tmp_path):
    recipe = load_recipe(RECIPE, ["nemo_grpo.run_name=r", f"nemo_grpo.runs_dir={tmp_path}/it's $(a) run"])
    settings = shell_settings(recipe)
    assert sourced(settings, "RUN_DIR") == f"{tmp_path}/it's $(a) run/r"
    assert sourced(settings, "CHECKPOINT_DIR") == f"{tmp_path}/it's $(a) run/r/checkpoints"
    assert sourced(settings, "GPUS_PER_NODE") == "1"
    assert sourced(settings, "TARGET") == "embedded"


@pytest.mark.parametrize("name", ["Qwen/not-on-this-machine", "no such/model name"])
def test_model_that_is_not_here_keeps_its_name(name, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    overrides = [f"policy.model_name={name}", "nemo_grpo.warm_start=null"]
    assert sourced(shell_settings(load_recipe(RECIPE, overrides)), "MODEL") == name
