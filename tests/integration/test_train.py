"""Whole runs of the embedded engine on a very small policy: what a run leaves behind, resuming, refusals."""

import io
import json
import logging
import os
import pickle
import re
import shutil
import signal
import sys
import warnings
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small_runs import (
    NO_VALIDATION,
    QUICKSTART,
    arguments,
    lines_of,
    math_files,
    resumed_exactly,
    rows,
    weights_after,
)
from toy_policies import assert_equal, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_grpo import VARIANTS, UserError, cli
from nemo_grpo.diagnostics import report
from nemo_grpo.engine import loop, steps
from nemo_grpo.engine.checkpoint import WEIGHTS
from nemo_grpo.engine.checks import check
from nemo_grpo.engine.loop import train
from nemo_grpo.engine.run import begin, run_recipe
from nemo_grpo.engine.saving import TrainingAborted
from nemo_grpo.engine.setup import validation_sampling
from nemo_grpo.engine.steps import reinforce, sample
from nemo_grpo.engine.validation import is_due
from nemo_grpo.files import write_sha256
from nemo_grpo.recipe import load_recipe
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.retriever import RetrieverError
from nemo_grpo.tasks.scoring import RewardsFailed, Scorer
from nemo_grpo.training.rollout import Group, Scored
from nemo_grpo.training.run_folder import RunFolder
from nemo_grpo.training.signals import EXIT_INTERRUPTED

