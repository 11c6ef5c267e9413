"""A run goes on with its own recipe, data and record, whichever command would continue it."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.nemorl import run_grpo
from nemo_grpo.nemorl.callbacks import RunRecord
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.recipe import load_recipe
from nemo_grpo.run.continuation import check_continuation
from nemo_grpo.support.errors import UserError

CLUSTER = "cluster-quickstart"
OURS = "def brevity(response):\n    return {value}\n"
TASK = "nemo_grpo.task={_override_: true, name: math, train_files: [a.jsonl], validation_files: [b.jsonl]}"
FIRST = [TASK, "grpo.max_val_samples=4", "nemo_grpo.rewards={accuracy: 1.0, mine.py:brevity: 0.1}"]
MODEL = "policy.model_name=Qwen/Qwen2.5-1.5B"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        lines = [json.dumps({"question": f"{name} {i}?", "answer": i}) for i in range(40)]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    Path("mine.py").write_text(OURS.format(value=0.5))


def recipe(*overrides):
    return load_recipe(CLUSTER, [*FIRST, MODEL, *overrides])


def begin(*overrides, step=10):
    begun = recipe(*overrides)
    if step:
        (begun.checkpoint_dir / f"step_{step}").mkdir(parents=True)
    RunRecord(begun)
    return begun


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("loss_fn.variant=gpg", "loss_fn.variant: grpo -> gpg"),
        ("loss_fn.ratio_clip_max=0.28", "loss_fn.ratio_clip_max: 0.2 -> 0.28"),
        ("policy.model_name=Qwen/Qwen2.5-0.5B", "policy.model_name: "),
        ("policy.megatron_cfg.optimizer.lr=1.0e-3", "policy.megatron_cfg.optimizer.lr: "),
        ("nemo_grpo.rewards={accuracy: 1.0}", "nemo_grpo.rewards"),
        ("nemo_grpo.prompt.system=Think.", "nemo_grpo.prompt.system: "),
        ("nemo_grpo.task.train_files=[b.jsonl]", "nemo_grpo.task.train_files: "),
        ("grpo.seed=5", "grpo.seed: "),
        ("grpo.num_prompts_per_step=8", "grpo.num_prompts_per_step: 16 -> 8"),
        ("policy.generation.max_new_tokens=16", "policy.generation.max_new_tokens: "),
    ],
)
def test_another_recipe_is_refused_by_name(change, said):
    begin()
    with pytest.raises(UserError, match=r"another recipe than .* was trained with: .*start another") as error:
        check_continuation(recipe(change))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.4",
        "policy.generation.vllm_cfg.enforce_eager=true",
        "policy.train_micro_batch_size=1",
        "policy.megatron_cfg.activation_checkpointing=true",
        "grpo.max_num_steps=80",
        "grpo.val_period=5",
        "checkpointing.keep_top_k=9",
        "logger.wandb_enabled=false",
    ],
)
def test_place_length_and_validation_may_change(change):
    begun = begin()
    assert check_continuation(recipe(change)) == begun


@pytest.mark.parametrize("file", ["a.jsonl", "b.jsonl"])
def test_other_data_under_the_same_name_are_refused(file):
    begin()
    Path(file).write_text(Path(file).read_text().replace("1?", "2?"))
    with pytest.raises(UserError, match=rf"{file} is not the file that .* was trained with"):
        check_continuation(recipe())


def test_without_a_checkpoint_a_run_on_nemo_rl_begins_with_any_recipe_and_its_data():
    begin(step=0)
    Path("a.jsonl").write_text(Path("b.jsonl").read_text().replace("b ", "c "))
    check_continuation(recipe("grpo.seed=5"))
    begun = begin("grpo.seed=5", step=0)  # records the new data
    (begun.checkpoint_dir / "step_3").mkdir(parents=True)
    check_continuation(recipe("grpo.seed=5"))


def test_checkpoints_of_another_run_in_a_folder_of_their_own_are_refused():
    shared = "checkpointing.checkpoint_dir=checkpoints"
    begin(shared)
    with pytest.raises(UserError, match=r"than checkpoints was trained with: grpo\.seed"):
        check_continuation(recipe(shared, "nemo_grpo.run_name=other", "grpo.seed=5"))
    check_continuation(recipe(shared, "nemo_grpo.run_name=renamed"))


@pytest.mark.parametrize(
    "damage", [b"\x8c\x00\xff" * 20, b"\xff\xfe\x00", b"", b"- 1\n", b"a: [", b"grpo: {x: 1}\n", None]
)
def test_a_damaged_record_is_a_refusal_in_one_line(damage):
    record = begin().run_dir / "recipe.resolved.yaml"
    record.unlink()
    if damage is None:
        record.mkdir()
    else:
        record.write_bytes(damage)
    with pytest.raises(UserError, match=r"recipe\.resolved\.yaml.* restore it, or start another"):
        check_continuation(recipe())


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("command", [["recipe", "check"], ["launch"], ["preflight"]])
def test_every_command_before_a_job_refuses_it(command):
    record = begin().run_dir / "recipe.resolved.yaml"
    text = record.read_text()
    done = run(*command, CLUSTER, *FIRST, "policy.model_name=Qwen/Qwen2.5-7B")
    assert done.exit_code != 0
    said = f"{done.output} {done.exception}"
    assert "policy.model_name: Qwen/Qwen2.5-1.5B -> Qwen/Qwen2.5-7B" in said
    assert record.read_text() == text


def test_the_driver_refuses_it_before_it_writes(monkeypatch, capsys):
    record = begin().run_dir / "recipe.resolved.yaml"
    text = record.read_text()
    other = ClusterRun(recipe("policy.model_name=Qwen/Qwen2.5-7B"), None)
    monkeypatch.setattr(run_grpo.compat, "check", lambda: None)
    monkeypatch.setattr(run_grpo, "load_run", lambda *_: other)
    assert run_grpo.main(["--config", "x.yaml"]) == 2
    assert "policy.model_name: Qwen/Qwen2.5-1.5B -> Qwen/Qwen2.5-7B" in capsys.readouterr().err
    assert record.read_text() == text


def test_corrected_own_code_resumes_with_a_warning_and_the_old_code_is_kept(caplog):
    begun = begin()
    Path("mine.py").write_text(OURS.format(value=0.25))
    corrected = recipe()
    check_continuation(corrected)
    RunRecord(corrected)
    assert "mine.py has changed: its new code runs from step 11 on" in caplog.text
    kept = begun.run_dir / "own"
    assert (kept / "mine.py").read_text() == OURS.format(value=0.25)
    assert (kept / "mine.py.until_step_10").read_text() == OURS.format(value=0.5)
    caplog.clear()
    RunRecord(corrected)
    assert "has changed" not in caplog.text


WRONG = """
from nemo_grpo.variants.base import RatioConfig
class Wrong(RatioConfig):
    def terms(self, prepared): raise ValueError("no loss")
