"""Boxes, labels and counts."""

import json

import pytest

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, Prompt, encode_prompt, parse_task
from nemo_grpo.tasks.vision import generalized_iou, intersection_over_union, parse_box


def score(name, answer, response, **parameters):
    task = parse_task({"name": name, **parameters}).build()
    return task.score(Problem("x", "q", answer), response)


def said(answer):
    return f"<think>look</think><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("(10,20),(30,40)", (10, 20, 30, 40)),
        ("[10, 20, 30.5, 40.25]", (10, 20, 30.5, 40.25)),
        ("(30,40),(10,20)", (10, 20, 30, 40)),
        ("(-1,0),(2,3)", (-1, 0, 2, 3)),
        ("(10,20),(30,40),(1,1)", None),
        ("(10,20),(30)", None),
        ("", None),
        ("(1e5,2),(3,4)", None),
        ("9" * 12 + " 1 2 3", None),
    ],
)
def test_parse_box(text, box):
    assert parse_box(text) == box


@pytest.mark.parametrize(
    ("a", "b", "iou", "giou"),
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0, 1.0),
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7, 1 / 7 - 2 / 9),  # 1 shared of 4 + 4 - 1; hull 9
        ((0, 0, 1, 1), (1, 0, 2, 1), 0.0, 0.0),  # an edge in common
        ((0, 0, 1, 1), (2, 0, 3, 1), 0.0, -1 / 3),  # apart: union 2, hull 3
        ((0, 0, 0, 0), (0, 0, 0, 0), 0.0, 0.0),
    ],
)
def test_overlap_of_boxes_by_hand(a, b, iou, giou):
    for one, other in ((a, b), (b, a)):
        assert intersection_over_union(one, other) == pytest.approx(iou)
        assert generalized_iou(one, other) == pytest.approx(giou)


def test_grounding_scores_overlap_and_whether_it_is_enough():
    half = score("vision_grounding", "(0,0),(40,20)", said("(0,0),(20,20)"))
    assert half == {"accuracy": 1.0, "format": 1.0, "iou": 0.5, "giou": 1.5}
    less = score("vision_grounding", "(0,0),(40,20)", said("(0,0),(20,20)"), iou_threshold=0.6)
    assert less == {"accuracy": 0.0, "format": 1.0, "iou": 0.5, "giou": 1.5}
    unread = score("vision_grounding", "(0,0),(40,20)", "(0,0),(20,20)")
    assert (unread["iou"], unread["giou"]) == (0.0, 0.0)
    nothing = score("vision_grounding", "(0,0),(40,20)", said("(50,50),(60,60)"), iou_threshold=0.0)
    apart = pytest.approx(1 - 2700 / 3600)  # 800 + 100 of a hull of 60 x 60
    assert nothing == {"accuracy": 0.0, "format": 1.0, "iou": 0.0, "giou": apart}


def test_box_metrics_of_a_whole_evaluation_by_hand():
    task = parse_task({"name": "vision_grounding"}).build()
    big, small = Problem("b", "q", "(0,0),(40,20)"), Problem("s", "q", "(0,0),(10,10)")
    answered = [(big, [said("(0,0),(20,20)"), said("nothing")]), (small, [said("(0,0),(10,10)")])]
    # IoU 400/800, 0 (of 800) and 100/100
    assert task.overall(answered) == {
        "box_miou": pytest.approx(1.5 / 3),
        "box_ciou": pytest.approx(500 / 1700),
    }


@pytest.mark.parametrize(
    ("given", "correct"), [("(B)", 1.0), ("b", 1.0), ("two cats", 1.0), ("A", 0.0), ("c", 0.0)]
)
def test_a_choice_counts_by_its_letter_or_its_words(given, correct):
    task = parse_task({"name": "vision_classification"}).build()
    problem = Problem("x", "q", "(B)", {"choices": ["one cat", "Two cats"]})
    assert task.score(problem, said(given))["accuracy"] == correct


@pytest.mark.parametrize(
    ("answer", "given", "correct"),
    [
        ("Boeing 737-800", "boeing 737_800", 1.0),
        ("golden retriever", " Golden  Retriever. ", 1.0),
        ("golden retriever", "retriever", 0.0),
        ("tulip", "", 0.0),
        ("caf\u00e9", "Cafe\u0301", 1.0),
        ("\u0915\u093f", "\u0915\u0940", 0.0),  # two vowels of Hindi, which are marks
        ("\u0915\u093f", "\u0915\u093f!", 1.0),
        ("C++", "c++.", 1.0),
        ("C++", "C#", 0.0),
        ("+", "-", 0.0),
        ("-5", "5", 0.0),
    ],
)
def test_classification_compares_words(answer, given, correct):
    assert score("vision_classification", answer, said(given)) == {"accuracy": correct, "format": 1.0}


@pytest.mark.parametrize(
    ("given", "correct"),
    [
        ("7", 1.0),
        ("There are 7 cubes.", 1.0),
        ("7.0", 1.0),
        ("-7", 0.0),
        ("7%", 0.0),
        ("\u22657", 0.0),
        ("3 of 7", 0.0),
        ("1,007", 0.0),
        ("seven", 0.0),
    ],
)
def test_counting_takes_the_only_whole_number(given, correct):
    assert score("vision_counting", "7", said(given))["accuracy"] == correct


def test_vision_math_is_graded_as_mathematics():
    assert score("vision_math", "\\frac{1}{2}", said("0.5")) == {"accuracy": 1.0, "format": 1.0}
    open_think = score("vision_math", "5", "so</think><answer>$5$</answer>", think_is_open=True)
    assert open_think == {"accuracy": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("vision_grounding", {"answer": "left"}, "answer='left' is not"),
        ("vision_counting", {"answer": "many"}, "answer='many' is not"),
        *(
            ("vision_classification", {"choices": choices}, r"metadata\.choices=.* must be a list of texts")
            for choices in ({"A": "blue"}, ["blue", 5])
        ),
    ],
)
def test_references_that_cannot_be_scored_are_user_errors(tmp_path, name, row, message):
    (tmp_path / "a.png").write_bytes(b"")
    row = {"id": "p", "question": "q", "answer": "A", "metadata": {"images": ["a.png"]}} | row
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=f"problem 'p': {message}"):
        parse_task({"name": name, "validation_files": [str(tmp_path / "a.jsonl")]}).build()


def test_problems_with_images_have_no_text_only_prompt():
    with pytest.raises(UserError, match="vision tasks need the cluster engine"):
        encode_prompt(None, Prompt(), Problem("x", "q", "1", {"images": ["a.png"]}))
