"""The registry, both tasks, and how responses are read."""

import pickle
import random
import re
import subprocess
import sys
import time

import pytest

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import TASKS, Problem, parse_task
from nemo_grpo.tasks.base import NOT_FINITE
from nemo_grpo.tasks.grading import checked_score
from nemo_grpo.tasks.knights_knaves import PUZZLES, meaning
from nemo_grpo.tasks.logic_puzzles import is_true, solutions
from nemo_grpo.tasks.response import last_answer

SECTIONS = [
    {"name": "knights_knaves"},
    {"name": "knights_knaves", "split": "statements"},
    {"name": "word_problems"},
]


@pytest.fixture(params=SECTIONS, ids=str)
def task(request):
    return parse_task(request.param).build()


def test_train_problems_depend_on_index_and_seed_only(task):
    first = [task.train_problem(index, 7) for index in range(20)]
    other = parse_task(task.config.model_dump()).build()
    assert first == [other.train_problem(index, 7) for index in reversed(range(20))][::-1]
    assert [problem.id for problem in first] != [task.train_problem(index, 8).id for index in range(20)]
    assert len({problem.id for problem in first}) > 15
    assert pickle.loads(pickle.dumps(task)).train_problem(5, 3) == task.train_problem(5, 3)


def test_train_problem_is_the_same_in_another_process():
    code = (
        "from nemo_grpo.tasks import parse_task; t = parse_task({'name': 'knights_knaves'}).build();"
        "print([t.train_problem(i, 3).id for i in range(5)])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = parse_task({"name": "knights_knaves"}).build()
    assert there.strip() == str([here.train_problem(index, 3).id for index in range(5)])


def test_validation_is_fixed_distinct_and_disjoint_from_training(task):
    held_out = task.validation_problems(200)
    assert held_out[:50] == task.validation_problems(50)
    ids = {problem.id for problem in held_out}
    assert len(ids) == 200
    trained = {task.train_problem(index, seed).id for seed in (0, 1) for index in range(2000)}
    assert not ids & trained


def test_statements_split_holds_out_whole_pairs_of_statements():
    task = parse_task({"name": "knights_knaves", "split": "statements"}).build()
    held_out = {problem.metadata["statements"] for problem in task.validation_problems(900)}
    trained = {task.train_problem(index, 0).metadata["statements"] for index in range(3000)}
    assert held_out
    assert not held_out & trained
    assert held_out | trained == set(PUZZLES)


def test_more_validation_problems_than_exist_is_a_user_error(task):
    with pytest.raises(UserError, match="or fewer"):
        task.validation_problems(10**6)


def test_demonstrations_are_correct_well_formed_and_varied(task):
    rng = random.Random(0)
    for index in range(100):
        problem = task.train_problem(index, 0)
        response = task.demonstration(problem, rng)
        assert task.score(problem, response) == {"accuracy": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("statements", "worlds"),
    [
        # "B is a knight", "A is a knave": equal and unequal at once, no world
        (("knight", "knave"), []),
        # both say "we are alike": true of two knights, but also of two knaves, who may not say so
        (("alike", "alike"), [(True, True)]),
        # A: "B and I are knaves" can only be a lie of a knave, so B is a knight; B: "A is a knave" is true
        (("both_knaves", "knave"), [(False, True)]),
    ],
)
def test_solution_by_hand(statements, worlds):
    assert solutions(meaning(statements)) == worlds


@pytest.mark.parametrize(
    ("kinds", "truths"),
    [
        (("only_me", "if_me_other"), (True, True)),
        (("if_me_other", "only_me"), (False, False)),
        (("if_other_me", "if_other_me"), (True, False)),
        (("some_knave", "both_knights"), (True, False)),
        (("differ", "only_other"), (True, True)),
        (("some_knight", "alike"), (True, False)),
    ],
)
def test_statement_truths_by_hand(kinds, truths):
    """The first is a knight, the second a knave."""
    assert tuple(is_true(statement, (True, False)) for statement in meaning(kinds)) == truths


@pytest.fixture
def knaves_problem():
    problems = parse_task({"name": "knights_knaves"}).build().validation_problems(1000)
    return next(problem for problem in problems if problem.metadata["statements"] == ("both_knaves", "knave"))


def test_knights_knaves_question_by_hand(knaves_problem):
    problem = knaves_problem
    first, second = problem.metadata["names"]
    assert problem.question == f"{first}: {second} and I are knaves. {second}: {first} is a knave."
    assert problem.answer == "knave, knight"


def test_knights_knaves_demonstration_by_hand(knaves_problem):
    task = parse_task({"name": "knights_knaves"}).build()
    attempts = dict.fromkeys(("knight, knight", "knight, knave"), "lie no")
    attempts |= {"knave, knight": "lie true ok", "knave, knave": "true no"}
    for seed in range(20):
        shown = task.demonstration(knaves_problem, random.Random(seed))
        thought = shown.split("</think>")[0].removeprefix("<think>")
        lines = dict(line.split(": ") for line in thought.split("; "))
        assert lines == {world: attempts[world] for world in lines}
        assert thought.endswith("knave, knight: lie true ok")


@pytest.fixture(scope="module")
def word_problems():
    task = parse_task({"name": "word_problems", "max_number": 20}).build()
    return [task.train_problem(index, 0) for index in range(300)]


def test_word_problems_leave_nothing_negative(word_problems):
    for problem in word_problems:
        start, *changes = problem.metadata["numbers"]
        assert int(problem.answer) == start + sum(changes) >= 0
        assert start + changes[0] >= 0


def test_word_problems_tell_their_numbers(word_problems):
    signs = set()
    for problem in word_problems:
        start, *changes = problem.metadata["numbers"]
        assert [int(number) for number in re.findall(r"\d+", problem.question)] == [start, *map(abs, changes)]
        told = re.findall(r"(gives away|loses|sells|leaves)|buys|finds|gets|is given", problem.question)
        assert [not loss for loss in told] == [change > 0 for change in changes]
        assert all(2 <= number <= 20 for number in (start, *map(abs, changes)))
        signs.add(tuple(change > 0 for change in changes))
    assert signs == {(True, False), (False, True)}


@pytest.mark.parametrize(
    ("numbers", "thought", "answer"),
    [((17, 26, -9), "17 + 26 = 43, 43 - 9 = 34.", "34"), ((12, -5, 8), "12 - 5 = 7, 7 + 8 = 15.", "15")],
)
def test_demonstration_by_hand(numbers, thought, answer):
    task = parse_task({"name": "word_problems", "form": "think_answer"}).build()
    expected = f"<think>{thought}</think><answer>{answer}</answer>"
    assert task.demonstration(Problem("x", "", answer, {"numbers": numbers}), random.Random(0)) == expected


def test_score_disregards_case_and_space():
    task = parse_task({"name": "knights_knaves"}).build()
    problem = Problem("x", "", "knight, knave")
    good = "<think>a</think><answer>\n KNIGHT ,  knave\t</answer>"
    assert task.score(problem, good) == {"accuracy": 1.0, "format": 1.0}
    assert task.extract("<answer> A,b  1 2 </answer>") == "a,b 1 2"


def test_score_reads_the_last_answer():
    task = parse_task({"name": "knights_knaves"}).build()
    problem = Problem("x", "", "knight, knave")
    twice = "<answer>knave, knave</answer> no: <answer>knight, knave</answer>"
    assert task.score(problem, twice) == {"accuracy": 1.0, "format": 0.0}
    assert task.score(problem, "knight, knave") == {"accuracy": 0.0, "format": 0.0}
    assert task.score(problem, "<think></think><answer>knave, knight</answer>")["accuracy"] == 0.0
    assert task.extract("<answer>A, b") is None


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("knights_knaves", "knight, knave"),
        ("logic", "(1) Zoey is a knight"),
        ("word_problems", "5"),
        ("vision_counting", "5"),
        ("vision_grounding", "(1,2),(30,40)"),
    ],
)
def test_a_thought_that_is_never_closed_holds_no_answer(name, reference):
    config = parse_task({"name": name})
    problem, answer = Problem("x", "", reference), f"<answer>{reference}</answer>"
    scores = [config.build().score(problem, f"<think>{end} {answer}") for end in ("so</think>", "so")]
    assert [score["accuracy"] for score in scores] == [1.0, 0.0]
    assert config.build().extract(f"<think>so {answer}") is None
    if "think_is_open" in type(config).model_fields:
        opened = config.model_copy(update={"think_is_open": True}).build()
        scores = [opened.score(problem, f"{end} {answer}") for end in ("so</think>", "so")]
        assert [score["accuracy"] for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>1<answer>2</answer>", "2"),
        ("</answer><answer>", None),
        ("", None),
        ("<answer>1</answer><answer> </answer>", "1"),
    ],
)
def test_last_answer(text, answer):
    assert last_answer(text) == answer


