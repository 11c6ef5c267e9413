"""Recorded rehearsals (`record.py`), each in a folder of its own for a test to plant a defect in."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

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
