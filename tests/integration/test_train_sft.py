"""Whole supervised runs of the embedded engine: losses, layouts, kill and resume, adapters, model folders."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import ROOT
from ranks import run_ranks
from small_runs import (
    AT_THE_ENDS,
    TP2_PP2,
    arguments,
    assert_same_rows,
    begin,
    math_files,
    rows,
    weights_after,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_grpo import UserError
from nemo_grpo.engine.checks import check
from nemo_grpo.engine.loop import train
from nemo_grpo.engine.new_model import starting_model
from nemo_grpo.engine.setup import set_up
from nemo_grpo.tasks import Problem, encode_prompt
from nemo_grpo.tasks.base import stream

SFT = ROOT / "recipes/quickstart-sft.yaml"
SMALL = [
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=1",
    "policy.train_micro_batch_size=4",
    "policy.model_name=${shipped_model:quickstart}",  # losses of a trained model, which are less alike
    "nemo_grpo.new_model=null",
]
NEW = ["policy.model_name=null", "nemo_grpo.new_model={vocab_size: 384, max_position_embeddings: 256}"]
UNPACKED = ["policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=8"]


@pytest.fixture
def sft(recipe):
    return partial(recipe, *SMALL, of=SFT)


def loss_by_transformers(folder: Path, task, prompt, problems: list[tuple[Problem, tuple]]) -> float:
    """Nats per response token, one demonstration at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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


def test_losses_are_the_mean_cross_entropy_of_all_response_tokens(sft):
    r = sft("grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_start=true")
    parts = begin(r)
    task, prompt = parts.rollouts.task, r.nemo_grpo.prompt
    held_out = [(problem, (problem.id,)) for problem in parts.rollouts.problems]
    first = [(task.train_problem(i, r.grpo.seed), (r.grpo.seed, i)) for i in range(8)]
    source = parts.recorder.saver.source
    expected = [loss_by_transformers(source, task, prompt, part) for part in (held_out, first)]
    train(parts)
    start, step = rows(r.run_dir)
    assert start["validation/val_loss"] == pytest.approx(expected[0], rel=1e-5)
    assert 0 < start["time/validation"] < 600
    assert step["loss/total"] == pytest.approx(expected[1], rel=1e-5)


def test_a_run_lowers_the_held_out_loss_and_leaves_what_others_read(sft):
    r = sft("grpo.max_num_steps=20", "grpo.val_period=10", *NEW)
    start = check(r, resume=False)
    with starting_model(r, start.task) as source:
        parts = set_up(r, source, start)
        assert train(parts)
    found = rows(r.run_dir)
    losses = [row["validation/val_loss"] for row in found if "validation/val_loss" in row]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.2
    last = found[-1]
    keys = {"loss/total", "grad_norm", "lr", "length/mean", "tokens/trained", "tokens_per_second"}
    assert keys | {"time/step", "validation/accuracy", "validation/greedy"} <= last.keys()
    assert last["tokens/trained"] == round(sum(8 * row.get("length/mean", 0) for row in found))
    assert (r.run_dir / "checkpoints/latest").read_text() == "step_000020"
    exported = AutoModelForCausalLM.from_pretrained(parts.recorder.folder.hf).state_dict()
    for name, tensor in parts.learner.policy.named_tensors():
        assert torch.equal(exported[name], tensor), name


STEPS = [*SMALL, "grpo.max_num_steps=3", *AT_THE_ENDS]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The folder of a run on one rank, and the weights after it."""
    folder = tmp_path_factory.mktemp("packed")
    (weights,) = run_ranks(1, weights_after, arguments(folder, "packed", *STEPS), recipe=SFT)
    return folder / "packed", weights


@pytest.mark.parametrize(
    ("num_ranks", "overrides"), [(1, UNPACKED), pytest.param(4, TP2_PP2, marks=pytest.mark.slow)]
)
def test_training_does_not_depend_on_microbatches_packing_or_ranks(packed, tmp_path, num_ranks, overrides):
    line = arguments(tmp_path, "other", *STEPS, *overrides)
    for weights in run_ranks(num_ranks, weights_after, line, recipe=SFT):
        torch.testing.assert_close(weights, packed[1], rtol=1e-4, atol=2e-4)
    assert_same_rows(packed[0], tmp_path / "other", "loss/total", "grad_norm")


def test_a_file_of_problems_with_solutions_trains_for_epochs(sft, tmp_path):
    problems = [
        Problem(f"p{i}", f"{i}+1", str(i + 1), {"solution": f"{i} and 1 are \\boxed{{{i + 1}}}"})
        for i in range(12)
    ]
    r = sft(math_files(tmp_path, problems[:8], problems[8:]), "grpo.max_num_steps=3", name="file")
    parts = begin(r)
    shown = parts.rollouts.demonstrations
    first, second = (
        [shown.training(i).responses[0].response.text for i in range(start, start + 8)] for start in (0, 8)
    )
    assert first != second, "another order in the second epoch"
    assert sorted(first) == sorted(second) == sorted(p.metadata["solution"] for p in problems[:8])
    assert train(parts)
    assert math.isfinite(rows(r.run_dir)[-1]["validation/val_loss"])


def test_what_cannot_be_shown_is_refused_before_anything_is_written(sft, packed, tmp_path):
    exported = [f"policy.model_name={packed[0]}/hf"]
    problems = [Problem(f"p{i}", f"{i}+1", "0") for i in range(16)]
    task = math_files(tmp_path, problems[:8], problems[8:])
    with pytest.raises(UserError, match=r"problem 'p\d+' has no metadata.solution to show; add one"):
        begin(sft(*exported, task))
    with pytest.raises(UserError, match=r"max_total_sequence_length=72: problem .* has \d+ tokens; raise it"):
        begin(sft("policy.max_total_sequence_length=72", "policy.generation.max_new_tokens=1"))
    assert not sft().run_dir.exists()
