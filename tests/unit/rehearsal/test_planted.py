"""Defects planted in recorded rehearsals (`record.py`): the stage that is about them must fail.

Recorded from real runs of NeMo-RL: metrics, responses, the model, the export. Megatron-Bridge's export, equal
to ours bit for bit in the recorded run, is a copy of ours.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from recordings import RECORDINGS, recorded
from safetensors.torch import load_file, save_file

from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.megatron_sections import Switch
from nemo_grpo.rehearsal import checks, reward_checks
from nemo_grpo.rehearsal.checks import Stage
from nemo_grpo.rehearsal.run_output import Recorded
from nemo_grpo.variants.nemo_rl_loss import NeMoRLLoss


@pytest.fixture
def rehearsal_of(tmp_path, monkeypatch):
    """A copy of a recording, killed while it wrote metrics; its export is the recorded one."""
    monkeypatch.setattr(checks, "convert", lambda r, _checkpoint: r.folder / "hf-of-stop")
    monkeypatch.setattr(checks, "bridges_export", lambda r, _checkpoint: r.folder / "hf-of-bridge")

    def make(name):
        made = recorded(name, tmp_path / name)
        shutil.copytree(made.folder / "hf-of-stop", made.folder / "hf-of-bridge")
        with (made.small.run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "valid')
        return made

    return make


def failing(rehearsal):
    return {stage.name: stage.proof for stage in checks.stages(rehearsal) if not stage.ok}


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_pass_every_stage(rehearsal_of, name):
    rehearsal = rehearsal_of(name)
    stages = checks.stages(rehearsal)
    assert [stage for stage in stages if not stage.ok] == []
    learns = rehearsal.recipe.loss_fn.learns_from_demonstrations
    assert tuple(stage.name for stage in stages) == (checks.SUPERVISED if learns else tuple(checks.CHECKS))


def rewrite(path, change):
    """Change the rows of a file of JSON lines; None leaves one out."""
    lines = path.read_text().rpartition("\n")[0].splitlines()
    rows = (change(json.loads(line)) for line in lines)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))


def metrics(rehearsal, steps=(), **values):
    """Change logged numbers, of all steps unless some are named; ``name__part`` stands for ``name/part``."""
    values = {name.replace("__", "/"): value for name, value in values.items()}
    seen = set()

    def change(row):
        if steps and row["step"] not in steps:
            return row
        found = values.keys() & row.keys()
        seen.update(found)
        return row | {
            name: values[name](row[name]) if callable(values[name]) else values[name] for name in found
        }

    rewrite(rehearsal.small.run_dir / "metrics.jsonl", change)
    assert seen == values.keys(), "the defect is in the recording"


def files_of(rehearsal, *steps):
    logs = Path(str(rehearsal.small.logger.log_dir))
    return [next(logs.glob(f"exp_*/train_data_step{step}.jsonl")) for step in steps]


def responses(rehearsal, change, *steps):
    for path in files_of(rehearsal, *steps or (1, 2, 3)):
        rewrite(path, change)


def export(rehearsal, first, second):
    names = {first: second, second: first}
    path = rehearsal.folder / "hf-of-stop" / "model.safetensors"
    weights = load_file(path)
    swapped = {".".join(names.get(part, part) for part in name.split(".")): name for name in weights}
    assert swapped != {name: name for name in weights}
    save_file({name: weights[old] for name, old in swapped.items()}, path, {"format": "pt"})


def drop_merge(rehearsal):
    shutil.copy(rehearsal.folder / "model" / "model.safetensors", rehearsal.folder / "hf-of-stop")


def without_responses(rehearsal):
    for path in files_of(rehearsal, 1, 2, 3):
        path.unlink()


def step_trained_twice(rehearsal):
    path = rehearsal.small.run_dir / "metrics.jsonl"
    rows = [line for line in path.read_text().splitlines() if '"loss/total"' in line]
    path.write_text(f"{rows[1]}\n{path.read_text()}")


def no_side_files(rehearsal):
    for path in rehearsal.small.checkpoint_dir.glob("step_*/policy/tokenizer/config.json"):
        path.unlink()


def one_token_less(row):
    mask = list(row["token_loss_mask"][0])
    mask[mask.index(1)] = 0
    return {**row, "token_loss_mask": [mask]}


NAN = float("nan")
ROLLOUTS = {
    "stale weights": (partial(metrics, steps=[2], mismatch__kl=lambda e: e + 0.003), {"refit"}),
    "an error that is no number": (partial(metrics, steps=[2], mismatch__kl=NAN), {"refit"}),
    "nothing compared": (partial(metrics, steps=[2], length__mean=0, mismatch__kl=0), {"refit", "rollout"}),
    "a response that is lost": (
        lambda r: files_of(r, 2)[0].write_text(files_of(r, 2)[0].read_text().partition("\n")[2]),
        {"rollout"},
    ),
    "responses without a token": (
        lambda r: responses(r, lambda row: row | {"token_loss_mask": [[0] * row["input_lengths"][0]]}, 2),
        {"rollout"},
    ),
    "a token that is lost": (lambda r: responses(r, one_token_less, 3), {"rollout"}),
    "reward always 0": (lambda r: responses(r, lambda row: row | {"rewards": [0.0]}), {"reward"}),
    "no group with signal": (partial(metrics, groups__valid_fraction=0), {"update"}),
    "one group with signal": (partial(metrics, steps=[1, 3], groups__valid_fraction=0), set()),
    "weights that do not move": (partial(metrics, grad_norm=0, train__probs_ratio_max=1), {"update"}),
    "weights that move once": (partial(metrics, steps=[1, 3], grad_norm=0, train__probs_ratio_max=1), set()),
    "a loss that is no number": (partial(metrics, steps=[2], loss__total=NAN), {"update"}),
    "another accuracy": (partial(metrics, validation__accuracy=lambda x: x + 0.25), {"validation"}),
    "no config.json": (no_side_files, {"checkpoint"}),
    "the last step's checkpoint lost": (
        lambda r: shutil.rmtree(r.small.checkpoint_dir / "step_3"),
        {"checkpoint"},
    ),
    "a step trained twice": (step_trained_twice, {"stop and resume"}),
    "no step after the resume": (
        lambda r: rewrite(r.small.run_dir / "metrics.jsonl", lambda row: row if row["step"] < 3 else None),
        {"validation", "checkpoint", "stop and resume"},
    ),
    "gate and up swapped": (lambda r: export(r, "gate_proj", "up_proj"), {"export"}),
    "keys and values swapped": (lambda r: export(r, "k_proj", "v_proj"), {"export"}),
    "the untrained model exported": (drop_merge, {"export"}),
    "no responses recorded": (without_responses, {"rollout", "reward"}),
}
DEMONSTRATIONS = {
    "merge dropped": (drop_merge, {"export"}),
    "a loss that is no number": (partial(metrics, loss__total=NAN), {"update"}),
    "a validation loss that is no number": (partial(metrics, validation__val_loss=NAN), {"validation"}),
}


@pytest.mark.parametrize(("plant", "stages"), ROLLOUTS.values(), ids=ROLLOUTS)
def test_defect_of_a_run_with_rollouts_is_caught(rehearsal_of, plant, stages):
    rehearsal = rehearsal_of("erpo")
    plant(rehearsal)
    assert set(failing(rehearsal)) == stages


@pytest.mark.parametrize(("plant", "stages"), DEMONSTRATIONS.values(), ids=DEMONSTRATIONS)
def test_defect_of_a_run_on_demonstrations_is_caught(rehearsal_of, plant, stages):
    rehearsal = rehearsal_of("sft_lora")
    plant(rehearsal)
    assert set(failing(rehearsal)) == stages


def test_a_drivers_failure_is_reported_at_the_first_incomplete_stage(rehearsal_of):
    supervised, sampled = rehearsal_of("sft_lora"), rehearsal_of("erpo")
    metrics(supervised, grad_norm=0)
    without_responses(sampled)
    for rehearsal, complete, at in ((supervised, 1, "update"), (sampled, 2, "rollout")):
        *found, last = checks.stages(rehearsal, "it crashed")
        assert [stage.ok for stage in found] == [True] * complete
        assert last == Stage(at, False, "it crashed")


def test_responses_are_scored_as_the_recipe_weights_them(rehearsal_of, tmp_path):
    (tmp_path / "own.py").write_text("def short(response):\n    return float(len(response) < 5)\n")
    own, rehearsal = f"{tmp_path}/own.py:short", rehearsal_of("erpo")
    rewards = f"nemo_grpo.rewards={{_override_: true, accuracy: 1.0, format: 1.0, {own}: 0.5}}"
    rehearsal.toy_recipe = rehearsal.small = load_recipe(rehearsal.folder / "recipe.yaml", [rewards])
    found = Recorded(rehearsal)
    problem = found.task.learnt_problems[0]
    right = f"so</think><answer>\\boxed{{{problem.answer}}}</answer>"
    for step, path in enumerate(files_of(rehearsal, 1, 2, 3), 1):
        texts = (right, "no", "no", right) if step == 1 else ()
        rows = ({"content": [[problem.question, text]], "rewards": [2.0 * (text == right)]} for text in texts)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert reward_checks.reward_components(found) == {"accuracy": 0.5, "format": 0.5, own: 0.5}
    assert f"reward 2 (accuracy 1.00, format 1.00, cosine 1.00, {own} 0.00)" in reward_checks.sample(found)


def test_responses_through_the_data_plane_are_read_from_their_tokens(rehearsal_of):
    """NeMo-RL's trainer records the text of an array where the other one records turns."""
    rehearsal = rehearsal_of("erpo")
    expected = reward_checks.rewards(Recorded(rehearsal))
    responses(rehearsal, lambda row: row | {"content": [str(row["content"])]})
    assert "reward" in failing(rehearsal)
    rehearsal.small = rehearsal.small.model_copy(update={"data_plane": Switch(enabled=True)})
    assert reward_checks.rewards(Recorded(rehearsal)) == expected


