"""Problems from files."""

import json
import pickle
from collections import Counter

import pytest

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import parse_task
from nemo_grpo.tasks.base import by_validation_set
from nemo_grpo.tasks.jsonl import FileTask, FileTaskConfig, read_problems


class Config(FileTaskConfig):
    name: str = "files"

    def build(self):
        return FileTask(self)


def write(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return str(path)


def entry(number, **more):
    return {"id": f"p{number}", "question": f"What is {number}?", "answer": str(number), **more}


def test_read_problems_keeps_order_and_metadata_and_skips_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(entry(2, metadata={"level": 3})) + "\n\n" + json.dumps(entry(1)) + "\n")
    first, second = read_problems([path])
    assert (first.id, first.question, first.answer, first.metadata) == ("p2", "What is 2?", "2", {"level": 3})
    assert (second.id, second.metadata) == ("p1", {})


@pytest.mark.parametrize(
    ("answer", "read", "solution"),
    [
        ("He has 2*600=<<2*600=1200>>1200.\n#### 1,200 \n", "1200", "He has 2*600=1200."),
        ("a\n####-1,5", "-1,5", "a"),  # no thousands
        ("a\n#### 3\nb #### 4", "4", "a\n#### 3\nb"),
        ("a####3", "a####3", None),
        ("a ##### 3", "a ##### 3", None),
        ("#### 3\nmore", "#### 3\nmore", None),
    ],
)
def test_an_answer_in_the_form_of_gsm8k_is_read(tmp_path, answer, read, solution):
    (problem,) = read_problems([write(tmp_path / "a.jsonl", {"question": "q", "answer": answer})])
    assert (problem.answer, problem.metadata.get("solution")) == (read, solution)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2: not JSON"),
        ("[" * 100_000, "a.jsonl:2: not JSON"),
        ("7", "a.jsonl:2: int instead of an object"),
        ("[1]", r"a.jsonl:2: a JSON array; write one object per line, as `jq -c .\[\]` does"),
        ('{"id": "x", "question": "q"}', "answer is missing among id, question; name its column"),
        ('{"question": "q", "answer": true}', "answer=true must be a non-empty text or a number"),
        ('{"question": "q", "answer": NaN}', "answer=NaN must be a non-empty text or a number"),
        ('{"id": 0.5, "question": "q", "answer": "a"}', "id=0.5 must be a non-empty text or a whole number"),
        ('{"id": "x", "question": " ", "answer": "a"}', 'question=" " must be a non-empty text'),
        ('{"id": "x", "question": "q", "answer": "a", "metadata": 1}', "metadata=1 must be an object"),
        ('{"id": "p1", "question": "q", "answer": "a"}', "a.jsonl:2: id 'p1' is repeated"),
        ('{"question": "q", "answer": "a\\n####"}', "a.jsonl:2: answer ends in '####' without an answer"),
        (r'{"question": "q", "answer": "a", "metadata": {"answers": ["\udc00"]}}', "a lone surrogate"),
    ],
)
def test_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(entry(1)) + "\n" + line + "\n")
    with pytest.raises(UserError, match=message) as error:
        read_problems([path])
    assert "\n" not in str(error.value)


def test_ids_may_be_missing_and_answers_numbers(tmp_path):
    rows = [{"question": "a", "answer": 43}, {"id": 7, "question": "b", "answer": -0.5}]
    problems = read_problems([write(tmp_path / "a.jsonl", *rows)])
    assert [(p.id, p.answer) for p in problems] == [("a.jsonl:1", "43"), ("7", "-0.5")]


