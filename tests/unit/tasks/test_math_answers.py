r"""Mathematical answers: which count, over a corpus of ordinary and of nasty ones, and how they are found.

The verdicts of data/math_answers.jsonl were reasoned out, not recorded. A response that is a list stands for
its pieces, ``[text, count]`` for a text repeated.
"""

import json
import random
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_grpo.tasks import Problem, parse_task
from nemo_grpo.tasks.mathematics import MathConfig
from nemo_grpo.tasks.rewards.final_answer import final_answer, normalized
from nemo_grpo.tasks.rewards.format_reward import FORMS
from nemo_grpo.tasks.rewards.math_grader import MathGrader

CORPUS = Path(__file__).parent / "data" / "math_answers.jsonl"
ENTRIES = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
KINDS = sorted({entry["kind"] for entry in ENTRIES})


def text_of(response):
    if isinstance(response, str):
        return response
    return "".join(piece if isinstance(piece, str) else piece[0] * piece[1] for piece in response)


@pytest.fixture(scope="module")
def graders():
    with closing(MathGrader()) as patient, closing(MathGrader(cpu_seconds=0.3)) as hurried:
        yield patient, hurried


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "bomb")) for k in KINDS])
def test_verdicts_are_those_reasoned_out(kind, graders):
    grader, wrong = graders[kind == "bomb"], []
    for entry in (entry for entry in ENTRIES if entry["kind"] == kind):
        start = time.process_time()
        answer = final_answer(text_of(entry["response"]))
        assert time.process_time() - start < 5.0, "linear in the length"
        verdict = answer is not None and grader.equal(entry["reference"], answer)
        if verdict != bool(entry["verdict"]):
            wrong.append((entry, answer))
    assert not wrong


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        (r"\text{Monday}", "Monday", True),
        (r"$x \, y$.", "xy", True),
        ("1 2", "1,2", False),
        (r"\leftarrow", r"\arrow", False),
        ("a", "A", False),
    ],
)
def test_normalized_unites_spellings_only(one, other, equal):
    assert (normalized(one) == normalized(other)) is equal


@pytest.mark.parametrize(
    ("response", "forms"),
    [
        ("<think>a</think><answer>b</answer>", "think_answer tags think"),
        (" <think>\na\n</think>\n<answer>b</answer>\n", "think_answer tags think think_closed"),
        ("<think>a</think>so<answer>b</answer>", "tags think"),
        ("x<think>a</think><answer>b</answer>", "tags think"),
        ("<think>a</think><answer>b</answer>x", "tags think"),
        ("<answer>b</answer><think>a</think>", "think"),
        ("<think>a<answer>b</think></answer>", "think"),
        ("<think>a</think><answer>b</answer><answer>b</answer>", "think"),
        ("<think>a</think><think>b</think><answer>c</answer>", ""),
        (r"<think>a</think> \boxed{5}", "think boxed"),
        (r"</think> <think> \boxed{}", ""),
        ("so\n</think>\n7", "think_closed"),
        ("so\n</think>\n7\n</think>\n", ""),
        ("", ""),
    ],
)
def test_forms_by_hand(response, forms):
    assert {name for name, reward in FORMS.items() if reward(response)} == set(forms.split())


def test_math_scores_and_extracts_the_same_answer():
    task = parse_task({"name": "math", "form": "think", "think_is_open": True}).build()
    problem = Problem("x", "q", r"\frac{3}{4}")
    scores = [task.score(problem, rf"so{end} \boxed{{0.75}}") for end in ("</think>", "")]
    assert [(one["accuracy"], one["format"]) for one in scores] == [(1.0, 1.0), (1.0, 0.0)]
    assert task.extract(r"\boxed{ \dfrac{3}{4} }") == r"\frac{3}{4}"
    assert task.extract("3/4") is None


@pytest.mark.parametrize("name", ["math", "word_problems", "vision_math"])
def test_votes_for_one_value_count_together(name):
    task = parse_task({"name": name}).build()
    assert task.same_answer(r"\frac{6}{8}", r"\frac{3}{4}")
    assert not task.same_answer(r"\frac{6}{8}", r"\frac{4}{3}")


TOKENS = (r"\boxed{", r"\boxed ", *"{}\\$5x,\n", "<answer>", "</answer>", "</think>", r"\frac")


@settings(deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=30).map("".join) | st.text(max_size=60))
def test_any_text_has_a_short_answer_or_none(text):
    answer = final_answer(text)
    assert answer is None or (0 < len(answer) <= 1000 and answer == answer.strip())
    normalized(text)
    for form in FORMS.values():
        assert form(text) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("parameters", "shown"),
    [
        ({}, "Add 2. So \\boxed{5}."),  # as the file has it
        ({"form": "think"}, "<think>Add 2. So \\boxed{5}.</think>\n\n\\boxed{5}"),
        ({"form": "think_answer"}, "<think>Add 2. So \\boxed{5}.</think><answer>5</answer>"),
        ({"form": "think_closed"}, "<think>Add 2. So \\boxed{5}.\n</think>\n\n\\boxed{5}"),
        ({"form": "think", "think_is_open": True}, "Add 2. So \\boxed{5}.</think>\n\n\\boxed{5}"),
    ],
)
def test_demonstration_has_the_form_and_the_answer_that_are_rewarded(parameters, shown):
    task = MathConfig(**parameters).build()
    problem = Problem("p", "3+2?", "5", {"solution": "Add 2. So \\boxed{5}."})
    assert task.demonstration(problem, random.Random(0)) == shown
    scores = task.score(problem, shown)
    assert (scores["accuracy"], scores["format"]) == (1.0, 1.0)
    boxless = Problem("p", "3+2?", "5", {"solution": "Add 2."})
    assert MathConfig().build().demonstration(boxless, random.Random(0)) == "Add 2. \\boxed{5}"
