"""metrics.jsonl and recipe.resolved.yaml of a run on NeMo-RL, of which the logger alone is needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.nemorl.loggers import Logger

from nemo_grpo.diagnostics.runs import read_run
from nemo_grpo.errors import UserError
from nemo_grpo.nemorl.callbacks import alone, name_of, record_run
from nemo_grpo.recipe import Recipe, load_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "cluster-quickstart.yaml"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(RECIPE, [f"nemo_grpo.runs_dir={tmp_path}", "grpo.seed=3"])


def rows(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_get_the_embedded_engines_names_where_it_has_them() -> None:
    assert name_of("train", "reward") == "reward/mean"
    assert name_of("train", "gen_kl_error") == "mismatch/kl"
    assert name_of("timing/train", "total_step_time") == "time/step"
    assert name_of("validation", "accuracy") == "validation/accuracy"
    assert name_of("train", "covariance/p1") == "covariance/p1"  # from the variant's estimator
    assert name_of("train", "approx_entropy") == "train/approx_entropy"  # not the embedded entropy/mean
    assert name_of("", "x") == "x"


def test_every_call_is_a_row_and_still_reaches_nemo_rl(recipe: Recipe) -> None:
    logger = Logger()
    with record_run(recipe, logger):
        logger.log_metrics({"accuracy": 0.25}, 0, prefix="validation")
        logger.log_metrics(
            {"reward": torch.tensor(0.5), "texts": ["a"], "lr": 1}, 1, "train", step_metric="s"
        )
    assert rows(recipe) == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "lr": 1.0},
    ]
    assert logger.calls[0] == ({"accuracy": 0.25}, 0, "validation", {})
    assert logger.calls[1][1:] == (1, "train", {"step_metric": "s"})
    assert logger.calls[1][0]["texts"] == ["a"]


def test_recording_ends_with_the_block_and_a_resumed_run_appends(recipe: Recipe) -> None:
    logger = Logger()
    for step in (1, 2):
        with record_run(recipe, logger):
            logger.log_metrics({"loss": 0.5}, step, "train")
        logger.log_metrics({"loss": 9.0}, step, "train")
    assert rows(recipe) == [{"step": 1, "loss/total": 0.5}, {"step": 2, "loss/total": 0.5}]
    assert len(logger.calls) == 4


def test_the_folder_reads_back_as_a_run_of_nemo_rl(recipe: Recipe) -> None:
    logger = Logger()
    with record_run(recipe, logger):
        logger.log_metrics({"reward": 0.5}, 1, "train")
        logger.log_metrics({"accuracy": 0.75}, 1, "validation")
    run = read_run(recipe.run_dir)
    assert (run.engine, run.variant, run.seed) == ("NeMo-RL", "grpo", "3")
    assert run.points("reward/mean") == {1: 0.5}
    assert run.points("validation/accuracy") == {1: 0.75}


HOLDER = """
import sys
from nemo_grpo.nemorl.callbacks import alone
from nemo_grpo.recipe import load_recipe

with alone(load_recipe(sys.argv[1], sys.argv[2:])):
    print("alone", flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_until_the_run_that_uses_it_is_dead(tmp_path: Path) -> None:
    shared = [f"checkpointing.checkpoint_dir={tmp_path}/shared", f"nemo_grpo.runs_dir={tmp_path}"]
    other = load_recipe(RECIPE, [*shared, "nemo_grpo.run_name=two"])
    command = [sys.executable, "-c", HOLDER, str(RECIPE), *shared]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "alone\n"
        with pytest.raises(UserError, match="shared is in use by another run"), alone(other):
            pass
        first.kill()
    with alone(other), alone(other):
        assert (tmp_path / "shared" / ".lock").exists()
