"""What makes a stage pass or fail, on the metrics of runs that went well and of runs that did not.

Metrics alone; `test_planted.py` has recorded runs with their responses and weights.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal import checks
from nemo_grpo.rehearsal.checks import Stage
from nemo_grpo.rehearsal.overrides import Ranks
from nemo_grpo.rehearsal.run_output import Recorded
from nemo_grpo.rehearsal.stages import Failed
from nemo_grpo.rehearsal.tiny_data import problems_of

RECIPE = Path(__file__).parents[3] / "recipes" / "cw_grpo" / "cw_grpo-r1-distill-qwen-1.5b-1n8g.yaml"
HEALTHY = {
    "loss/total": 0.01,
    "grad_norm": 0.2,
    "reward/mean": 0.5,
    "groups/valid_fraction": 0.75,
    "mismatch/kl": 2e-5,
    "train/token_mult_prob_error": 1.002,
    "length/mean": 8.0,
    "train/truncation_rate": 0.0,
}


@pytest.fixture
def run(tmp_path):
    """Evidence of a run whose steps had these metrics; each step may differ from `HEALTHY`."""

    def make(*steps, overrides=()):
        settings = [f"nemo_grpo.runs_dir={tmp_path}", f"logger.log_dir={tmp_path}/logs", *overrides]
        recipe = load_recipe(RECIPE, settings)
        recipe.run_dir.mkdir(parents=True, exist_ok=True)
        rows = [{"step": n, **HEALTHY, **step} for n, step in enumerate(steps, 1)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (recipe.run_dir / "metrics.jsonl").write_text(text + '{"step": 3, "valid')  # killed while writing
        rehearsal = SimpleNamespace(
            small=recipe,
            recipe=recipe,
            toy_recipe=recipe,
            folder=tmp_path,
            problems=problems_of(recipe, tmp_path / "problems"),
            layout=Ranks(1, 1, 1, 1, 1),
            model=SimpleNamespace(folder=tmp_path / "model"),
            stack=SimpleNamespace(vllm_python=None, sees_images=False),
            stopped_after=2,
        )
        return Recorded(rehearsal)

    return make


def test_a_supervised_run_is_judged_by_its_own_stages(run):
    changes = (
        *("loss_fn={_override_: true, variant: sft}", "grpo.num_generations_per_prompt=1"),
        *("grpo.num_prompts_per_step=16", "checkpointing.metric_name=val:val_loss"),
    )
    found = run(*[{"grad_norm": 0.0}] * 50, overrides=changes)
    assert checks.stages(found.rehearsal, "it crashed") == [
        Stage("setup", True, "1 policy worker(s), one rank; NeMo-RL's supervised training"),
        Stage("update", False, "it crashed"),
    ]
    assert checks.stop_and_resume(found).startswith("SIGUSR1 in step 2")


UNHEALTHY = {
    "stale weights": (checks.refit, {"mismatch/kl": 0.0027}, "the bound is 0.001"),
    "no tokens": (checks.refit, {"length/mean": 0.0, "mismatch/kl": 0.0}, "nothing is compared"),
    "weights that are no numbers": (checks.refit, {"mismatch/kl": float("nan")}, "the bound is 0.001"),
    "a loss that is no number": (checks.update, {"loss/total": float("nan")}, "loss 0.0100, nan"),
}


@pytest.mark.parametrize(("check", "step", "reason"), UNHEALTHY.values(), ids=UNHEALTHY)
def test_one_bad_step_is_enough(run, check, step, reason):
    with pytest.raises(Failed, match=reason):
        check(run({}, step, {}))


NEVER = {
    "no signal": (checks.update, {"groups/valid_fraction": 0.0}, "nothing is learnt"),
    "no update": (checks.update, {"grad_norm": 0.0}, "no step moved the weights"),
}


@pytest.mark.parametrize(("check", "step", "reason"), NEVER.values(), ids=NEVER)
def test_what_never_happens_fails_and_once_is_enough(run, check, step, reason):
    with pytest.raises(Failed, match=reason):
        check(run(step, step, step))
    assert check(run(step, {}, step))


def test_a_step_that_is_missing_after_the_resume_is_seen(run):
    with pytest.raises(Failed, match=r"steps \[1, 2\] are logged"):
        checks.stop_and_resume(run({}, {}))
    assert checks.stop_and_resume(run({}, {}, {})).endswith("exit 0")


def test_driver_failure_is_reported_at_the_first_incomplete_stage(run):
    found = run({"groups/valid_fraction": 0.0}).rehearsal
    stages = checks.stages(found, "exit code 1 where 75 was expected")
    assert [stage.ok for stage in stages] == [True, True, False]
    assert stages[-1] == Stage("rollout", False, "exit code 1 where 75 was expected")


def test_responses_are_scored_as_the_recipe_weights_them(run, tmp_path):
    (tmp_path / "own.py").write_text("def short(response):\n    return float(len(response) < 5)\n")
    found = run(
        {}, overrides=(f"nemo_grpo.rewards={{accuracy: 1.0, format: 1.0, {tmp_path}/own.py:short: 0.5}}",)
    )
    problem = found.rehearsal.problems.task.build().train_problem(0, found.recipe.grpo.seed)
    right = f"so</think><answer>\\boxed{{{problem.answer}}}</answer>"
    folder = tmp_path / "logs" / "exp_001"
    folder.mkdir(parents=True)
    lines = [
        {"content": [[f"user: {problem.question}", text]], "rewards": [2.0 if text == right else 0.0]}
        for text in (right, "no", "no", right)
    ]
    (folder / "train_data_step1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = f"{tmp_path}/own.py:short"
    assert checks.reward_components(found) == {"accuracy": 0.5, "format": 0.5, own: 0.5}
    assert f"reward 2 (accuracy 1.00, format 1.00, cosine 1.00, {own} 0.00)" in checks.sample(found)
