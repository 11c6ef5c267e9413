"""A recipe's files of problems: looked for and counted before any GPU is asked for."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.evaluate.benchmarks import load_benchmark
from nemo_grpo.evaluate.config import EvalConfig
from nemo_grpo.launch.preflight import Job, recipe_and_data
from nemo_grpo.recipe import load_recipe
from nemo_grpo.run.recipe_checks import check_data, missing_files, remedies
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import jsonl

CLUSTER = "cw_grpo/cw_grpo-qwen2.5-math-7b-instruct-1n8g"
MINE = [
    "nemo_grpo.task={name: math, train_files: [train.jsonl], validation_files: [validation.jsonl]}",
    "nemo_grpo.prompt={}",
]

NO_VALIDATION = ["grpo.val_period=0", "grpo.num_prompts_per_step=1", "checkpointing.metric_name=null"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, number):
    lines = [json.dumps({"question": f"{name} {i}?", "answer": i}) for i in range(number)]
    Path(name).write_text("\n".join(lines) + "\n")


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_remedy_for_missing_sets_is_one_command():
    recipe = load_recipe(CLUSTER)
    assert len(missing_files(recipe)) > 1
    (message,) = remedies(check_data(recipe).missing)
    names = " ".join(Path(file).stem for file in missing_files(recipe))
    assert f"`nemo-grpo data prepare {names} --out data`" in message
    (own,) = remedies(["mine.jsonl", "mine.jsonl"])
    assert own.startswith("nemo_grpo.task: mine.jsonl is missing; correct the path, or write it")


def test_counts_are_compared_with_what_the_recipe_draws():
    write("train.jsonl", 8)
    write("validation.jsonl", 3)
    checked = check_data(load_recipe("quickstart", [*MINE, "grpo.max_val_samples=4"]))
    assert checked.errors == (
        "grpo.max_val_samples=4: nemo_grpo.task.validation_files has 3 problems; use 3 or fewer",
    )
    few = check_data(load_recipe("quickstart", [*MINE, "grpo.max_val_samples=3"]))
    assert few.notes[0].startswith("grpo.num_prompts_per_step=16: nemo_grpo.task.train_files has 8 problems")
    fitting = ["grpo.max_val_samples=3", "grpo.num_prompts_per_step=8"]
    good = check_data(load_recipe("quickstart", [*MINE, *fitting]))
    assert good.errors == good.notes == ()
    assert good.found == "8 problems in train_files, 3 problems in validation_files: 160 epochs of training"


def test_questions_of_training_in_the_validation_are_noted():
    write("train.jsonl", 8)
    Path("validation.jsonl").write_text("\n".join(Path("train.jsonl").read_text().splitlines()[2:5]))
    fitting = [*MINE, "grpo.max_val_samples=3", "grpo.num_prompts_per_step=8"]
    repeated, dropped = check_data(load_recipe("quickstart", fitting)).notes
    assert "grpo.num_prompts_per_step=8: nemo_grpo.task.train_files has 5 problems" in repeated
    assert dropped == (
        "nemo_grpo.task.train_files: 3 of 8 problems are in validation_files, too; "
        "training leaves them out and has 5"
    )


def test_files_that_a_run_would_refuse_are_refused():
    write("train.jsonl", 8)
    Path("empty.jsonl").touch()
    Path("array.jsonl").write_text(json.dumps([{"question": "a?", "answer": 1}], indent=1))
    for files, said in (
        ("name: math, train_files: [train.jsonl], validation_files: [train.jsonl]", "no training problems"),
        ("name: math, train_files: [empty.jsonl], validation_files: [train.jsonl]", "no training problems"),
        ("name: math, train_files: [], validation_files: [train.jsonl]", "no training problems"),
        ("name: math, train_files: [train.jsonl], validation_files: []", "name files that have some"),
        ("name: logic, train_files: [train.jsonl], validation_files: [train.jsonl]", "gives nobody's role"),
        (
            "name: math, train_files: [train.jsonl], validation_files: [array.jsonl]",
            "array.jsonl:1: a JSON array; write one object per line",
        ),
    ):
        changes = ["grpo.max_val_samples=8", f"nemo_grpo.task={{{files}}}"]
        (error,) = check_data(load_recipe("quickstart", changes)).errors
        assert said in error


def test_recipe_check_names_missing_data_once_for_all_recipes_and_passes():
    done = run(
        "recipe", "check", *(Path(__file__).parents[3] / "recipes" / paper for paper in ("cw_grpo", "gpg"))
    )
    assert done.exit_code == 0, done.output
    assert done.output.count("nemo-grpo data prepare") == 1


def test_every_file_is_read_once_until_it_changes(monkeypatch):
    read = []
    real = jsonl.read_problems
    monkeypatch.setattr(jsonl, "read_problems", lambda files, **how: read.append(files) or real(files, **how))
    write("train.jsonl", 40)
    write("validation.jsonl", 3)
    for available in (3, 4):
        write("validation.jsonl", available)
        check_data(load_recipe(CLUSTER, [*MINE, f"grpo.max_val_samples={available}"]))
    assert read == [[Path("validation.jsonl")], [Path("train.jsonl")], [Path("validation.jsonl")]]


def test_the_preflight_refuses_a_job_without_its_data():
    job = Job(["n1"], [])
    assert [row.verdict for row in recipe_and_data(load_recipe(CLUSTER), job)] == ["refused"]
    write("train.jsonl", 20)
    write("validation.jsonl", 256)
    (row,) = recipe_and_data(load_recipe("quickstart", MINE), job)
    assert (row.verdict, row.finding) == (
        "ok",
        "20 problems in train_files, 256 problems in validation_files: 128 epochs of training",
    )


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def notes_on(rows, *overrides):
    write_rows("train.jsonl", rows)
    write("validation.jsonl", 3)
    recipe = load_recipe(
        "quickstart", [*MINE, "grpo.max_val_samples=3", "grpo.num_prompts_per_step=1", *overrides]
    )
    found = check_data(recipe)
    assert found.errors == ()
    return found.notes


DIFFERENT_QUESTIONS = [{"question": f"{i}?", "answer": i} for i in range(4)]


def test_different_questions_have_no_notes():
    assert notes_on(DIFFERENT_QUESTIONS) == ()


def test_repeated_rows_are_noted():
    (repeated,) = notes_on(DIFFERENT_QUESTIONS * 3)
    assert "train_files: 12 problems are 4 different questions" in repeated


def test_questions_with_two_answers_are_noted():
    repeated, unclear = notes_on([*DIFFERENT_QUESTIONS, {"question": " 2? ", "answer": 7}])
    assert "5 problems are 4 different questions" in repeated
    assert "questions with several answers: 1, such as '2?'" in unclear


@pytest.mark.parametrize(
    ("asks", "prepared"),
    [
        ("The last line of your response should be of the form Answer: $Answer.", "dapo-math-17k"),
        ('Put your answer on its own line after "Answer:".', "dapo-math-17k"),
        ('Think step by step and output the final answer after "####".', "gsm8k"),
        ("What is the Answer: to everything?", None),
        ("Put the final answer in \\boxed{}.", None),
    ],
)
def test_an_instruction_for_a_form_that_is_never_read_is_noted(asks, prepared):
    notes = notes_on([{"question": f"{i}? {asks}", "answer": i} for i in range(4)])
    assert bool(notes) == (prepared is not None)
    if prepared is not None:
        assert "4 of 4 questions ask for" in notes[0]
        assert f"`nemo-grpo data prepare {prepared}` writes" in notes[0]


@pytest.mark.parametrize(
    ("template_opens", "is_open", "noted"),
    [
        (True, False, "think_is_open=false: the chat template of"),
        (False, True, "think_is_open=true: the prompt does not end with <think>"),
        (True, True, None),
        (False, False, None),
    ],
)
@pytest.mark.parametrize("form", ["think", "boxed"])
def test_a_chat_template_that_opens_the_thinking_is_compared_with_the_task(
    template_opens, is_open, noted, form
):
    words = Tokenizer(WordLevel({"<unk>": 0}, "<unk>"))
    words.pre_tokenizer = Whitespace()  # the template's line break after the tag is no token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.add_tokens(["user", "assistant", "<think>", "</think>"])
    tokenizer.chat_template = (
        "{% for m in messages %}user {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant "
        + ("<think>\n" if template_opens else "{# <think> #}")
        + "{% endif %}"
    )
    tokenizer.save_pretrained("model")
    task = f"{{name: math, form: {form}, think_is_open: {str(is_open).lower()}, train_files: [train.jsonl]}}"
    model = [
        "policy.model_name=model",
        "nemo_grpo.prompt.use_chat_template=true",
    ]
    write("train.jsonl", 4)
    recipe = load_recipe("quickstart", [*MINE, f"nemo_grpo.task={task}", *model, *NO_VALIDATION])
    notes = check_data(recipe).notes
    assert bool(notes) == (noted is not None and form == "think")
    if notes:
        assert noted in notes[0]


def test_a_name_on_the_hub_is_answered_with_the_line_that_writes_its_file():
    (message,) = remedies(["openai/gsm8k"])
    assert "`load_dataset('openai/gsm8k', split='train').to_parquet('gsm8k.parquet')`" in message


def test_training_without_shuffling_keeps_the_order_of_the_files():
    write("train.jsonl", 6)
    write("validation.jsonl", 3)
    orders = []
    for shuffle in ("true", "false"):
        recipe = load_recipe("quickstart", [*MINE, f"++data.shuffle={shuffle}", "grpo.max_val_samples=3"])
        task = recipe.task.build()
        orders.append([task.train_problem(index, 0).answer for index in range(12)])
    in_file = [str(i) for i in range(6)]
    assert orders[1] == in_file * 2
    assert orders[0] != orders[1]
    assert sorted(orders[0][:6]) == in_file
    with pytest.raises(UserError, match=r"data\.shuffle=false: \w+ makes its problems and has no file"):
        load_recipe("quickstart", ["++data.shuffle=false"])


def test_eval_without_a_recipe_says_where_the_columns_are_named(here):
    write_rows("dapo.jsonl", [{"prompt": "1?", "reward_model": {"ground_truth": "1"}}])
    with pytest.raises(
        UserError, match=r"write in a recipe that --recipe names nemo_grpo\.task\.columns: \{"
    ):
        load_benchmark("dapo.jsonl", EvalConfig(model=str(here), data_dir=here))