LORA = ["++policy.megatron_cfg.peft.enabled=true", "++policy.megatron_cfg.peft.dim=4"]
PROMISED = {
    *("reward/mean", "reward/accuracy", "reward/format", "advantage/std", "groups/valid_fraction"),
    *("length/mean", "entropy/mean", "grad_norm", "lr", "ratio/clip_fraction", "kl/previous"),
    *("covariance/p50", "covariance/p99", "reward/group_std"),
    *("rollout/all_right", "rollout/all_wrong", "rollout/with_signal"),
    *("tokens_per_second", "mismatch/logprob_abs_mean", "mismatch/kl", "time/rollout", "time/update"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """The parts of a run that has ended; its folder is not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    line = arguments(folder, cache, "run", "logger.tensorboard_enabled=true")
    parts = begin(load_recipe(QUICKSTART, line))
    assert train(parts)
    return parts


def test_a_run_leaves_behind_what_it_promises(finished):
    run = finished.folder.path
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    for row in rows(run)[::2]:
        assert {"validation/accuracy", "validation/greedy", "validation/pass@2"} <= row.keys()
    last = rows(run)[-1]
    assert last.keys() >= PROMISED
    assert abs(last["mismatch/logprob_abs_mean"]) < 1e-5  # the sampler has the policy's weights
    assert last["ratio/mean"] == pytest.approx(1.0, abs=1e-5)  # one update per rollout is on-policy
    (look,) = lines_of(run / "diagnostics.jsonl")
    assert (look["step"], look["num_tokens"]) == (1, round(rows(run)[1]["length/mean"] * 16))
    assert "torch" in json.loads((run / "versions.json").read_text())
    assert load_recipe(run / "recipe.resolved.yaml") == finished.recipe
    assert {sample["step"] for sample in lines_of(run / "samples.jsonl")} == {1, 2, 3, 4}
    assert (run / "checkpoints/latest").read_text() == "step_000004"
    assert list((run / "tensorboard").glob("events.*"))
    assert not list(run.rglob("tmp_*"))


def test_the_export_is_the_trained_policy_and_generates(finished):
    model = AutoModelForCausalLM.from_pretrained(finished.folder.hf)
    state = model.state_dict()
    for name, tensor in finished.policy.named_tensors():
        assert torch.equal(state[name], tensor), name
    start = load_file(finished.source / "model.safetensors")
    assert any(not torch.equal(start[name], state[name]) for name in start)
    tokenizer = AutoTokenizer.from_pretrained(finished.folder.hf)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_an_existing_run_is_refused_and_left_alone(finished):
    before = rows(finished.folder.path)
    with pytest.raises(UserError, match="exists; add --resume"):
        begin(finished.recipe)
    assert rows(finished.folder.path) == before


# The second update is off-policy, and the covariances do choose tokens.
TWO_UPDATES = [*NO_VALIDATION, "grpo.max_num_steps=2", "policy.train_global_batch_size=8"]
TWO_UPDATES += ["policy.megatron_cfg.scheduler.lr_warmup_iters=0"]
IN_EFFECT = {"clip_cov": ["loss_fn.covariance_min=0.0", "loss_fn.clip_fraction=0.2"]}


@pytest.fixture(scope="module")
def weights_by_grpo(tmp_path_factory, cache):
    return weights_after(arguments(tmp_path_factory.mktemp("grpo"), cache, "run", *TWO_UPDATES))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_from_the_same_command_in_its_own_way(recipe, variant, weights_by_grpo):
    parts = begin(recipe(f"loss_fn.variant={variant}", *TWO_UPDATES, *IN_EFFECT.get(variant, [])))
    assert train(parts)
    last = rows(parts.folder.path)[-1]
    assert (last["step"], last["steps/skipped"]) == (2, 0)
    assert last["grad_norm"] > 0
    assert abs(last["kl/previous"]) > 1e-9  # two updates per rollout move away from the scored policy
    weights = dict(parts.policy.named_tensors())
    is_grpo = all(torch.equal(weights[name], tensor) for name, tensor in weights_by_grpo.items())
    assert is_grpo == (variant in ("grpo", "dapo"))  # dapo clips less, and nothing is clipped here


@pytest.mark.parametrize("variant", ["dapo", "gpg"])
def test_dynamic_sampling_draws_until_the_step_has_signal(recipe, variant):
    r = recipe(f"loss_fn.variant={variant}", "grpo.use_dynamic_sampling=true", "grpo.max_num_steps=2")
    train(begin(r))
    for row in rows(r.run_dir)[1:]:
        assert row["groups/valid_fraction"] >= (1.0 if variant == "dapo" else 0.6)
        assert row["rollout/num_prompts"] % 4 == 0


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
    groups = [Group(parts.problems[0], [0], [right, right, wrong])] * 4
    monkeypatch.setattr(steps, "draw", lambda _parts: groups)
    kept, drawn = sample(parts)
    assert (len(kept), len(drawn)) == (4, num_drawn)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss_fn.variant=gpg"],
        ["loss_fn.reference_policy_kl_penalty=0.1", "grpo.overlong_filtering=true"],  # all are cut
    ],
    ids=["equal rewards", "nothing trains"],
)
def test_a_step_without_signal_updates_nothing_and_the_log_says_so(recipe, overrides, caplog):
    r = recipe(
        *("policy.generation.max_new_tokens=1", "grpo.max_num_steps=2"),
        *("policy.megatron_cfg.optimizer.weight_decay=0.1", *overrides),
    )
    parts = begin(r)
    before = weights_of(parts.policy)
    train(parts)
    assert rows(r.run_dir)[-1]["steps/no_signal"] == 2
    assert "steps 1 to 2: in no group do two rewards differ, so nothing is learnt" in caplog.text
    assert "steps 1 to 2: nearly all responses are cut off before they end (100% of them" in caplog.text
    assert_equal(weights_of(parts.policy), before)


def test_an_advantage_that_no_reward_explains_is_named_by_the_log(recipe, caplog, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("large.py").write_text(
        "from dataclasses import replace\n"
        "from nemo_grpo.variants.base import RatioConfig\n\n"
        "class Large(RatioConfig):\n"
        "    def shape(self, batch, seed):\n"
        "        shaped = super().shape(batch, seed)\n"
        "        return replace(shaped, advantages=1e4 * shaped.advantages)\n"
    )
    train(begin(recipe("loss_fn={_override_: true, variant: large.py:Large}", "grpo.max_num_steps=1")))
    assert re.search(r"step 1: group \d+ has an advantage of -?\d+.* where its rewards span", caplog.text)


@pytest.mark.parametrize(
    "overrides",
    [[], ["loss_fn.variant=erpo", "loss_fn.entropy_statistics=moving", "loss_fn.entropy_momentum=0.5"]],
    ids=["grpo", "moving statistics"],
)
def test_resume_ends_with_the_same_weights_and_metrics_as_an_unbroken_run(recipe, overrides):
    resumed = resumed_exactly(partial(recipe, *overrides))
    assert bool(resumed.state.carried) == bool(overrides)


def test_a_run_that_its_own_reward_ended_goes_on_when_that_is_corrected(
    recipe, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    code = "from pathlib import Path\n\n\ndef mine(response):\n    return {}\n"
    Path("mine.py").write_text(code.format("1 / Path('works').exists()"))
    Path("works").touch()
    overrides = ("nemo_grpo.rewards={accuracy: 1.0, mine.py:mine: 0.5}", *NO_VALIDATION)
    ended = begin(recipe(*overrides))
    reinforce(ended)
    Path("works").unlink()
    with pytest.raises(RewardsFailed, match="correct the function and resume"):
        train(ended)
    Path("mine.py").write_text(code.format("0.5"))
    with caplog.at_level("INFO"):
        train(begin(recipe(*overrides), resume=True))
    assert "mine.py has changed: its new code runs from step 2 on" in caplog.text
    assert "grpo run 4/4, " in caplog.text
    assert rows(tmp_path / "run")[-1]["step"] == 4
    assert "works" in (tmp_path / "run/own/mine.py.until_step_1").read_text()


def test_a_finished_run_has_nothing_left_resumes_without_warnings_and_can_be_extended(recipe, caplog):
    first = begin(recipe("grpo.max_num_steps=2"))
    train(first)
    settings = first.folder.recipe.read_text()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level("INFO"):
        warnings.simplefilter("always", FutureWarning)
        assert train(begin(recipe("grpo.max_num_steps=1"), resume=True))
    assert "at step 2, grpo.max_num_steps=1: nothing is left to train" in caplog.text
    assert first.folder.recipe.read_text() == settings
    assert [str(one.message) for one in warned] == []
    longer = begin(recipe("grpo.max_num_steps=3"), resume=True)
    assert longer.state.step == 2
    train(longer)
    assert rows(longer.folder.path)[-1]["step"] == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("policy.megatron_cfg.recompute_granularity=selective", "recompute_granularity=selective acts only"),
        ("policy.sequence_packing.enabled=true; checkpointing.save_optimizer=false", "save_optimizer=false"),
        (
            "policy.megatron_cfg.fp8_cfg.enabled=true; policy.precision=bfloat16",
            "FP8 needs a CUDA GPU and torch finds none; use false",
        ),
        (
            "policy.sequence_packing.algorithm=concatenative",
            "algorithm=concatenative is not supported by the embedded engine: use first_fit_decreasing",
        ),
        ("nemo_grpo.engine.generator=vllm", "generator=vllm"),
        ("++policy.tokenizer.chat_template_kwargs={enable_thinking: false}", "chat_template_kwargs="),
        ("++policy.megatron_cfg.mtp_num_layers=1", "mtp_num_layers=1 is not supported"),
        ("++policy.megatron_cfg.env_vars={A: b}", "env_vars="),
        ("++grpo.malformed_thinking_advantage=-5.0", "malformed_thinking_advantage=-5.0"),
        (
            "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true",
            "precision_aware_optimizer=true",
        ),
        (
            "policy.model_name=/nowhere/model; nemo_grpo.warm_start=null",
            "policy.model_name='/nowhere/model' is not",
        ),
        ("policy.precision=float16", "policy.precision=float16"),
        ("policy.generation.stop_strings=[x]", "stop_token_ids"),
        ("nemo_grpo.warm_start.vocab_size=100", "vocab_size=100 is too small"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_anything_is_made(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        begin(recipe(*overrides.split("; ")))
    assert not recipe().run_dir.exists()


def test_validation_filters_as_training_where_nothing_else_is_said(recipe):
    sampling = validation_sampling(recipe("policy.generation.top_k=5", "policy.generation.top_p=0.9"), [0])
    assert (sampling.top_k, sampling.top_p) == (5, 0.9)
    own = [f"++policy.generation.val_{key}" for key in ("top_k=9", "top_p=0.7", "temperature=0.5")]
    sampling = validation_sampling(recipe("policy.generation.temperature=0.9", *own), [0])
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (9, 0.7, 0.5)
    assert not sampling.greedy
    assert validation_sampling(recipe("++policy.generation.val_temperature=0.0"), [0]).greedy


@pytest.fixture
def model(finished, tmp_path):
    """A copy of the warm start, to be damaged."""
    return shutil.copytree(finished.source, tmp_path / "model")


def assert_refused(recipe, model, message, *overrides):
    r = recipe(f"policy.model_name={model}", "nemo_grpo.warm_start=null", *overrides)
    with pytest.raises(UserError, match=message):
        begin(r)
    assert not r.run_dir.exists()


def test_a_model_without_tokenizer_is_refused(recipe, model):
    for file in model.glob("*token*"):
        file.unlink()
    assert_refused(recipe, model, "has no tokenizer")


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_model_with_weights_that_are_not_finite_is_refused(recipe, model, number):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = number
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert_refused(recipe, model, r"model\.norm\.weight holds NaN or inf; give a sound checkpoint")


def test_a_tokenizer_of_a_larger_model_is_refused(recipe, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<extra {number}>" for number in range(400)])
    tokenizer.save_pretrained(model)
    template = "nemo_grpo.prompt.template='<extra 399>{question}'"
    assert_refused(recipe, model, "put the model's own tokenizer into its folder", template)


def test_a_tokenizer_needs_no_padding_token(recipe, model):
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {
        "pad_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    file.write_text(json.dumps(settings))
    source = f"policy.model_name={model}", "nemo_grpo.warm_start=null"
    parts = begin(recipe(*source, *NO_VALIDATION, "grpo.max_num_steps=1"))
    assert parts.tokenizer.pad_token_id is None
    assert train(parts)


@pytest.mark.parametrize("overrides", [[], ["loss_fn.variant=erpo"], LORA], ids=["all", "reference", "lora"])
def test_a_run_resumes_with_what_it_still_uses_of_its_model(recipe, model, overrides):
    r = recipe(f"policy.model_name={model}", "nemo_grpo.warm_start=null", *overrides)
    begin(r).folder.close()
    weights = shutil.copy(model / "model.safetensors", model.parent)
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, model / "model.safetensors")
    if overrides:
        with pytest.raises(
            UserError, match=r"model\.safetensors is not the file that .*run was trained with"
        ):
            begin(r, resume=True)
        shutil.copy(weights, model)
    begin(r, resume=True).folder.close()
    with (model / "tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(
        UserError, match=r"tokenizer\.json is not the file .* if the change does not matter, remove"
    ):
        begin(r, resume=True)


def test_a_folder_that_cannot_be_written_is_refused(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not a writable folder"):
        begin(recipe(f"nemo_grpo.runs_dir={tmp_path / 'file'}"))


def test_prompts_that_do_not_fit_are_named(recipe):
    with pytest.raises(UserError, match=r"policy\.max_total_sequence_length=40"):
        train(begin(recipe("policy.max_total_sequence_length=40")))


def test_a_long_prompt_anywhere_in_the_files_is_refused_before_the_run(recipe, model, tmp_path):
    problems = [Problem(f"train{i}", f"What is {i} + 1?", "1") for i in range(200)]
    problems[170] = Problem("train170", "What? " * 200, "1")
    held_out = [Problem(f"held-out{i}", "What is 1 + 1 + 1?", "1") for i in range(16)]
    task = math_files(tmp_path, problems, held_out)
    assert_refused(recipe, model, r"problem 'train170' has a prompt of .* tokens", task)


def test_too_many_non_finite_steps_stop_the_run_with_a_checkpoint(recipe):
    r = recipe(
        *("nemo_grpo.engine.max_consecutive_skipped_steps=2", "grpo.max_num_steps=9", "grpo.val_period=0"),
        "checkpointing.save_period=5",
        "loss_fn.variant=clip_cov",  # which scores apart from its update
    )
    parts = begin(r)
    healthy = parts.policy.score

    def poisoned(*arguments, **settings):
        scores = healthy(*arguments, **settings)
        return scores._replace(logprobs=scores.logprobs * float("nan"))

    parts.policy.score = poisoned
    with pytest.raises(TrainingAborted, match="2 steps in a row"):
        train(parts)
    assert rows(r.run_dir)[-1]["steps/skipped"] == 2
    assert parts.saver.store.latest().name == "step_000002"
    again = begin(r, resume=True)
    assert (again.state.skipped, again.state.skipped_in_a_row) == (2, 0)  # it has all its attempts again
    again.folder.close()


@pytest.mark.parametrize(
    ("period", "at_end", "steps"), [(2, False, [2, 4]), (3, False, [3]), (3, True, [3, 4]), (0, True, [4])]
)
def test_validation_is_due_by_the_period_and_at_the_end(recipe, period, at_end, steps):
    grpo = recipe(f"grpo.val_period={period}", f"grpo.val_at_end={str(at_end).lower()}").grpo
    assert [step for step in range(1, 5) if is_due(grpo, step)] == steps


def commanded(line: list[str], interrupted_in: int = 0) -> tuple[int, str]:
    """Exit code and messages of the command, in a process of its own; SIGTERM comes within a step."""

    def step(parts):
        if parts.state.step + 1 == interrupted_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return reinforce(parts)

    loop.reinforce = step
    if interrupted_in:
        report.plot_run = lambda _folder: None  # it takes seconds
    logging.root.handlers.clear()  # pytest's
    sys.argv = ["nemo-grpo", *line]
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, said.getvalue()


def command(tmp_path, cache, *extra):
    return ["train", str(QUICKSTART), *arguments(tmp_path, cache, "cli", *extra)]


def test_sigterm_saves_and_resume_ends_like_an_unbroken_run(recipe, tmp_path, cache):
    extra = ["grpo.max_num_steps=6", "grpo.val_period=0", "checkpointing.save_period=100"]
    whole = begin(recipe(*extra, name="whole"))
    train(whole)
    line, run = command(tmp_path, cache, *extra), tmp_path / "cli"
    ((code, said),) = run_ranks(1, commanded, line, 3)
    assert (code, rows(run)[-1]["step"]) == (EXIT_INTERRUPTED, 3)
    assert "add --resume to continue" in said
    assert (run / "checkpoints/step_000003").exists()
    ((code, said),) = run_ranks(1, commanded, [*line, "--resume"])
    assert code == 0, said
    card = (run / "hf/README.md").read_text()
    assert re.search(
        r"\| base model \| made for the run \|\n(.*\n)*\| step \| 6 \|\n(.*\n)*\| torch \| ", card
    )
    assert (run / "report.html").exists()
    exported = load_file(run / "hf/model.safetensors")
    for name, tensor in whole.policy.named_tensors():
        assert torch.equal(exported[name], tensor), name


def test_a_signal_without_checkpoints_asks_for_no_other_start(recipe, monkeypatch):
    def interrupted(parts):
        signal.raise_signal(signal.SIGTERM)
        return reinforce(parts)

    monkeypatch.setattr(loop, "reinforce", interrupted)
    monkeypatch.setattr(report, "plot_run", lambda _folder: None)
    r = recipe("checkpointing.enabled=false", "grpo.val_period=0", "grpo.val_at_start=false")
    assert run_recipe(r, [], resume=False) == 1
    assert [row["step"] for row in rows(r.run_dir)] == [1]
    assert not (r.checkpoint_dir / "step_000001").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.max_num_stepz=3", "did you mean 'max_num_steps'"),
        ("loss_fn.ratio_clip_mx=0.2", "did you mean 'ratio_clip_max'"),
        ("grpo.max_num_steps=many", "must be an integer"),
        ("loss_fn.variant=gpo", "did you mean"),
        ("policy.train_global_batch_size=24", "policy.train_global_batch_size=24"),
        ("nemo_grpo.runs_dir=/proc/nowhere", "/proc/nowhere"),
        ("policy.max_total_sequence_length=40", "policy.max_total_sequence_length=40"),
    ],
)
def test_refusals_are_one_line_with_exit_code_2_and_nothing_is_made(
    tmp_path, cache, monkeypatch, capsys, override, message
):
    monkeypatch.setattr(sys, "argv", ["nemo-grpo", *command(tmp_path, cache, override)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "cli").exists()


def test_resume_refuses_another_algorithm_and_keeps_the_schedule_of_the_recipe(recipe):
    train(begin(recipe("grpo.max_num_steps=2")))
    with pytest.raises(UserError, match=r"loss_fn\.variant: grpo -> gpg"):
        begin(recipe("loss_fn.variant=gpg"), resume=True)
    with pytest.raises(UserError, match=r"optimizer\.lr: 0\.0005 -> 0\.001"):
        begin(recipe("policy.megatron_cfg.optimizer.lr=1.0e-3"), resume=True)
    longer = begin(recipe("grpo.max_num_steps=40"), resume=True)
    assert reinforce(longer)["lr"] == pytest.approx(5e-4 * 2 / 10)  # two of ten warm-up updates were made
    longer.folder.close()


def start_and_end(overrides: list[str]) -> None:
    begin(load_recipe(QUICKSTART, overrides), resume=True).folder.close()


def test_two_processes_cannot_train_in_one_folder(recipe, tmp_path, cache):
    first = begin(recipe())
    with pytest.raises(AssertionError, match="in use by another run"):
        run_ranks(1, start_and_end, arguments(tmp_path, cache, "run"))
    first.folder.close()
    run_ranks(1, start_and_end, arguments(tmp_path, cache, "run"))


def test_checkpoints_of_another_run_are_not_touched(recipe, tmp_path):
    shared = f"checkpointing.checkpoint_dir={tmp_path / 'shared'}"
    train(begin(recipe(shared, "grpo.max_num_steps=2", name="one")))
    for refuses in (partial(check, resume=False), begin):  # before ranks start, and by each of them
        with pytest.raises(UserError, match="another run's checkpoints"):
            refuses(recipe(shared, name="two"))
    assert (tmp_path / "shared/step_000002").exists()


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


def test_a_save_under_way_outlives_an_error_of_the_next_step(recipe, monkeypatch):
    parts = begin(recipe("policy.megatron_cfg.checkpoint.async_save=true", "checkpointing.save_period=1"))
    monkeypatch.setattr(parts.saver, "finish_if_written", lambda: None)  # still writing

    def fails_after_the_first(parts):
        if parts.state.step:
            raise RuntimeError("the retriever is gone")
        return reinforce(parts)

    monkeypatch.setattr(loop, "reinforce", fails_after_the_first)
    with pytest.raises(RuntimeError, match="retriever"):
        train(parts)
    assert parts.saver.store.latest().name == "step_000001"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, cache):
    """The weights after four steps that nothing has stopped."""
    return weights_after(arguments(tmp_path_factory.mktemp("unbroken"), cache, "run"))


def gone(error):
    def fail(*_):
        raise error("the server is gone")

    return fail


@pytest.mark.parametrize(
    ("broken", "attribute", "value", "error", "saved"),
    [
        (Scorer, "__call__", gone(RewardsFailed), RewardsFailed, 1),
        (loop, "validate", gone(RetrieverError), RetrieverError, 2),
        (RunFolder, "metrics", Path("/dev/full"), TrainingAborted, 2),
    ],
)
def test_what_fails_outside_a_run_costs_it_no_step(
    recipe, unbroken, monkeypatch, broken, attribute, value, error, saved
):
    parts = begin(recipe("checkpointing.save_period=100"))

    def second_fails(parts):
        if parts.state.step == 1:
            owner = parts.folder if broken is RunFolder else broken
            monkeypatch.setattr(owner, attribute, value)
        return reinforce(parts)

    monkeypatch.setattr(loop, "reinforce", second_fails)
    with pytest.raises(error, match=r"gone|No space left on device\); make room, then --resume .* step 2"):
        train(parts)
    monkeypatch.undo()
    assert parts.saver.store.latest().name == f"step_00000{saved}"
    resumed = begin(parts.recipe, resume=True)
    train(resumed)
    assert_equal(weights_of(resumed.policy), unbroken)
    logged = {row["step"]: "validation/accuracy" in row for row in rows(resumed.folder.path)}
    assert logged == {0: True, 1: False, 2: True, 3: False, 4: True}
    assert len(rows(resumed.folder.path)) == 5


def test_an_export_that_finds_no_room_is_one_line(recipe, monkeypatch):
    def full(*_args):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("nemo_grpo.engine.saving.export", full)
    with pytest.raises(
        TrainingAborted, match=r"/hf cannot be written \(I/O error: No space .* then --resume"
    ):
        train(begin(recipe("grpo.max_num_steps=1", *NO_VALIDATION)))


def test_killed_before_the_first_checkpoint_starts_over_with_clean_rows(recipe):
    first = begin(recipe())
    first.folder.append_metrics({"step": 0})
    first.folder.append_metrics(reinforce(first))
    first.folder.close()
    train(begin(recipe(), resume=True))
    assert [row["step"] for row in rows(first.folder.path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("distributed", ["true", "false"])
def test_a_checkpoint_before_the_first_update_resumes(recipe, distributed):
    nothing_to_learn = [
        "policy.generation.max_new_tokens=1",
        "grpo.max_num_steps=2",
        f"policy.megatron_cfg.optimizer.use_distributed_optimizer={distributed}",
    ]
    train(begin(recipe(*nothing_to_learn)))
    longer = begin(recipe(*nothing_to_learn, "grpo.max_num_steps=3"), resume=True)
    assert longer.state.no_signal == 2
    longer.folder.close()


def test_resume_from_a_damaged_checkpoint_goes_back_to_the_last_whole_one(recipe, caplog):
    whole = begin(recipe("checkpointing.save_period=1", name="whole"))
    train(whole)
    first = begin(recipe("checkpointing.save_period=1", "checkpointing.keep_top_k=null", name="broken"))
    train(first)
    newest = first.saver.store.latest()
    file = max((newest / WEIGHTS).glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    resumed = begin(first.recipe, resume=True)
    assert resumed.state.step == 3
    assert "step_000004 is damaged and set aside" in caplog.text
    train(resumed)
    assert_equal(weights_of(resumed.policy), weights_of(whole.policy))


class Gadget:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("place", "error"),
    [("metadata", "was not read"), ("object", "was not read"), ("subfolder", "a folder in it has")],
)
def test_a_forged_checkpoint_is_refused_and_nothing_runs(recipe, tmp_path, monkeypatch, place, error):
    first = begin(recipe("grpo.max_num_steps=1"))
    train(first)
    weights = first.saver.store.latest() / WEIGHTS
    if place == "metadata":
        (weights / ".metadata").write_bytes(pickle.dumps(Gadget()))
    elif place == "object":
        torch.save(Gadget(), weights / "common.pt")
    else:
        (weights / "weights").mkdir()
        (weights / ".metadata").rename(weights / "weights" / ".metadata")
        for file in weights.glob("*.distcp"):
            shutil.copy(file, weights / "weights")
    write_sha256(first.saver.store.latest())  # who forges a file can forge its hash, too
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=error):
        begin(recipe("grpo.max_num_steps=2"), resume=True)
    assert not (tmp_path / "executed").exists()
