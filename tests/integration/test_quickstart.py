"""The quickstart learns what README says: held-out accuracy over three seeds."""

from statistics import fmean

import pytest
from small_runs import QUICKSTART, rows

from nemo_grpo.engine.loop import train
from nemo_grpo.engine.run import begin
from nemo_grpo.recipe import load_recipe


@pytest.mark.slow
def test_held_out_accuracy_over_three_seeds(tmp_path, cache):
    found = []
    for seed in range(3):
        places = [f"nemo_grpo.runs_dir={tmp_path}", f"nemo_grpo.warm_start.cache_dir={cache}"]
        train(begin(load_recipe(QUICKSTART, [*places, f"nemo_grpo.run_name=s{seed}", f"grpo.seed={seed}"])))
        accuracies = [row.get("validation/accuracy") for row in rows(tmp_path / f"s{seed}")]
        found.append((accuracies[0], accuracies[-1]))
    before, after = map(fmean, zip(*found, strict=True))
    assert before < 0.45
    assert after >= 0.65
