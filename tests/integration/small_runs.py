"""Whole runs of a very small policy: their recipes, what they write, how one resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT
from toy_policies import weights_of

from nemo_grpo.engine.checks import check
from nemo_grpo.engine.loop import train
from nemo_grpo.engine.setup import Run, set_up
from nemo_grpo.engine.steps import method_of
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import write_problems

QUICKSTART = ROOT / "recipes/quickstart.yaml"
TINY = [
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=4",
    "grpo.val_period=2",
    "policy.train_micro_batch_size=8",
    "policy.generation.max_new_tokens=28",
    "checkpointing.save_period=2",
    "logger.tensorboard_enabled=false",
    "nemo_grpo.rewards={format: 1.0, accuracy: 1.0}",
    "grpo.max_val_samples=4",
    "grpo.val_num_generations_per_prompt=2",
]
NO_VALIDATION = ["grpo.val_period=0"]
AT_THE_ENDS = [*NO_VALIDATION, "grpo.val_at_start=true", "grpo.val_at_end=true"]
DP2 = ["cluster.gpus_per_node=2"]
TP2_PP2 = [
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
    "cluster.gpus_per_node=4",
]


def arguments(folder: Path, name: str, *overrides: str) -> list[str]:
    """Overrides of a tiny run in ``folder/name``."""
    return [*TINY, f"nemo_grpo.runs_dir={folder}", f"nemo_grpo.run_name={name}", *overrides]


def begin(recipe: Recipe, *, resume: bool = False) -> Run:
    """Check a recipe and set its run up, as `run_recipe` does."""
    start = check(recipe, resume=resume)
    return set_up(recipe, Path(recipe.policy.model_name or ""), start, resume=resume)


def one_step(run: Run) -> dict[str, Any]:
    """Take a step without recording it; returns its row."""
    sample, learn = method_of(run.recipe)
    return learn(run.learner, sample(run.rollouts, run.learner), run.recorder.diagnostics)


def math_files(folder: Path, problems: list[Problem], held_out: list[Problem], more: str = "") -> str:
    """The override by which a run trains on these problems, from files in the folder."""
    for name, part in (("train", problems), ("held-out", held_out)):
        write_problems(folder / f"{name}.jsonl", part)
    files = f"train_files: [{folder}/train.jsonl], validation_files: [{folder}/held-out.jsonl]"
    return f"nemo_grpo.task={{_override_: true, name: math, {files}{more}}}"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows(run: Path) -> list[dict[str, Any]]:
    """What the run's metrics.jsonl holds."""
    return lines_of(run / "metrics.jsonl")


def without_time(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in rows(run)]


def weights_after(
    overrides: list[str], resume: bool = False, recipe: Path = QUICKSTART
) -> dict[str, torch.Tensor]:
    """The weights after a run in this process."""
    parts = begin(load_recipe(recipe, overrides), resume=resume)
    train(parts)
    return weights_of(parts.learner.policy)


def assert_same_rows(one: Path, other: Path, *keys: str) -> None:
    """These metrics of all updates, as the order of sums allows."""
    for have, want in zip(rows(other)[1:], rows(one)[1:], strict=True):
        for key in keys:
            assert have[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key


def has_trained(run: Path, num_lines: int) -> bool:
    """Whether its metrics have so many lines."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= num_lines
