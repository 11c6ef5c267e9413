"""Runs of the embedded engine that are stopped, resumed, damaged or refused to resume."""

import io
import logging
import os
import pickle
import re
import shutil
import signal
import sys
import warnings
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from ranks import run_ranks
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small_runs import NO_VALIDATION, QUICKSTART, arguments, begin, one_step, rows, weights_after
from toy_policies import assert_equal, weights_of

from nemo_grpo import UserError, cli
from nemo_grpo.engine import steps, validation
from nemo_grpo.engine.checkpoint_store import WEIGHTS
from nemo_grpo.engine.loop import train
from nemo_grpo.engine.run import run_recipe
from nemo_grpo.engine.saving import TrainingAborted
from nemo_grpo.engine.steps import sample
from nemo_grpo.report import report
from nemo_grpo.run.folder import RunFolder
from nemo_grpo.run.signals import EXIT_INTERRUPTED
from nemo_grpo.support.files import write_sha256
from nemo_grpo.tasks.retriever import RetrieverError
from nemo_grpo.tasks.scoring import RewardsFailed, Scorer

MOVING = ["loss_fn.variant=erpo", "loss_fn.entropy_statistics=moving", "loss_fn.entropy_momentum=0.5"]
"""A variant whose statistics a checkpoint must hold, too."""
LR = "policy.megatron_cfg.optimizer.lr"
LORA = ["++policy.megatron_cfg.peft.enabled=true", "++policy.megatron_cfg.peft.dim=4"]


def test_a_run_that_its_own_reward_ended_goes_on_when_that_is_corrected(
    recipe, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    code = "from pathlib import Path\n\n\ndef mine(response):\n    return {}\n"
    Path("mine.py").write_text(code.format("1 / Path('works').exists()"))
    Path("works").touch()
    overrides = ("nemo_grpo.rewards={accuracy: 1.0, mine.py:mine: 0.5}", *NO_VALIDATION)
    ended = begin(recipe(*overrides))
    one_step(ended)
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
    settings = first.recorder.folder.recipe.read_text()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level("INFO"):
        warnings.simplefilter("always", FutureWarning)
        assert train(begin(recipe("grpo.max_num_steps=1"), resume=True))
    assert "at step 2, grpo.max_num_steps=1: nothing is left to train" in caplog.text
    assert first.recorder.folder.recipe.read_text() == settings
    assert [str(one.message) for one in warned] == []
    for change, told in (("loss_fn.variant=gpg", "grpo -> gpg"), (f"{LR}=1.0e-3", r"lr: 0\.0003 -> 0\.001")):
        with pytest.raises(UserError, match=told):
            begin(recipe(change), resume=True)
    longer = begin(recipe("grpo.max_num_steps=40"), resume=True)
    assert longer.learner.state.step == 2
    assert one_step(longer)["lr"] == pytest.approx(3e-4 * 2 / 10)  # two of ten warm-up updates were made
    longer.recorder.folder.close()


@pytest.mark.parametrize("overrides", [[], ["loss_fn.variant=erpo"], LORA], ids=["all", "reference", "lora"])
def test_a_run_resumes_with_what_it_still_uses_of_its_model(recipe, model, overrides):
    r = recipe(f"policy.model_name={model}", *overrides)
    begin(r).recorder.folder.close()
    weights = shutil.copy(model / "model.safetensors", model.parent)
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, model / "model.safetensors")
    if overrides:
        with pytest.raises(
            UserError, match=r"model\.safetensors is not the file that .*run was trained with"
        ):
            begin(r, resume=True)
        shutil.copy(weights, model)
    begin(r, resume=True).recorder.folder.close()
    with (model / "tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(
        UserError, match=r"tokenizer\.json is not the file .* if the change does not matter, remove"
    ):
        begin(r, resume=True)


