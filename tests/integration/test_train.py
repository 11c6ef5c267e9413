"""Whole runs of the embedded engine on a very small policy: what they compute and leave behind."""

import json
import random
import re
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from small_runs import NO_VALIDATION, QUICKSTART, arguments, begin, lines_of, math_files, rows, weights_after
from toy_policies import assert_equal, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from checkpoints_conv.megatron_to_hf import megatron_to_hf
from nemo_grpo import VARIANTS, UserError
from nemo_grpo.cli import app
from nemo_grpo.engine import rollout, steps
from nemo_grpo.engine.learning import TrainingState
from nemo_grpo.engine.loop import train
from nemo_grpo.engine.rollout import Rollouts
from nemo_grpo.engine.setup import validation_sampling
from nemo_grpo.engine.steps import reinforce, sample
from nemo_grpo.engine.validation import is_due, validate
from nemo_grpo.evaluate import sampling as evaluate_sampling
from nemo_grpo.recipe import load_recipe
from nemo_grpo.run.groups import Group, Scored
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.tasks import parse_task
from nemo_grpo.tasks.jsonl import write_problems

PROMISED = {
    *("reward/mean", "reward/accuracy", "reward/format", "advantage/std", "groups/valid_fraction"),
    *("length/mean", "entropy/mean", "grad_norm", "lr", "ratio/clip_fraction", "kl/previous"),
    *("covariance/p50", "covariance/p99", "reward/group_std"),
    *("rollout/all_right", "rollout/all_wrong", "rollout/with_signal"),
    *("tokens_per_second", "mismatch/logprob_abs_mean", "mismatch/kl", "time/rollout", "time/update"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The parts of a run that has ended; its folder is not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    line = arguments(folder, "run", "logger.tensorboard_enabled=true")
    parts = begin(load_recipe(QUICKSTART, line))
    assert train(parts)
    return parts


def test_a_run_leaves_behind_what_it_promises(finished):
    run = finished.recorder.folder.path
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    for row in rows(run)[::2]:
        assert {
            "validation/accuracy",
            "validation/greedy",
            "validation/pass@2",
            "validation/reward",
        } <= row.keys()
    last = rows(run)[-1]
    assert last.keys() >= PROMISED
    assert abs(last["mismatch/logprob_abs_mean"]) < 1e-5  # the sampler has the policy's weights
    assert last["ratio/mean"] == pytest.approx(1.0, abs=1e-5)  # one update per rollout is on-policy
    (look,) = lines_of(run / "diagnostics.jsonl")
    assert (look["step"], look["num_tokens"]) == (1, round(rows(run)[1]["length/mean"] * 16))
    assert "torch" in json.loads((run / "versions.json").read_text())
    assert load_recipe(run / "recipe.resolved.yaml") == finished.recipe
    samples = lines_of(run / "samples.jsonl")
    assert {sample["step"] for sample in samples if "validation" not in sample} == {1, 2, 3, 4}
    held_out = [(sample["step"], sample["problem"]) for sample in samples if "validation" in sample]
    validated = [row["step"] for row in rows(run) if "validation/accuracy" in row]
    names = [problem for step, problem in held_out if step == 0]
    assert names
    assert held_out == [(step, name) for step in validated for name in names], "the same at each validation"
    assert (run / "checkpoints/latest").read_text() == "step_000004"
    assert list((run / "tensorboard").glob("events.*"))
    assert not list(run.rglob("tmp_*"))


def test_the_export_is_the_trained_policy_and_generates(finished):
    model = AutoModelForCausalLM.from_pretrained(finished.recorder.folder.hf)
    state = model.state_dict()
    for name, tensor in finished.learner.policy.named_tensors():
        assert torch.equal(state[name], tensor), name
    start = load_file(finished.recorder.saver.source / "model.safetensors")
    assert any(not torch.equal(start[name], state[name]) for name in start)
    tokenizer = AutoTokenizer.from_pretrained(finished.recorder.folder.hf)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_the_best_checkpoint_is_exported_by_its_link(finished, tmp_path):
    """The command in docs/engine.md."""
    best = finished.recorder.folder.path / "checkpoints" / "best"
    step = best.resolve()
    metrics = rows(finished.recorder.folder.path)
    values = {row["step"]: row["validation/accuracy"] for row in metrics if "validation/accuracy" in row}
    saved = [value for number, value in values.items() if number > 0]
    assert values[int(step.name.removeprefix("step_"))] == max(saved)
    command = ["convert", "megatron-to-hf", "--megatron-checkpoint", str(best)]
    command += ["--hf-config", str(best / "policy" / "tokenizer"), "--output", str(tmp_path / "best-hf")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    plain = megatron_to_hf(step, step / "policy" / "tokenizer", tmp_path / "plain")
    assert_equal(*(load_file(path / "model.safetensors") for path in (tmp_path / "best-hf", plain)))
    assert f"| step | {int(step.name[-6:])} |" in (tmp_path / "best-hf" / "README.md").read_text()


def test_an_existing_run_is_refused_and_left_alone(finished):
    before = rows(finished.recorder.folder.path)
    with pytest.raises(UserError, match="exists; add --resume"):
        begin(finished.recipe)
    assert rows(finished.recorder.folder.path) == before


# The second update is off-policy, and the covariances do choose tokens.
TWO_UPDATES = [*NO_VALIDATION, "grpo.max_num_steps=2", "policy.train_global_batch_size=8"]
TWO_UPDATES += ["policy.megatron_cfg.scheduler.lr_warmup_iters=0"]
IN_EFFECT = {"clip_cov": ["loss_fn.covariance_min=0.0", "loss_fn.clip_fraction=0.2"]}


@pytest.fixture(scope="module")
def weights_by_grpo(tmp_path_factory):
    return weights_after(arguments(tmp_path_factory.mktemp("grpo"), "run", *TWO_UPDATES))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_from_the_same_command_in_its_own_way(recipe, variant, weights_by_grpo):
    parts = begin(recipe(f"loss_fn.variant={variant}", *TWO_UPDATES, *IN_EFFECT.get(variant, [])))
    assert train(parts)
    last = rows(parts.recorder.folder.path)[-1]
    assert (last["step"], last["steps/skipped"]) == (2, 0)
    assert last["grad_norm"] > 0
    assert abs(last["kl/previous"]) > 1e-9  # two updates per rollout move away from the scored policy
    weights = dict(parts.learner.policy.named_tensors())
    is_grpo = all(torch.equal(weights[name], tensor) for name, tensor in weights_by_grpo.items())
    assert is_grpo == (variant in ("grpo", "dapo"))  # dapo clips less, and nothing is clipped here


@pytest.mark.parametrize("variant", ["dapo", "gpg"])
def test_dynamic_sampling_draws_until_the_step_has_signal(recipe, monkeypatch, variant):
    r = recipe(f"loss_fn.variant={variant}", "grpo.use_dynamic_sampling=true", "grpo.max_num_steps=2")
    sampled = []
    monkeypatch.setattr(steps, "sample", lambda *given: sampled.append(sample(*given)) or sampled[-1])
    train(begin(r))
    for row, step in zip(rows(r.run_dir)[1:], sampled, strict=True):
        assert row["groups/valid_fraction"] >= (1.0 if variant == "dapo" else 0.6)
        assert row["rollout/num_prompts"] % 4 == 0
        for prefix, groups in (("", step.all_groups), ("kept/", step.groups)):
            responses = [one for group in groups for one in group.responses]
            assert row[f"{prefix}reward/mean"] == pytest.approx(fmean(one.reward for one in responses))
            accuracies = [one.scores["accuracy"] for one in responses]
            assert row[f"{prefix}reward/accuracy"] == pytest.approx(fmean(accuracies))
            lengths = [len(one.response.tokens) for one in responses]
            assert row[f"{prefix}length/mean"] == pytest.approx(fmean(lengths))


@pytest.mark.parametrize(("filtering", "num_drawn"), [(False, 4), (True, 8)])
def test_dynamic_sampling_asks_for_a_response_that_overlong_filtering_leaves(
    recipe, monkeypatch, filtering, num_drawn
):
    parts = begin(
        recipe(
            *("loss_fn.variant=dapo", "grpo.use_dynamic_sampling=true"),
            *("grpo.dynamic_sampling_max_gen_batches=2", f"grpo.overlong_filtering={str(filtering).lower()}"),
        )
    )
    nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.ones(1, dtype=torch.bool)
    right, wrong = (Scored(Response(*nothing, True, ""), reward=reward) for reward in (1.0, 0.0))
    groups = [Group(parts.rollouts.problems[0], [0], [right, right, wrong])] * 4
    monkeypatch.setattr(Rollouts, "draw", lambda *_: groups)
    sampled = sample(parts.rollouts, parts.learner)
    assert (len(sampled.groups), len(sampled.all_groups)) == (4, num_drawn)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss_fn.variant=gpg"],
        ["loss_fn.reference_policy_kl_penalty=0.1", "grpo.overlong_filtering=true"],  # all are cut
    ],
    ids=["equal rewards", "nothing trains"],
)
def test_a_step_without_signal_updates_nothing_and_the_log_says_so(recipe, overrides, caplog):
    decay = "policy.megatron_cfg.optimizer.weight_decay=0.1"
    parts = begin(recipe("policy.generation.max_new_tokens=1", "grpo.max_num_steps=2", decay, *overrides))
    before = weights_of(parts.learner.policy)
    train(parts)
    assert rows(parts.recorder.folder.path)[-1]["steps/no_signal"] == 2
    assert "steps 1 to 2: in no group do two rewards differ, so nothing is learnt" in caplog.text
    assert "steps 1 to 2: nearly all responses are cut off before they end (100% of them" in caplog.text
    assert_equal(weights_of(parts.learner.policy), before)


def test_an_advantage_that_no_reward_explains_is_named_by_the_log(recipe, caplog):
    parts = begin(recipe("grpo.max_num_steps=1"))
    objective = parts.learner.objective

    def large(batch, seed):
        shaped = objective.shape(batch, seed)
        return replace(shaped, advantages=1e4 * shaped.advantages)

    parts.learner.objective = replace(objective, shape=large)
    train(parts)
    assert re.search(r"step 1: group \d+ has an advantage of -?\d+.* where its rewards span", caplog.text)


def test_validation_filters_as_training_where_nothing_else_is_said(recipe):
    sampling = validation_sampling(recipe("policy.generation.top_k=5", "policy.generation.top_p=0.9"), [0])
    assert (sampling.top_k, sampling.top_p) == (5, 0.9)
    own = [f"++policy.generation.val_{key}" for key in ("top_k=9", "top_p=0.7", "temperature=0.5")]
    sampling = validation_sampling(recipe("policy.generation.temperature=0.9", *own), [0])
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (9, 0.7, 0.5)
    assert not sampling.greedy
    assert validation_sampling(recipe("++policy.generation.val_temperature=0.0"), [0]).greedy


def test_validations_use_the_prompts_that_were_encoded_at_the_start(recipe, monkeypatch):
    run = begin(recipe())

    def refuse(*_arguments, **_options):
        raise AssertionError("a prompt is encoded once more")

    monkeypatch.setattr(rollout, "encode_prompts", refuse)
    monkeypatch.setattr(evaluate_sampling, "encode_prompt", refuse)
    metrics, samples = validate(run.rollouts, run.learner)
    assert "validation/accuracy" in metrics
    tokenizer = run.rollouts.tokenizer
    prompt = tokenizer.decode(run.rollouts.validation_requests[0].tokens, skip_special_tokens=False)
    assert samples[0]["prompt"] == prompt


def test_sampling_leaves_the_learner_where_it_is(recipe):
    run = begin(recipe())
    sample(run.rollouts, run.learner)
    assert run.learner.state == TrainingState()


def test_learning_moves_the_learner_on(recipe):
    run = begin(recipe())
    reinforce(run.learner, sample(run.rollouts, run.learner), run.recorder.diagnostics)
    assert run.learner.state.next_problem == 4


@pytest.mark.parametrize(
    ("period", "at_end", "steps"), [(2, False, [2, 4]), (3, False, [3]), (3, True, [3, 4]), (0, True, [4])]
)
def test_validation_is_due_by_the_period_and_at_the_end(recipe, period, at_end, steps):
    grpo = recipe(f"grpo.val_period={period}", f"grpo.val_at_end={str(at_end).lower()}").grpo
    assert [step for step in range(1, 5) if is_due(grpo, step)] == steps


def test_a_run_that_reached_its_goal_is_saved_and_stays_finished(recipe):
    goal = [
        "grpo.stop_at_validation_metric=val:accuracy",
        "grpo.stop_at_validation_threshold=0.0",
        "grpo.val_period=1",
    ]
    r = recipe(*goal)
    train(begin(r))
    assert [row["step"] for row in rows(r.run_dir)] == [0, 1]
    assert (r.checkpoint_dir / "latest").read_text() == "step_000001"  # not a multiple of save_period
    train(begin(r, resume=True))
    assert [row["step"] for row in rows(r.run_dir)] == [0, 1]
    further = recipe(*goal, "grpo.stop_at_validation_threshold=1.1", "grpo.max_num_steps=2")
    train(begin(further, resume=True))
    assert [row["step"] for row in rows(r.run_dir)] == [0, 1, 2]


SMALL = ["grpo.num_prompts_per_step=2", "grpo.val_at_start=false"]


def test_mathematics_from_jsonl_files_trains_and_writes_graded_samples(recipe, tmp_path, caplog):
    task = parse_task({"name": "word_problems", "form": "think_answer"}).build()

    def solved(problem):
        thought, _, _ = task.demonstration(problem, random.Random(0)).partition("</think>")
        return replace(problem, metadata={"solution": thought.removeprefix("<think>")})

    problems = {p.id: solved(p) for p in (task.train_problem(i, 0) for i in range(60))}
    held_out = list(map(solved, task.validation_problems(4)))
    files = math_files(tmp_path, [*problems.values()], held_out[:1], ", form: think_answer")
    other = write_problems(tmp_path / "other.jsonl", held_out[1:])
    r = recipe(
        *(*SMALL, "grpo.max_num_steps=2", files, "checkpointing.metric_name=val:other/accuracy"),
        f"nemo_grpo.task.validation_files={{first: {tmp_path}/held-out.jsonl, other: {other}}}",
    )
    caplog.set_level("INFO")
    parts = begin(r)
    train(parts)
    lines = lines_of(r.run_dir / "samples.jsonl")
    samples = [sample for sample in lines if "validation" not in sample]
    assert {sample["problem"] for sample in samples} <= problems.keys()
    assert all(set(sample["scores"]) == {"accuracy", "format", "cosine"} for sample in samples)
    last = rows(r.run_dir)[-1]
    assert last["step"] == 2
    names = ("accuracy", "greedy", "pass@2", "num_tokens")
    for name in names:  # one problem and three, whose means count alike
        sets = [last[f"validation/{one}/{name}"] for one in ("first", "other")]
        assert last[f"validation/{name}"] == pytest.approx(sum(sets) / 2)
    accuracy, first, other = (last[f"validation/{name}accuracy"] for name in ("", "first/", "other/"))
    assert f"step 2: accuracy {accuracy:.3f}, first {first:.3f}, other {other:.3f}" in caplog.text
    assert parts.recorder.saver.store.metric == "validation/other/accuracy"
    assert all(f"user\n{sample['question']}<|im_end|>" in sample["prompt"] for sample in samples)


@pytest.mark.slow
def test_the_quickstart_learns_and_keeps_its_form_over_three_seeds(tmp_path):
    start = dict.fromkeys(("accuracy", "format", "pass@8"), 0.0)
    end = dict(start)
    for seed in range(3):
        overrides = [f"nemo_grpo.runs_dir={tmp_path}", f"nemo_grpo.run_name=s{seed}", f"grpo.seed={seed}"]
        train(begin(load_recipe(QUICKSTART, overrides)))
        validated = [row for row in rows(tmp_path / f"s{seed}") if "validation/accuracy" in row]
        for name in start:
            start[name] += validated[0][f"validation/{name}"] / 3
            end[name] += validated[-1][f"validation/{name}"] / 3
    assert start["accuracy"] < 0.65
    assert end["accuracy"] >= 0.85
    assert end["format"] >= 0.95
    assert end["pass@8"] >= start["pass@8"] - 0.05
