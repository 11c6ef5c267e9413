"""Recorded rehearsals (`record.py`), each in a folder of its own for a test to plant a defect in."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal.overrides import Ranks
from nemo_grpo.rehearsal.tiny_data import Problems

Rehearsal = Any
Weights = dict[str, torch.Tensor]

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).parent / "recorded"
FOLDER, SKELETON = "/FOLDER", "recording.json"
ONE = "cluster.gpus_per_node=1"
RECORDINGS = {
    "erpo": (
        *("erpo/erpo-qwen2.5-7b-1n8g.yaml", ONE, "policy.megatron_cfg.peft.enabled=false"),
        "policy.generation.temperature=0.7",
    ),
    "sft_lora": (
        *("erpo/sft-qwen2.5-1.5b-1n8g.yaml", ONE, "policy.megatron_cfg.peft.enabled=true"),
        *("policy.megatron_cfg.peft.dim=4", "policy.megatron_cfg.peft.alpha=8"),
    ),
}
"""Name -> recipe and overrides. A temperature other than 1, so that another one is seen."""


def recorded(name, folder):
    """A `Rehearsal` whose files are a copy in ``folder``."""
    shutil.copytree(RECORDED / name, folder, dirs_exist_ok=True)
    for path in [folder / "recipe.yaml", *folder.rglob("*.jsonl"), *folder.rglob("*.json")]:
        path.write_text(path.read_text().replace(FOLDER, str(folder)))
    recipe, *overrides = RECORDINGS[name]
    small = load_recipe(folder / "recipe.yaml")
    whole = load_recipe(ROOT / "recipes" / recipe, overrides)
    return SimpleNamespace(
        small=small,
        recipe=whole,
        toy_recipe=whole,
        folder=folder,
        problems=Problems(small.nemo_grpo.task, small.nemo_grpo.prompt, "recorded", True),
        layout=Ranks(1, 1, 1, 1, 1),
        model=SimpleNamespace(folder=folder / "model"),
        stack=SimpleNamespace(vllm_python=None, sees_images=False),
        seconds={},
        **json.loads((folder / SKELETON).read_text()),
    )


# ---------------------------------------------------------------------- what a defect leaves behind


def metrics(rehearsal, **changes):
    """Change logged numbers; ``name__part`` stands for ``name/part``."""
    path = rehearsal.small.run_dir / "metrics.jsonl"
    functions = {name.replace("__", "/"): change for name, change in changes.items()}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert functions.keys() <= {name for row in rows for name in row}, "the defect is in the recording"
    changed = [
        {name: functions.get(name, float)(value) if name != "step" else value for name, value in row.items()}
        for row in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))


def responses(rehearsal, change, steps=(1, 2, 3)):
    for path in files_of(rehearsal, steps):
        rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def files_of(rehearsal, steps):
    logs = Path(str(rehearsal.small.logger.log_dir))
    (found,) = zip(*(logs.glob(f"exp_*/train_data_step{step}.jsonl") for step in steps), strict=True)
    return list(found)


def export(rehearsal, change):
    path = rehearsal.folder / "hf-of-stop" / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def swapped(first, second):
    def swap(weights):
        names = {first: second, second: first}
        parts = {name: name.split(".") for name in weights}
        renamed = {name: ".".join(names.get(part, part) for part in each) for name, each in parts.items()}
        assert renamed != {name: name for name in weights}
        return {renamed[name]: weight for name, weight in weights.items()}

    return swap


def drop_merge(rehearsal):
    shutil.copy(rehearsal.folder / "model" / "model.safetensors", rehearsal.folder / "hf-of-stop")


def without_responses(rehearsal):
    for path in files_of(rehearsal, (1, 2, 3)):
        path.unlink()


def reward_of_zero(row):
    return {**row, "rewards": [0.0]}


def zero(_):
    return 0.0
