"""Where NeMo-RL's own worker looks for a conversion, and what it does with one that was killed."""

import json
import os
import subprocess
import sys

import pytest

from nemo_grpo.nemorl.workarounds import killed_conversion
from nemo_grpo.nemorl.workarounds.killed_conversion import ITERATION, LAST_FILE, conversions, remove_remains

ASK = """
import json, sys
import newer_python, megatron_without_gpu
megatron_without_gpu.install()
from nemo_rl.models.megatron.setup import validate_model_paths
print(json.dumps([validate_model_paths(policy)[1:] for policy in json.loads(sys.argv[1])]))
"""


def nemo_rl_finds(policies):
    """(folder, is a conversion there) of each, by NeMo-RL's function in a process of its own."""
    paths = os.pathsep.join(path for path in sys.path if path)
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, json.dumps(policies)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(found) for found in json.loads(asked.stdout.splitlines()[-1])]


@pytest.mark.parametrize("variable", ["NRL_MEGATRON_CHECKPOINT_DIR", "HF_HOME"])
def test_nemo_rl_takes_remains_for_a_conversion(variable, tmp_path, monkeypatch):
    for name in ("NRL_MEGATRON_CHECKPOINT_DIR", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "kept"))
    local = tmp_path / "models" / "tiny"
    local.mkdir(parents=True)
    named, at_home = ({"model_name": name, "megatron_cfg": {}} for name in ("org/model", str(local)))
    policies = [named, at_home, named | {"hf_config_overrides": {"rope_scaling": {"factor": 2}}}]
    folders = [os.path.join(folder, ITERATION) for folder, _ in nemo_rl_finds(policies)]
    for folder in folders:
        os.makedirs(folder)
    assert [exists for _, exists in nemo_rl_finds(policies)] == [True] * 3
    for policy, folder in zip(policies, folders, strict=True):
        assert folder in map(str, conversions(policy))
    with open(os.path.join(folders[1], LAST_FILE), "w") as file:
        file.write("{}")
    monkeypatch.setattr(killed_conversion, "STILL_S", 0.0)
    for policy in policies:
        remove_remains(policy)
    assert [exists for _, exists in nemo_rl_finds(policies)] == [False, True, False]