def test_too_many_non_finite_steps_stop_the_run_with_a_checkpoint(recipe):
    r = recipe(
        *("nemo_grpo.engine.max_consecutive_skipped_steps=2", "grpo.max_num_steps=9", "grpo.val_period=0"),
        "checkpointing.save_period=5",
        "loss_fn.variant=clip_cov",  # which scores apart from its update
    )
    parts = begin(r)
    healthy = parts.learner.policy.score

    def poisoned(*arguments, **settings):
        scores = healthy(*arguments, **settings)
        return scores._replace(logprobs=scores.logprobs * float("nan"))

    parts.learner.policy.score = poisoned
    with pytest.raises(TrainingAborted, match="2 steps in a row"):
        train(parts)
    assert rows(r.run_dir)[-1]["steps/skipped"] == 2
    assert parts.recorder.saver.store.latest().name == "step_000002"
    again = begin(r, resume=True)
    state = again.learner.state
    assert (state.skipped, state.skipped_in_a_row) == (2, 0)  # it has all its attempts again
    again.recorder.folder.close()


def commanded(line: list[str], interrupted_in: int = 0) -> tuple[int, str]:
    """Exit code and messages of the command, in a process of its own; SIGTERM comes within a step."""

    def interrupted(rollouts, learner):
        if learner.state.step + 1 == interrupted_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return sample(rollouts, learner)

    steps.sample = interrupted
    FigureCanvasAgg.print_png = lambda _self, path: path.touch()  # painting takes seconds
    logging.root.handlers.clear()  # pytest's
    sys.argv = ["nemo-grpo", *line]
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, said.getvalue()


