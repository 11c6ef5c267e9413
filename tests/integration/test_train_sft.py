"""Whole supervised runs of the embedded engine: losses, layouts, kill and resume, adapters, model folders."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks, slow_but
from safetensors.torch import load_file
from test_train import ROOT, TINY, rows, without_time
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_grpo import UserError
from nemo_grpo.engine.supervised import SupervisedTrainer
from nemo_grpo.recipe import load_recipe
from nemo_grpo.tasks import Problem, encode_prompt
from nemo_grpo.tasks.base import stream
from nemo_grpo.tasks.jsonl import write_problems

RECIPE = ROOT / "recipes/quickstart-sft.yaml"
SMALL = [
    *TINY,
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=1",
    "policy.train_micro_batch_size=4",
    "nemo_grpo.warm_start.num_steps=20",
]
UNPACKED = "policy.sequence_packing.enabled=false"
LAYOUTS = {
    "padded": (1, [UNPACKED, "policy.train_micro_batch_size=8"]),
    "padded-mbs1": (1, [UNPACKED, "policy.train_micro_batch_size=1"]),
    "dp2": (2, ["cluster.gpus_per_node=2", UNPACKED]),
    "tp2-pp2": (
        4,
        [
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "policy.megatron_cfg.pipeline_model_parallel_size=2",
            "cluster.gpus_per_node=4",
        ],
    ),
}


def arguments(folder: Path, cache: Path, name: str, *overrides: str) -> list[str]:
    places = [f"nemo_grpo.runs_dir={folder}", f"nemo_grpo.run_name={name}"]
    return [*SMALL, *places, f"nemo_grpo.warm_start.cache_dir={cache}", *overrides]


@pytest.fixture
def recipe(tmp_path, cache):
    def make(*overrides: str, name: str = "run"):
        return load_recipe(RECIPE, arguments(tmp_path, cache, name, *overrides))

    return make


def train(overrides: list[str]) -> dict[str, torch.Tensor]:
    trainer = SupervisedTrainer(load_recipe(RECIPE, overrides))
    trainer.train()
    return {name: tensor.clone() for name, tensor in trainer.policy.named_tensors()}


def loss_by_transformers(folder: Path, task, prompt, problems: list[tuple[Problem, tuple]]) -> float:
    """Nats per response token, one demonstration at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    total, count = 0.0, 0
    for problem, seed in problems:
        start = encode_prompt(tokenizer, prompt, problem)
        text = task.demonstration(problem, stream("demonstration", *seed))
        response = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([start + response])).logits[0, len(start) - 1 : -1]
        logprobs = logits.double().log_softmax(-1)
        total -= float(logprobs.gather(1, torch.tensor(response)[:, None]).sum())
        count += len(response)
    return total / count


def test_losses_are_the_mean_cross_entropy_of_all_response_tokens(recipe):
    r = recipe("grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_end=false")
    trainer = SupervisedTrainer(r)
    task, prompt = trainer.task, r.nemo_grpo.prompt
    held_out = [(problem, (problem.id,)) for problem in trainer.problems]
    first = [(task.train_problem(i, r.grpo.seed), (r.grpo.seed, i)) for i in range(8)]
    expected = [loss_by_transformers(trainer.source, task, prompt, part) for part in (held_out, first)]
    trainer.train()
    start, step = rows(r.run_dir)
    assert start["validation/val_loss"] == pytest.approx(expected[0], rel=1e-5)
    assert step["loss/total"] == pytest.approx(expected[1], rel=1e-5)


def test_a_run_lowers_the_held_out_loss_and_leaves_what_others_read(recipe):
    r = recipe("grpo.max_num_steps=20", "grpo.val_period=10", "policy.megatron_cfg.optimizer.lr=5e-3")
    trainer = SupervisedTrainer(r)
    assert trainer.train()
    found = rows(r.run_dir)
    losses = [row["validation/val_loss"] for row in found if "validation/val_loss" in row]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.2
    last = found[-1]
    keys = {
        "loss/total",
        "grad_norm",
        "lr",
        "length/mean",
        "tokens/trained",
        "tokens_per_second",
        "time/step",
    }
    assert keys <= last.keys()
    assert last["tokens/trained"] == round(sum(8 * row.get("length/mean", 0) for row in found))
    assert {"validation/accuracy", "validation/greedy"} <= last.keys()
    assert (r.run_dir / "checkpoints/latest").read_text() == "step_000020"
    exported = AutoModelForCausalLM.from_pretrained(trainer.run.hf).state_dict()
    for name, tensor in trainer.policy.named_tensors():
        assert torch.equal(exported[name], tensor), name