def test_evidence_that_cannot_be_read_is_a_failure(rehearsal_of):
    rehearsal = rehearsal_of("erpo")
    files_of(rehearsal, 2)[0].write_text("no json\n")
    assert "cannot be read" in failing(rehearsal)["reward"]


def with_grpo(rehearsal, **settings):
    """Change the small recipe's ``grpo`` section."""
    grpo = rehearsal.small.grpo.model_copy(update=settings)
    rehearsal.small = rehearsal.small.model_copy(update={"grpo": grpo})


def test_dynamic_sampling_compares_the_tokens_that_the_loss_counted(rehearsal_of):
    """The logged mean length is of everything that was drawn; the record holds what was kept."""
    rehearsal = rehearsal_of("erpo")
    metrics(rehearsal, length__mean=lambda mean: mean + 0.02)
    assert set(failing(rehearsal)) == {"rollout"}
    with_grpo(rehearsal, use_dynamic_sampling=True)
    assert failing(rehearsal) == {}
    metrics(rehearsal, steps=[2], train__global_valid_toks=lambda count: count + 1)
    assert "in step 2" in failing(rehearsal)["rollout"]


@pytest.mark.parametrize(
    ("counted", "differs"), [(50.5, False), (50, False), (51.5, True), (49, True), (NAN, True)]
)
def test_tokens_of_two_updates_bound_the_logged_mean(counted, differs):
    rows = [{"token_loss_mask": [[0, *[1] * n]], "sample_loss_mask": [1.0]} for n in (20, 30, 31, 20)]
    masked = {"token_loss_mask": [[1] * 9], "sample_loss_mask": [0.0]}
    logged = {"train/global_valid_toks": counted}
    for recorded_rows in (rows, [*rows[:2], masked, *rows[2:], masked]):
        assert bool(checks._other_tokens(recorded_rows, logged, num_updates=2)) == differs


