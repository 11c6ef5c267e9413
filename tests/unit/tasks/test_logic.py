"""Knights and knaves in Logic-RL's form: puzzles and grading."""

import json
import random
import time
from itertools import product
from pathlib import Path

import pytest

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, parse_task
from nemo_grpo.tasks.logic import graded, parse_roles
from nemo_grpo.tasks.logic_puzzles import describe, draw_statements, is_true, solutions


def task(**parameters):
    return parse_task({"name": "logic", **parameters}).build()


def said(answer):
    return f"<think>so</think><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("statement", "truth"),
    [
        # in the world (knight, knave)
        (("is", (0, True)), True),
        (("is", (1, True)), False),
        (("is_not", (1, True)), True),
        (("is_not", (1, False)), False),
        (("and", (0, True), (1, False)), True),
        (("and", (0, True), (1, True)), False),
        (("or", (0, False), (1, False)), True),
        (("or", (0, False), (1, True)), False),
        (("if", (0, True), (1, True)), False),
        (("if", (1, True), (0, False)), True),
        (("iff", (0, True), (1, True)), False),
        (("iff", (0, True), (1, False)), True),
    ],
)
def test_statement_truth_by_hand(statement, truth):
    assert is_true(statement, (True, False)) is truth


@pytest.mark.parametrize("num_people", range(2, 9))
def test_drawn_puzzle_has_the_one_solution_that_trying_every_world_finds(num_people):
    rng = random.Random(num_people)
    for _ in range(20):
        statements = draw_statements(num_people, rng)
        by_trying = [
            world
            for world in product((False, True), repeat=num_people)
            if all(is_true(s, world) == knight for s, knight in zip(statements, world, strict=True))
        ]
        assert len(by_trying) == 1
        assert solutions(statements) == by_trying


def test_a_puzzle_is_told_in_words():
    statements = (("if", (1, True), (2, False)), ("is_not", (0, True)), ("iff", (0, True), (2, False)))
    text = describe(statements, ("Zoey", "Jack", "Mia"), random.Random(0))
    assert "You meet 3 inhabitants: Zoey, Jack, and Mia. " in text
    assert "if Jack is a knight then Mia is a knave" in text
    assert "Zoey is not a knight" in text
    assert "Zoey is a knight if and only if Mia is a knave" in text


def test_puzzles_have_the_configured_sizes_and_names():
    logic = task(people=[2, 5], validation_people=[8, 3])
    assert {logic.train_problem(i, 0).metadata["num_people"] for i in range(40)} == {2, 5}
    assert [p.metadata["num_people"] for p in logic.validation_problems(5)] == [8, 3, 8, 3, 8]
    logic = task(people=[2], validation_people=[3], num_names=3)
    names = {name for i in range(60) for name in logic.train_problem(i, 0).metadata["names"]}
    assert len(names) == 3
    with pytest.raises(UserError, match="num_names=3 is too few for 5 people; use 5"):
        task(people=[2, 5], validation_people=[3], num_names=3)


def test_validation_statements_never_occur_in_training_under_any_names():
    logic = task(people=[2], validation_people=[2])
    held_out = {p.metadata["statements"] for p in logic.validation_problems(300)}
    trained = {logic.train_problem(i, seed).metadata["statements"] for seed in (0, 1) for i in range(1500)}
    assert len(held_out) > 20
    assert not held_out & trained


def test_demonstration_finds_the_answer_and_scores_in_full():
    logic = task(people=[2, 3])
    rng = random.Random(0)
    for index in range(50):
        problem = logic.train_problem(index, 0)
        scores = logic.score(problem, logic.demonstration(problem, rng))
        assert scores == dict.fromkeys(("accuracy", "format", "format_signed"), 1.0) | {"answer": 2.0}