@pytest.fixture(scope="module")
def packed(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("packed")
    steps = ["grpo.max_num_steps=3", "grpo.val_period=0"]
    return folder, steps, run_ranks(1, train, arguments(folder, cache, "packed", *steps))[0]


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "padded"))
def test_training_does_not_depend_on_microbatches_packing_or_ranks(packed, cache, name):
    folder, steps, expected = packed
    num_ranks, overrides = LAYOUTS[name]
    for weights in run_ranks(num_ranks, train, arguments(folder, cache, name, *steps, *overrides)):
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=2e-4, msg=key)
    for one, other in zip(rows(folder / "packed")[1:], rows(folder / name)[1:], strict=True):
        assert other["loss/total"] == pytest.approx(one["loss/total"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(recipe, tmp_path, cache):
    long = ["grpo.max_num_steps=40", "grpo.val_period=20", "checkpointing.save_period=3"]
    whole = SupervisedTrainer(recipe(*long, name="whole"))
    whole.train()
    line = [sys.executable, "-m", "nemo_grpo.cli", "train", str(RECIPE)]
    line += arguments(tmp_path, cache, "killed", *long)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "killed/metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= 6) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors[-2000:]
    resumed = SupervisedTrainer(recipe(*long, name="killed"), resume=True)
    assert 3 <= resumed.state.step < 40
    assert resumed.state.next_problem == 8 * resumed.state.step
    resumed.train()
    expected = dict(whole.policy.named_tensors())
    for name, tensor in resumed.policy.named_tensors():
        assert torch.equal(tensor, expected[name]), name
    assert without_time(resumed.run.path) == without_time(whole.run.path)


def test_adapters_train_in_bf16_on_a_model_folder(recipe):
    start = SupervisedTrainer(recipe("grpo.max_num_steps=1", name="start"))
    start.train()
    r = recipe(
        *(f"policy.model_name={start.run.hf}", "nemo_grpo.warm_start=null", "policy.precision=bfloat16"),
        *("policy.megatron_cfg.peft={enabled: true, dim: 4, alpha: 8}", "grpo.max_num_steps=10"),
        *("policy.megatron_cfg.optimizer.lr=1e-2", "grpo.val_period=10"),
        name="lora",
    )
    SupervisedTrainer(r).train()
    losses = [row["validation/val_loss"] for row in rows(r.run_dir) if "validation/val_loss" in row]
    assert losses[-1] < losses[0]
    adapter = load_file(r.run_dir / "hf-adapter/adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)


def test_a_file_of_problems_with_solutions_trains_for_epochs(recipe, tmp_path):
    problems = [
        Problem(f"p{i}", f"{i}+1", str(i + 1), {"solution": f"{i} and 1 are \\boxed{{{i + 1}}}"})
        for i in range(12)
    ]
    files = [
        write_problems(tmp_path / f"{name}.jsonl", part)
        for name, part in (("train", problems[:8]), ("held-out", problems[8:]))
    ]
    task = f"{{_override_: true, name: math, train_files: [{files[0]}], validation_files: [{files[1]}]}}"
    r = recipe(f"nemo_grpo.task={task}", "grpo.max_num_steps=3", name="file")
    trainer = SupervisedTrainer(r)
    first, second = (
        [trainer.demonstrations.training(i).responses[0].text for i in range(start, start + 8)]
        for start in (0, 8)
    )
    assert first != second, "another order in the second epoch"
    assert sorted(first) == sorted(second) == sorted(p.metadata["solution"] for p in problems[:8])
    assert trainer.train()
    assert math.isfinite(rows(r.run_dir)[-1]["validation/val_loss"])


def test_what_cannot_be_shown_is_refused_before_anything_is_written(recipe, tmp_path):
    start = SupervisedTrainer(recipe("grpo.max_num_steps=1", name="start"))
    start.train()
    files = [
        write_problems(
            tmp_path / f"{name}.jsonl", [Problem(f"{name}{i}", f"{name}{i}+1", "0") for i in range(8)]
        )
        for name in ("train", "held-out")
    ]
    task = f"{{_override_: true, name: math, train_files: [{files[0]}], validation_files: [{files[1]}]}}"
    model = (f"policy.model_name={start.run.hf}", "nemo_grpo.warm_start=null")
    with pytest.raises(UserError, match=r"problem 'held-out\d' has no metadata.solution to show; add one"):
        SupervisedTrainer(recipe(*model, f"nemo_grpo.task={task}"))
    with pytest.raises(UserError, match=r"max_total_sequence_length=72: problem .* has \d+ tokens; raise it"):
        SupervisedTrainer(recipe("policy.max_total_sequence_length=72", "policy.generation.max_new_tokens=1"))
    assert not (tmp_path / "run").exists()
