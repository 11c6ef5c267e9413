"""Tasks from files, from the recipe to a trained step of the embedded engine."""

import random
from dataclasses import replace

import pytest
from small_runs import lines_of, math_files, rows

from nemo_grpo import UserError
from nemo_grpo.engine.checks import check
from nemo_grpo.engine.loop import train
from nemo_grpo.engine.run import begin
from nemo_grpo.tasks import parse_task
from nemo_grpo.tasks.jsonl import write_problems

SMALL = ["grpo.num_prompts_per_step=2", "grpo.val_at_start=false", "nemo_grpo.warm_start.num_steps=20"]


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
    samples = lines_of(r.run_dir / "samples.jsonl")
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
    assert parts.saver.store.metric == "validation/other/accuracy"
    assert all(f"user\n{sample['question']}<|im_end|>" in sample["prompt"] for sample in samples)


def test_vision_task_is_refused_before_anything_is_made(recipe):
    r = recipe("nemo_grpo.task.name=vision_counting")
    message = r"nemo_grpo\.task\.name=vision_counting: its images need the cluster"
    with pytest.raises(UserError, match=message):
        check(r, resume=False)
    assert not r.run_dir.exists()


def test_logic_puzzles_train_on_the_graded_reward(recipe):
    r = recipe(
        *(*SMALL, "grpo.max_num_steps=1", "grpo.val_at_end=false"),
        "nemo_grpo.task={name: logic, people: [2], validation_people: [2, 3], num_names: 3}",
        "nemo_grpo.rewards={_override_: true, accuracy: 0.0, format_signed: 1.0, answer: 1.0}",
    )
    train(begin(r))
    for sample in lines_of(r.run_dir / "samples.jsonl"):
        scores = sample["scores"]
        assert sample["reward"] == scores["format_signed"] + scores["answer"]
        assert scores["answer"] in (2.0, -1.5, -2.0)
