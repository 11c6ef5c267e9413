"""Rows of users' files as problems: columns by other names, nested fields, conversations, Parquet."""

import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, parse_task
from nemo_grpo.tasks.jsonl import check_columns, read_problems, write_problems
from nemo_grpo.tasks.rows import problem_of

VERL = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "1 + 1?"},
]


def read(row, **columns):
    return problem_of(row, columns, "folder/a.jsonl:3")


def test_columns_have_the_names_of_the_recipe_and_further_ones_are_metadata():
    row = {"problem": "1 + 1?", "solution": 2, "level": 3, "metadata": {"kind": "sum"}}
    problem = read(row, question="problem", answer="solution")
    assert problem == Problem("a.jsonl:3", "1 + 1?", "2", {"level": 3, "kind": "sum"})


def test_dots_lead_into_nested_fields_unless_a_column_has_that_name():
    columns = {"id": "extra_info.index", "question": "prompt", "answer": "reward_model.ground_truth"}
    problem = read(VERL, **columns)
    assert (problem.id, problem.question, problem.answer, problem.history) == ("7", "1 + 1?", "2", ())
    assert problem.metadata == {key: VERL[key] for key in ("data_source", "reward_model", "extra_info")}
    assert read(VERL | {"reward_model.ground_truth": "3"}, **columns).answer == "3"


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (
            {"problem": "q", "solution": "a"},
            {},
            "folder/a.jsonl:3: question is missing among problem, solution; write nemo_grpo.task.columns: "
            "{question: problem, answer: solution}",
        ),
        (VERL, {}, "columns: {question: prompt, answer: reward_model.ground_truth}"),
        (
            {"prompt": "q", "final_answer": "a"},
            {"question": "prompt"},
            "columns: {question: prompt, answer: final_answer}",
        ),
        ({"prompt": "q", "label": "a"}, {"question": "prompt", "answer": "lable"}, "lable is missing among"),
        ({"q": "q", "answer": "a"}, {}, "question is missing among q, answer; name its column"),
        (VERL, {"question": "prompt", "answer": "reward_model"}, "answer={"),
    ],
)
def test_a_missing_column_names_the_line_to_write(row, columns, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read(row, **columns)


def test_a_conversation_is_its_last_message_and_its_history():
    problem = read({"prompt": TALK, "answer": "2"}, question="prompt")
    assert problem == Problem("a.jsonl:3", "1 + 1?", "2", {}, tuple(TALK[:3]))
    reply = {"role": "assistant", "content": "2"}  # the answer, where there is no other
    assert read({"messages": [*TALK, reply]}, question="messages") == problem
    with pytest.raises(UserError, match="the last message has role assistant; end with the user's"):
        read({"question": [*TALK, reply], "answer": "2"})


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
    assert read({"question": [{"role": "user", "content": parts}], "answer": 2}).question == "1 + 1?"


@pytest.mark.parametrize(
    "message", ["Hi", {"role": "user"}, {"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
)
def test_a_message_that_is_no_text_is_refused(message):
    with pytest.raises(UserError, match=r"a.jsonl:3: .*: a message is \{role, content\}, its content"):
        read({"question": [message], "answer": "a"})
    with pytest.raises(UserError, match="a conversation without messages"):
        read({"question": [], "answer": "a"})


def test_a_written_conversation_is_read_back(tmp_path):
    problem = Problem("p", "1 + 1?", "2", {"level": 1}, tuple(TALK[:3]))
    assert read_problems([write_problems(tmp_path / "a.jsonl", [problem])]) == [problem]


def test_parquet_gives_the_problems_of_the_same_json_lines(tmp_path):
    rows = [VERL, VERL | {"prompt": [*TALK[:3], {"role": "user", "content": "2 + 2?"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"question": "prompt", "answer": "reward_model.ground_truth"}
    first, second = (
        [replace(one, id=one.id.partition(":")[2]) for one in read_problems([path], columns=columns)]
        for path in (tmp_path / "a.parquet", tmp_path / "a.jsonl")
    )
    assert first == second
    assert (first[0].id, len(first[1].history)) == ("1", 3)


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(UserError, match=r"a.parquet: not Parquet \("):
        read_problems([tmp_path / "a.parquet"])
    with pytest.raises(UserError, match=r"b.parquet: .*No such file"):
        read_problems([tmp_path / "b.parquet"])


def test_columns_are_a_task_s_and_only_of_what_a_problem_has(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"problem": "1 + 1?", "solution": "2"}\n')
    section = {"name": "math", "train_files": [str(tmp_path / "a.jsonl")]}
    columns = {"question": "problem", "answer": "solution"}
    task = parse_task({**section, "columns": columns}).build()
    assert task.train_problem(0, 0) == Problem("a.jsonl:1", "1 + 1?", "2")
    with pytest.raises(UserError, match=r"train_files: .*columns: \{question: problem, answer: solution\}"):
        parse_task(section).build()
    with pytest.raises(UserError, match=r"columns\.qestion"):
        parse_task({**section, "columns": {"qestion": "problem"}})


def test_a_held_out_question_is_recognised_after_any_other_turns(tmp_path):
    asked = [Problem("a", "And  now?", "1", {}, tuple(TALK[:3])), Problem("c", "And then?", "1")]
    train = write_problems(tmp_path / "t.jsonl", asked)
    held_out = write_problems(tmp_path / "v.jsonl", [Problem("b", "And now?", "1", {}, tuple(TALK[:1]))])
    task = parse_task({"name": "math", "train_files": [train], "validation_files": [held_out]}).build()
    assert [problem.id for problem in task.train] == ["c"]


def test_a_file_with_the_standard_names_needs_no_mapping(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "p", "gt": "1", "answer": "worked"}\n')
    (tmp_path / "v.jsonl").write_text('{"id": "v", "question": "q", "answer": "2"}\n')
    files = {"train_files": [str(tmp_path / "t.jsonl")], "validation_files": [str(tmp_path / "v.jsonl")]}
    mapped = {"name": "math", "columns": {"question": "prompt", "answer": "gt"}, **files}
    config = parse_task(mapped)
    task = config.build()
    assert [(one.question, one.answer) for one in (*task.train, *task.validation)] == [("p", "1"), ("q", "2")]
    check_columns(config)
    mistyped = parse_task(mapped | {"columns": {"question": "prompt", "answer": "gtt"}})
    with pytest.raises(
        UserError, match=r"columns\.answer=gtt: no file has this column; the first has prompt"
    ):
        check_columns(mistyped)


@pytest.mark.parametrize(
    ("info", "line"),
    [
        ("dataset_info.json", r"`load_from_disk\('\S+/ds'\)\.to_parquet\('ds' \+ '\.parquet'\)`"),
        ("dataset_dict.json", r"`load_from_disk\('\S+/ds'\)\[\"train\"\]\.to_parquet"),
        ("other.json", r"ds is a folder; name its files"),
    ],
)
def test_a_folder_of_datasets_is_refused_with_the_line_that_writes_a_file(tmp_path, info, line):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / info).touch()
    with pytest.raises(UserError, match=line):
        read_problems([tmp_path / "ds"])


def test_images_have_no_earlier_turns(tmp_path):
    (tmp_path / "a.png").touch()
    images = {"images": ["a.png"]}
    system = write_problems(tmp_path / "s.jsonl", [Problem("a", "q", "1", images, tuple(TALK[:1]))])
    (read,) = read_problems([system], with_images=True)
    assert read.history == tuple(TALK[:1])
    turns = write_problems(tmp_path / "t.jsonl", [Problem("a", "q", "1", images, tuple(TALK[:3]))])
    with pytest.raises(UserError, match="earlier turns beside images"):
        read_problems([turns], with_images=True)