def test_references_that_no_response_can_give_are_named(tmp_path, caplog):
    """A box or a unit may be in a reference, a sentence may not."""
    rows = [{"question": "?", "answer": answer} for answer in (r"\boxed{42}", r"12\text{ apples}", "even")]
    task = parse_task({"name": "math", "train_files": [write(tmp_path / "a.jsonl", *rows)]}).build()
    assert not caplog.text
    for problem, answer in zip(task.train, ("42", "12", r"\text{Even}"), strict=True):
        assert task.score(problem, f"\\boxed{{{answer}}}")["accuracy"] == 1.0
    answers = ["5:", "1" * 1001, "(" * 21 + "1" + ")" * 21, "\\frac{1}{2", "$", "a}b", "10\u201320", 1e-7]
    answers += ["The answer is 42.", "Answer: 42", "so $x$ is 5"]
    rows = [{"question": "?", "answer": answer} for answer in answers]
    parse_task({"name": "math", "train_files": [write(tmp_path / "b.jsonl", *rows)]}).build()
    assert "8 of 11 problems can never be answered correctly, the first is 'b.jsonl:2'" in caplog.text
    assert "more than 1000 characters" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "'a.jsonl:1' is repeated; it stands for a row without id of a file a.jsonl; rename one"),
        ({"id": "x"}, "'x' is repeated; ids must be unique over all files"),
    ],
)
def test_a_repeated_id_says_where_it_comes_from(tmp_path, row, message):
    paths = [tmp_path / folder / "a.jsonl" for folder in "pq"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps(row | {"question": "q", "answer": 1}))
    with pytest.raises(UserError, match=f"q/a.jsonl:1: id {message}"):
        read_problems(paths)


def test_missing_or_undecodable_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="data prepare"):
        read_problems([tmp_path / "none.jsonl"])
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}')
    with pytest.raises(UserError, match="not UTF-8"):
        read_problems([tmp_path / "latin.jsonl"])


def test_images_are_found_beside_their_file(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"")
    path = write(tmp_path / "a.jsonl", entry(1, metadata={"images": ["images/a.png"]}))
    (problem,) = read_problems([path], with_images=True)
    assert problem.metadata["images"] == [str(tmp_path / "images" / "a.png")]
    for images, message in (["b.png"], "b.png is missing"), ([], "metadata.images"), (5, "metadata.images"):
        path = write(tmp_path / "b.jsonl", entry(1, metadata={"images": images}))
        with pytest.raises(UserError, match=message):
            read_problems([path], with_images=True)