@pytest.mark.parametrize(
    ("answer", "roles"),
    [
        ("(1) Zoey is a knight\n(2) Jack is a knave", {"zoey": True, "jack": False}),
        ("(2) JACK IS A KNAVE (1) zoey Is A Knight", {"zoey": True, "jack": False}),
        ("Zoey: knight, Jack: knave", {"zoey": True, "jack": False}),
        ("Zoey = a Knight; Jack -> knave; Mia - knight", {"zoey": True, "jack": False, "mia": True}),
        ("Zoe is a knight. Zoey is a knave.", {"zoe": True, "zoey": False}),
        ("Mary-Ann is a knave", {"mary-ann": False}),
        ("Élodie is a knight", {"élodie": True}),
        ("**Zoey** is a _knight_, Zoey: `knight`", {"zoey": True}),
        ("Jose\u0301 is a knight", {"jos\u00e9": True}),
        ("Zoey is a knight or a knave; Jack is a knave", {"jack": False}),
        ("It is false that Zoey is a knight; Jack is a knave", None),
        ("Zoey is a knight. Zoey is a knave.", None),
        ("Zoey is a knightess", None),
        ("Everybody lies", None),
        ("", None),
    ],
)
def test_parse_roles(answer, roles):
    assert parse_roles(answer) == roles


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("(1) Zoey is a knight\n(2) Jack is a knave", 2.0),
        ("JACK  is a\nKNAVE and zoey is a knight.", 2.0),
        ("Zoey is a knight, Jack is a knight", -1.5),
        ("Zoey: knight, Jack: knave", -2.0),
        ("Zoey is a knight", -2.0),  # Jack is missing
        ("Zoey is a knight, Jack is a knave, Mia is a knave", -2.0),  # a role too many
        ("Zoey is a knight, Jack is a knave. The knight says so.", -2.0),  # the word once more
        ("", -2.0),
    ],
)
def test_graded_is_logic_rls(answer, reward):
    assert graded({"zoey": True, "jack": False}, answer) == reward


def test_table_5_equals_what_logic_rls_release_gave():
    """Generated responses after an opened think tag, with the rewards that Logic-RL's released kk.py gave."""
    recorded = (Path(__file__).parent / "data" / "logic_rewards.jsonl").read_text("utf-8").splitlines()
    logic = task(think_is_open=True)
    for case in map(json.loads, recorded):
        scores = logic.score(Problem("x", "q", case["answer"]), case["response"])
        assert scores["format_signed"] + scores["answer"] == case["reward"], case


@pytest.mark.parametrize(
    ("response", "accuracy", "form", "answer"),
    [
        (said("Jack is a knave, Zoey is a knight"), 1.0, 1.0, 2.0),
        (said("Jack is a knight, Zoey is a knight"), 0.0, 1.0, -1.5),
        (said("Jack: knave, Zoey: knight"), 1.0, 1.0, -2.0),
        ("<think>so</think> Thus: <answer>Zoey is a knight, Jack is a knave</answer> Done.", 1.0, 1.0, 2.0),
        ("<answer>Zoey is a knight, Jack is a knave</answer><think>so</think>", 1.0, 0.0, -2.0),
        ("Zoey is a knight, Jack is a knave", 0.0, 0.0, -2.0),
    ],
)
def test_score_by_hand(response, accuracy, form, answer):
    problem = Problem("x", "q", "(1) Zoey is a knight\n(2) Jack is a knave")
    scores = task().score(problem, response)
    signed = 1.0 if form else -1.0
    assert scores == {"accuracy": accuracy, "format": form, "format_signed": signed, "answer": answer}


def test_strict_form_refuses_text_around_the_blocks():
    problem = Problem("x", "q", "(1) Zoey is a knight")
    scores = task(form="think_answer").score(problem, f"Thus: {said('Zoey is a knight')}")
    assert scores == {"accuracy": 1.0, "format": 0.0, "format_signed": -1.0, "answer": -2.0}


def test_extract_is_the_same_for_equal_answers():
    logic = task()
    assert logic.extract(said("(1) Zoey is a knight (2) Jack is a knave")) == "jack knave, zoey knight"
    assert logic.extract(said("jack: KNAVE\nzoey: knight")) == "jack knave, zoey knight"
    assert logic.extract("Zoey is a knight") is None


def test_puzzles_may_come_from_files(tmp_path):
    entries = [{"id": f"p{i}", "question": f"q{i}", "answer": "(1) Zoey is a knight"} for i in range(3)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    logic = task(train_files=[str(path)])
    assert {logic.train_problem(i, 0).id for i in range(3)} == {"p0", "p1", "p2"}
    assert logic.score(logic.train_problem(0, 0), said("zoey is a knight"))["answer"] == 2.0
    path.write_text(json.dumps({**entries[0], "answer": "Zoey"}))
    with pytest.raises(UserError, match="problem 'p0': answer='Zoey' gives nobody's role"):
        task(train_files=[str(path)])


@pytest.mark.parametrize("piece", ["a-", "a is ", "a is a knight ", " "])
def test_reading_roles_is_linear(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    parse_roles(text)
    assert time.process_time() - start < 2.0