def test_rewards_are_scaled_as_nemo_rl_scales_them(rehearsal_of):
    """Clamped to 0 to 1, then mapped to -1 to 1, as in NeMo-RL's DAPO recipe."""
    rehearsal = rehearsal_of("erpo")
    responses(rehearsal, lambda row: row | {"rewards": [2 * min(max(row["rewards"][0], 0), 1) - 1]})
    assert set(failing(rehearsal)) == {"reward"}
    with_grpo(rehearsal, reward_scaling={"enabled": True, "target_min": -1.0})
    assert failing(rehearsal) == {}


def test_signal_of_nemo_rls_own_loss_is_read_from_the_record(rehearsal_of):
    """Its asynchronous trainer logs no share of groups with signal."""
    rehearsal = rehearsal_of("erpo")
    rehearsal.small = rehearsal.small.model_copy(update={"loss_fn": NeMoRLLoss()})
    numbers = iter(range(48))
    none, some = {"advantages": [[0.0, 0.0]]}, {"advantages": [[0.0, 0.5]]}
    responses(rehearsal, lambda row: row | (some if next(numbers) % 16 > 3 else none))
    assert "groups with signal 75%, 75%, 75%" in checks.update(Recorded(rehearsal))
    responses(rehearsal, lambda row: row | none)
    assert "so nothing is learnt" in failing(rehearsal)["update"]