"""
LOSS = "loss.py:Wrong"
FAULTS = {
    "reward": (["nemo_grpo.rewards={mine.py:nothing: 1.0}"], "a str instead of a number"),
    "loss": (["~loss_fn", f"loss_fn.variant={LOSS}"], "no loss"),
    "data": (["nemo_grpo.task.train_files=[gone.jsonl]"], "gone.jsonl is missing"),
    "adapters": (["policy.megatron_cfg.peft={enabled: true, target_modules: [v_proj]}"], "use [linear_qkv]"),
    "Megatron": (["policy.model_name=megatron"], "convert it with `nemo-grpo convert megatron-"),
    "Hub name": (["policy.model_name=Qwen/Qwen2.5-0.5B"], "`hf download Qwen/Qwen2.5-0.5B --local"),
    "no model": (["policy.model_name=models/x/y"], "'models/x/y' is not a folder; give a"),
}
EMBEDDED = "quickstart"
COMMANDS = {
    "check": ["recipe", "check", EMBEDDED],
    "train": ["train", EMBEDDED],
    "compare": ["compare", EMBEDDED, "--variants", "grpo", "--seeds", "1", "--dry-run"],
    "launch": ["launch", "--dry-run", EMBEDDED],
    "preflight": ["preflight", EMBEDDED],
    "check of a cluster recipe": ["recipe", "check", CLUSTER, MODEL],
    "launch of a cluster recipe": ["launch", "--dry-run", CLUSTER, MODEL],
}


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        *((command, fault) for command in COMMANDS for fault in ("reward", "Megatron")),
        *(("train", fault) for fault in FAULTS if fault not in ("reward", "Megatron")),
        *(("check of a cluster recipe", fault) for fault in ("loss", "data", "adapters")),
        ("compare", "loss"),
    ],
)
def test_every_command_refuses_the_same(command, fault, monkeypatch):
    overrides, said = FAULTS[fault]
    arguments = COMMANDS[command]
    if command == "compare" and fault == "loss":
        arguments, overrides = [*arguments[:3], LOSS, *arguments[4:]], []
    Path("loss.py").write_text(WRONG)
    Path("mine.py").write_text("def brevity(response): return 1\ndef nothing(response): return ''\n")
    Path("megatron/iter_0000010").mkdir(parents=True)
    Path("megatron/iter_0000010/.metadata").touch()
    monkeypatch.setattr(sys, "argv", ["nemo-grpo", *map(str, arguments)])
    done = run(*arguments, *FIRST, *overrides)
    assert done.exit_code != 0
    assert said in f"{done.output} {done.exception}"
    assert not Path("runs").exists()
