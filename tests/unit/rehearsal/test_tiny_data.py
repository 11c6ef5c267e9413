"""A rehearsal's problems: made up where its files are missing, with rewarded demonstrations."""

import json
import random
from pathlib import Path

import pytest

from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal import tiny_data
from nemo_grpo.rehearsal.tiny_data import NUM_LEARNT, ToyTask, problems_of
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import reward_of
from nemo_grpo.tasks.jsonl import read_problems, write_problems

OF_EACH_TASK = [
    "cw_grpo/cw_grpo-r1-distill-qwen-1.5b-1n8g.yaml",
    "erpo/erpo-qwen2.5-7b-1n8g.yaml",
    "tr_grpo/tr_grpo-qwen2.5-3b-instruct-logic-1n8g.yaml",
    "tr_grpo/tr_grpo-qwen2.5-3b-search-1n8g.yaml",
    "gpg/gpg-qwen2.5-vl-3b-lisa-1n8g.yaml",
    "gpg/gpg-qwen2.5-vl-3b-few-shot-1n8g.yaml",
    "gpg/gpg-qwen2.5-vl-3b-geoqa-1n8g.yaml",
]


@pytest.mark.parametrize("name", OF_EACH_TASK)
def test_invented_problems_have_correct_and_wrong_answers(name, tmp_path):
    recipe = load_recipe(name)
    problems = problems_of(recipe, tmp_path)
    assert not problems.are_real
    assert "is missing" in problems.origin
    task = ToyTask(recipe, problems.task)
    assert len(task.learnt_problems) == NUM_LEARNT
    rng = random.Random(0)
    for problem in task.learnt_problems:
        score = task.score(problem, task.best_response(problem, rng))
        assert score["accuracy"] == 1, "the demonstration is right"
    rewards = {
        reward_of(task.score(problem, task.demonstration(problem, rng)), task.rewards)
        for problem in task.learnt_problems
        for _ in range(4)
    }
    assert len(rewards) > 1, "and as often it is the answer to another problem"


def test_a_recipe_whose_files_are_here_is_rehearsed_on_them(tmp_path):
    path = OF_EACH_TASK[1]
    made = problems_of(load_recipe(path), tmp_path).task
    train = write_problems(tmp_path / "own.jsonl", made.build().train)
    overrides = [
        f"nemo_grpo.task.train_files=[{train}]",
        f"nemo_grpo.task.validation_files={json.dumps(made.validation_sets)}",
        f"grpo.max_val_samples={len(read_problems(made.validation_sets.values()))}",
    ]
    problems = problems_of(load_recipe(path, overrides), tmp_path / "unused")
    assert problems.are_real
    assert problems.task.train_files == (train,)
    assert problems.task.validation_sets == made.validation_sets
    assert not (tmp_path / "unused").exists()


PICTURES = {"dataset_name": "clevr-cogent", "processor": "vlm_hf_data_processor", "env_name": "clevr-cogent"}


def of_nemo_rl(**data):
    sets = json.dumps({"train": data, "validation": data})
    environments = '{"clevr-cogent": {"num_workers": 8}}'
    own = "{_override_: true, runs_dir: runs, run_name: pictured}"
    settings = [f"nemo_grpo={own}", f"data={sets}", f"env={environments}"]
    return load_recipe(OF_EACH_TASK[-1], settings)


def test_pictures_stand_where_nemo_rl_reads_its_downloads(tmp_path):
    recipe = of_nemo_rl(**PICTURES)
    tiny_data.refuse_data(recipe)
    problems = problems_of(recipe, tmp_path)
    assert (problems.are_real, problems.origin) == (False, "pictures in place of clevr-cogent")
    task = problems.task.build()
    train, validation = tiny_data.PICTURED["clevr-cogent"]
    for name, known in ((train, task.train), (validation, task.validation)):
        rows = [json.loads(line) for line in (tmp_path / name / "metadata.jsonl").read_text().splitlines()]
        assert [(row["problem"], row["solution"]) for row in rows] == [
            (problem.question, f"<answer> {problem.answer} </answer>") for problem in known
        ]
        for row, problem in zip(rows, known, strict=True):
            (image,) = problem.metadata["images"]
            assert (tmp_path / name / row["file_name"]).read_bytes() == Path(image).read_bytes()
    questions = [problem.question for problem in (*task.train, *task.validation)]
    assert len(set(questions)) == len(questions), "a problem is recognised by its question alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_name": "geometry3k"}, "has pictures for clevr-cogent alone"),
        ({"processor": "code_processor"}, "data.train.env_name=clevr-cogent: a rehearsal has small problems"),
    ],
)
def test_data_that_nothing_stands_for_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        tiny_data.refuse_data(of_nemo_rl(**PICTURES | change))