def test_sigterm_saves_and_resume_ends_like_an_unbroken_run(tmp_path, unbroken):
    overrides = arguments(tmp_path, "cli", "checkpointing.save_period=100", *MOVING)
    line = ["train", str(QUICKSTART), *overrides]
    run = tmp_path / "cli"
    ((code, said),) = run_ranks(1, commanded, line, 3)
    assert (code, rows(run)[-1]["step"]) == (EXIT_INTERRUPTED, 3)
    assert "add --resume to continue" in said
    assert (run / "checkpoints/step_000003").exists()
    ((code, said),) = run_ranks(1, commanded, [*line, "--resume"])
    assert code == 0, said
    card = (run / "hf/README.md").read_text()
    assert re.search(r"\| base model \| quickstart \|\n(.*\n)*\| step \| 4 \|\n(.*\n)*\| torch \| ", card)
    assert (run / "report.html").exists()
    exported = load_file(run / "hf/model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in unbroken.items())


def test_a_signal_without_checkpoints_asks_for_no_other_start(recipe, monkeypatch):
    def interrupted(*parts):
        signal.raise_signal(signal.SIGTERM)
        return sample(*parts)

    monkeypatch.setattr(steps, "sample", interrupted)
    monkeypatch.setattr(report, "plot_run", lambda _folder: None)
    r = recipe("checkpointing.enabled=false", "grpo.val_period=0", "grpo.val_at_start=false")
    assert run_recipe(r, [], resume=False) == 1
    assert [row["step"] for row in rows(r.run_dir)] == [1]
    assert not (r.checkpoint_dir / "step_000001").exists()


def test_a_save_under_way_outlives_an_error_of_the_next_step(recipe, monkeypatch):
    parts = begin(recipe("policy.megatron_cfg.checkpoint.async_save=true", "checkpointing.save_period=1"))
    monkeypatch.setattr(parts.recorder.saver, "finish_if_written", lambda: None)  # still writing

    def fails_after_the_first(rollouts, learner):
        if learner.state.step:
            raise RuntimeError("the retriever is gone")
        return sample(rollouts, learner)

    monkeypatch.setattr(steps, "sample", fails_after_the_first)
    with pytest.raises(RuntimeError, match="retriever"):
        train(parts)
    assert parts.recorder.saver.store.latest().name == "step_000001"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The weights after four steps that nothing has stopped."""
    return weights_after(arguments(tmp_path_factory.mktemp("unbroken"), "run", *MOVING))


def gone(error):
    def fail(*_):
        raise error("the server is gone")

    return fail


@pytest.mark.parametrize(
    ("broken", "attribute", "value", "error", "saved"),
    [
        (Scorer, "__call__", gone(RewardsFailed), RewardsFailed, 1),
        (validation, "validate", gone(RetrieverError), RetrieverError, 2),
        (RunFolder, "metrics", Path("/dev/full"), TrainingAborted, 2),
    ],
)
def test_what_fails_outside_a_run_costs_it_no_step(
    recipe, unbroken, monkeypatch, broken, attribute, value, error, saved
):
    parts = begin(recipe("checkpointing.save_period=100", *MOVING))

    def second_fails(rollouts, learner):
        if learner.state.step == 1:
            owner = parts.recorder.folder if broken is RunFolder else broken
            monkeypatch.setattr(owner, attribute, value)
        return sample(rollouts, learner)

    monkeypatch.setattr(steps, "sample", second_fails)
    with pytest.raises(error, match=r"gone|No space left on device\); make room, then --resume .* step 2"):
        train(parts)
    monkeypatch.undo()
    assert parts.recorder.saver.store.latest().name == f"step_00000{saved}"
    resumed = begin(parts.recipe, resume=True)
    train(resumed)
    assert_equal(weights_of(resumed.learner.policy), unbroken)
    logged = {row["step"]: "validation/accuracy" in row for row in rows(resumed.recorder.folder.path)}
    assert logged == {0: True, 1: False, 2: True, 3: False, 4: True}
    assert len(rows(resumed.recorder.folder.path)) == 5


def test_an_export_that_finds_no_room_is_one_line(recipe, monkeypatch):
    def full(*_args):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("nemo_grpo.engine.saving.export", full)
    with pytest.raises(
        TrainingAborted, match=r"/hf cannot be written \(I/O error: No space .* then --resume"
    ):
        train(begin(recipe("grpo.max_num_steps=1", *NO_VALIDATION)))


@pytest.mark.parametrize("distributed", ["true", "false"])
def test_a_checkpoint_before_the_first_update_resumes(recipe, distributed):
    nothing_to_learn = [
        "policy.generation.max_new_tokens=1",
        "grpo.max_num_steps=2",
        f"policy.megatron_cfg.optimizer.use_distributed_optimizer={distributed}",
    ]
    train(begin(recipe(*nothing_to_learn)))
    longer = begin(recipe(*nothing_to_learn, "grpo.max_num_steps=3"), resume=True)
    assert longer.learner.state.no_signal == 2
    longer.recorder.folder.close()


def test_resume_from_a_damaged_checkpoint_goes_back_to_the_last_whole_one(recipe, caplog, unbroken):
    first = begin(recipe("checkpointing.save_period=1", "checkpointing.keep_top_k=null", *MOVING))
    train(first)
    newest = first.recorder.saver.store.latest()
    file = max((newest / WEIGHTS).glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    resumed = begin(first.recipe, resume=True)
    assert resumed.learner.state.step == 3
    assert "step_000004 is damaged and set aside" in caplog.text
    train(resumed)
    assert_equal(weights_of(resumed.learner.policy), unbroken)


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
    weights = first.recorder.saver.store.latest() / WEIGHTS
    if place == "metadata":
        (weights / ".metadata").write_bytes(pickle.dumps(Gadget()))
    elif place == "object":
        torch.save(Gadget(), weights / "common.pt")
    else:
        (weights / "weights").mkdir()
        (weights / ".metadata").rename(weights / "weights" / ".metadata")
        for file in weights.glob("*.distcp"):
            shutil.copy(file, weights / "weights")
    write_sha256(first.recorder.saver.store.latest())  # who forges a file can forge its hash, too
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=error):
        begin(recipe("grpo.max_num_steps=2"), resume=True)
    assert not (tmp_path / "executed").exists()