@pytest.mark.parametrize("tag", ["<answer>", " ", "<think></think>"])
def test_reading_a_huge_response_is_linear(task, tag):
    problem = task.train_problem(0, 0)
    text = "<think>" + tag * (1_000_000 // len(tag)) + "</answer>"
    start = time.process_time()
    task.score(problem, text)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "needs a name"),
        ({"name": "knight_knaves"}, "did you mean 'knights_knaves'"),
        ({"name": "math", "train_files": "a.jsonl"}, r"'a.jsonl': it must be a list, such as \[a, b\]"),
        ({"name": "word_problems", "max_numbr": 20}, "max_numbr .*did you mean 'max_number'"),
        ({"name": "word_problems", "max_number": True}, "max_number=True"),
        ({"name": "logic", "people": ["2"]}, "people.0='2'"),
        ({"name": "knights_knaves", "split": "names"}, "split='names'"),
    ],
)
def test_parse_task_refuses_in_one_line(section, message):
    with pytest.raises(UserError, match=message) as error:
        parse_task(section)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", TASKS)
def test_registered_task_parses_its_own_section(name):
    config = parse_task({"name": name})
    assert type(config) is TASKS[name]
    assert parse_task(config.model_dump(mode="json")) == config


def test_every_registered_task_declares_its_scores():
    for name in TASKS:
        config = parse_task({"name": name})
        assert set(config.reward_components) >= {"accuracy", "format"}
        assert all(meaning for meaning in config.reward_components.values())
        problem = Problem("x", "q", "(1,2),(3,4)" if name == "vision_grounding" else "1")
        for response in ("", "<think>a</think><answer>1</answer>"):
            scores = config.build().score(problem, response)
            assert set(scores) == set(config.reward_components)
            assert 0 <= scores["accuracy"] <= 1
            assert scores["format"] in (0, 1)


def test_a_score_that_is_no_number_counts_as_0_and_is_logged(caplog):
    class Broken(type(parse_task({"name": "knights_knaves"}).build())):
        def score(self, problem, response):
            return {"accuracy": float("nan"), "format": 1.0}

    task = Broken(parse_task({"name": "knights_knaves"}))
    problem = task.train_problem(0, 0)
    assert checked_score(task, problem, "7") == {"accuracy": 0.0, "format": 1.0, NOT_FINITE: 1.0}
    assert "accuracy=nan counts as 0 for the response '7'" in caplog.text


@pytest.mark.parametrize(
    ("characters", "correct", "wrong"),
    # 1 + cos(pi n / 1000) over 4, from 0.5 and from -0.5
    [(500, 0.75, -0.25), (1000, 0.5, -0.5), (2000, 1.0, 0.0)],
)
def test_cosine_of_the_length_by_hand(characters, correct, wrong):
    task, problem = parse_task({"name": "math"}).build(), Problem("x", "q", "7")
    for answer, reward in (("7", correct), ("8", wrong)):
        response = f"\\boxed{{{answer}}}".rjust(characters)
        assert task.score(problem, response)["cosine"] == pytest.approx(reward)