def test_every_epoch_goes_through_all_problems_in_another_order(tmp_path):
    task = Config(train_files=[write(tmp_path / "a.jsonl", *map(entry, range(10)))]).build()
    epochs = [[task.train_problem(10 * epoch + i, 3).id for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == [f"p{i}" for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = pickle.loads(pickle.dumps(task))  # as asynchronous rollouts send it to their worker
    assert again.train_problem(27, 3).id == epochs[2][7]
    assert [again.train_problem(i, 4).id for i in range(10)] != epochs[0]


def test_questions_of_the_validation_files_are_left_out_of_training(tmp_path):
    train = write(tmp_path / "train.jsonl", *map(entry, range(6)))
    same = {"id": "other", "question": "What  is\n3?", "answer": "3"}
    validation = write(tmp_path / "validation.jsonl", same, entry(4))
    task = Config(train_files=[train], validation_files=[validation]).build()
    assert [problem.id for problem in task.validation_problems(2)] == ["other", "p4"]
    assert {task.train_problem(i, 0).id for i in range(4)} == {"p0", "p1", "p2", "p5"}


def test_a_part_of_the_validation_problems_holds_every_stratum_in_proportion(tmp_path):
    """TR-GRPO's puzzles come by size: the first 256 of 500 would have 3 to 5 people."""
    sizes = [3] * 20 + [4] * 20 + [6] * 40 + [7] * 20
    rows = [entry(i, metadata={"num_people": n}) for i, n in enumerate(sizes)]
    config = Config(validation_files=[write(tmp_path / "a.jsonl", *rows)])
    task = config.build()
    taken = task.validation_problems(25)
    assert Counter(p.metadata["num_people"] for p in taken) == {3: 5, 4: 5, 6: 10, 7: 5}
    again = config.build()
    assert again.validation_problems(50)[:25] == taken
    assert task.validation_problems(100) == task.validation  # all, as in the file


def three_sets(folder, form=dict):
    """Validation files of 2, 6 and 12 problems: p0, p1; p2 to p7; p8 to p19."""
    parts = {"a": range(2), "b": range(2, 8), "c": range(8, 20)}
    files = {name: write(folder / f"{name}.jsonl", *map(entry, part)) for name, part in parts.items()}
    return Config(validation_files=files if form is dict else [*files.values()])


@pytest.mark.parametrize("form", [dict, list])
def test_several_validation_files_are_sets_by_name(tmp_path, form):
    config = three_sets(tmp_path, form)
    assert config.validation_sets == {name: f"{tmp_path}/{name}.jsonl" for name in "abc"}
    assert config.files == tuple(config.validation_sets.values())
    problems = config.build().validation_problems(20)
    found = {name: [p.id for p in some] for name, some in by_validation_set(problems).items()}
    parts = {"a": range(2), "b": range(2, 8), "c": range(8, 20)}
    assert found == {name: [f"p{i}" for i in part] for name, part in parts.items()}
    single = Config(validation_files={"a": write(tmp_path / "x", entry(1))})
    assert [p.metadata for p in single.build().validation_problems(1)] == [{}]  # no name of a set


def test_a_part_of_the_validation_problems_has_every_set(tmp_path):
    """In proportion 2 : 6 : 12, but one of the smallest even where a proportion would be none."""
    task = three_sets(tmp_path).build()
    for number, expected in ((10, [1, 3, 6]), (3, [1, 1, 1]), (4, [1, 1, 2])):
        sets = by_validation_set(task.validation_problems(number))
        assert [len(sets[name]) for name in "abc"] == expected
    with pytest.raises(UserError, match=r"max_val_samples=2: \S+validation_files has 3 sets; use 3 or more"):
        task.validation_problems(2)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a/test.jsonl", "b/test.jsonl"], "=.*: two files give their sets one name; write {name: FILE, "),
        (5, "=5: it must be a list"),
        ([1], r"\.0=1: Input should be a valid string"),
    ],
)
def test_unusable_validation_files_are_a_user_error(files, message):
    with pytest.raises(UserError, match=f"nemo_grpo.task.validation_files{message}"):
        parse_task({"name": "math", "validation_files": files})


def test_made_up_problems_keep_the_validation_sets(tmp_path):
    config = parse_task({"name": "math", "validation_files": ["aime.jsonl", "amc.jsonl"]})
    made = config.made_up(tmp_path, 8)
    assert list(made.validation_sets) == ["aime", "amc"]
    sets = by_validation_set(made.build().validation_problems(8))
    assert [len(sets[name]) for name in ("aime", "amc")] == [4, 4]


def test_too_few_problems_are_a_user_error(tmp_path):
    path = write(tmp_path / "a.jsonl", entry(1))
    task = Config(train_files=[path], validation_files=[path]).build()
    with pytest.raises(UserError, match="no training problems"):
        task.train_problem(0, 0)
    with pytest.raises(UserError, match="has 1 problems; use 1 or fewer"):
        task.validation_problems(2)


def test_demonstration_is_the_solution_and_without_one_a_user_error(tmp_path):
    path = write(tmp_path / "a.jsonl", entry(1, metadata={"solution": "half of two"}), entry(2))
    task = Config(train_files=[path]).build()
    by_id = {task.train_problem(i, 0).id: task.train_problem(i, 0) for i in range(2)}
    shown = task.demonstration(by_id["p1"], None)
    assert shown == "<think>half of two</think><answer>1</answer>"
    with pytest.raises(UserError, match=r"'p2' has no metadata\.solution"):
        task.demonstration(by_id["p2"], None)
