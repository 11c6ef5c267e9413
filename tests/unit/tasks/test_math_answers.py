r"""Mathematical answers: which count, over a corpus of ordinary and of nasty ones, and how they are found.

data/math_answers.jsonl has whole responses; one that is a list stands for its pieces, ``[text, count]`` for
a text repeated. data/math_verify_pairs.jsonl has pairs of mathematics with math-verify's verdict, be it right
or wrong.
"""

import json
import random
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from nemo_grpo.tasks import Problem, parse_task
from nemo_grpo.tasks.mathematics import MathConfig
from nemo_grpo.tasks.response import outside_thinking
from nemo_grpo.tasks.rewards import worker_pool
from nemo_grpo.tasks.rewards.final_answer import final_answer
from nemo_grpo.tasks.rewards.format_reward import FORMS
from nemo_grpo.tasks.rewards.latex import normalized
from nemo_grpo.tasks.rewards.math_grader import MathGrader, verdict_on_texts


def entries_of(name):
    path = Path(__file__).parent / "data" / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ENTRIES = entries_of("math_answers.jsonl")
KINDS = sorted({entry["kind"] for entry in ENTRIES})


def text_of(response):
    if isinstance(response, str):
        return response
    return "".join(piece if isinstance(piece, str) else piece[0] * piece[1] for piece in response)


@pytest.fixture(scope="module")
def graders():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "CPU_SECONDS", 0.3)
        hurried = MathGrader()
    with closing(MathGrader()) as patient, closing(hurried):
        yield patient, hurried


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "bomb")) for k in KINDS])
def test_recorded_responses_have_the_recorded_verdicts(kind, graders):
    grader, wrong = graders[kind == "bomb"], []
    for entry in (entry for entry in ENTRIES if entry["kind"] == kind):
        start = time.process_time()
        answer = final_answer(text_of(entry["response"]))
        assert time.process_time() - start < 5.0, "linear in the length"
        verdict = answer is not None and grader.equal(entry["reference"], answer)
        if verdict != bool(entry["verdict"]):
            wrong.append((entry, answer))
    assert not wrong


def nemo_rl_verdict(reference, answer):
    """The verdict of NeMo-RL's HFVerifyWorker on a box, without the alarms of math-verify."""
    gold = parse(f"\\boxed{{{reference}}}", (LatexExtractionConfig(),), parsing_timeout=None)
    both = (ExprExtractionConfig(), LatexExtractionConfig())
    target = parse(f"\\boxed{{{answer}}}", both, parsing_timeout=None)
    return verify(gold, target, float_rounding=6, timeout_seconds=None)


def test_mathematics_is_graded_as_by_math_verify(graders):
    pairs = entries_of("math_verify_pairs.jsonl")
    assert len(pairs) == 150
    for pair in pairs:
        reference, answer = pair["reference"], pair["answer"]
        assert verdict_on_texts(normalized(reference), normalized(answer)) is None, pair  # mathematics
        verdicts = graders[0].equal(reference, answer), nemo_rl_verdict(reference, answer)
        assert verdicts == (bool(pair["verdict"]),) * 2, pair


@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        # times: no ratios
        ("3:45 PM", "1:15 PM", False),
        (r"4:30\text{ p.m.}", r"2:15\text{ p.m.}", False),
        ("4:30pm", r"4:30\text{ p.m.}", True),
        ("6:30 PM", r"\frac15", False),
        ("2:15", "4:30 PM", False),
        ("6:40 minutes", "3:20 minutes", False),
        ("2:30:15", "2:15:30", False),
        ("3:00 PM", "3:00 pm", True),
        ("10:30", "10:30 AM", False),
        # ratios: no divisions
        ("1:2:3", "1:3:2", False),
        ("1:2:3", "1:6", False),
        ("2:3:4", r"\frac16", False),
        ("1:1:1", "1", False),
        ("1:2", "2:4", False),
        ("5:12", "5 : 12", True),
        # dates and addresses: no differences, no quotients
        ("2024/11/05", "2024/5/11", False),
        ("2024-1-5", "2024-5-1", False),
        ("6-10-2024", "5-9-2024", False),
        ("1/2/24", "1/24/2", False),
        ("2024-01-05", "2018", False),
        ("3/4/2024", r"\text{3/4/2024}", True),
        ("192.168.0.1", "192.168.0.2", False),
        # words: no products
        ("no", "on", False),
        (r"\text{no}", r"\text{on}", False),
        ("NO", "no", True),
        ("HT", "TH", False),
        ("TT", "T^2", False),
        ("AB", "BA", False),
        ("Zn", "nZ", False),
        ("New York", r"\text{new york}", True),
        ("red and blue", r"\text{blue}, \text{red}", True),
        (r"\infty", "infinity", False),
        # options are their letters
        ("A", r"\textbf{(A)}\ 12", True),
        ("E", r"\textbf{(E)}~12", True),
        ("A", r"\text{(A) }12", True),
        ("C", r"\text{C. } 12", True),
        ("E", r"\text{E}: 12", True),
        ("E", r"\text{E. a b}", True),
        (r"\textbf{(B)}\ 42", "B", True),
        (r"\textbf{(B)}\ 42", "(A)", False),
        ("B", r"\textbf{(A)}\ 12", False),
        ("A: B", "A: C", False),
        # other currencies and units in other cases, which math-verify does not read as one
        ("\u20ac5", r"\$5", False),
        (r"5\text{ dollars}", "\u20ac5", False),
        ("2 mm", "2 Mm", False),
        ("5 m", "5 M", False),
    ],
)
def test_no_mathematics_is_compared_as_text(reference, answer, verdict, graders):
    assert graders[0].equal(reference, final_answer(f"\\boxed{{{answer}}}")) is verdict


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>$x=5$ or $x=6$</answer>", "x=5, x=6"),
        (r"<answer>\(x=5\) or \[x=6\]</answer>", "x=5, x=6"),
        ("<answer>$$1$$ and $2$</answer>", "1, 2"),
        ("<answer>$7$ or 8</answer>", "$7$ or 8"),
        ("<answer>The area is $25$ square units.</answer>", "25"),
        ("<answer>It costs $5 and not $6</answer>", "It costs $5 and not $6"),
        ("<answer>" + "$5$ " * 251 + "</answer>", None),
        (r"<think>Try \boxed{8}, or maybe", None),
        ("<think>Try <answer>8</answer>, or maybe", None),
        (r"<think>a</think> \boxed{8} <think>or \boxed{9}", "8"),
        (r"<think>a</think> \boxed{8} <think>b</think>", "8"),
        (r"a \boxed{7} </think> \boxed{8}", "8"),
        (r"\boxed8", "8"),
        (r"\boxed-8.5", "-8.5"),
        (r"\boxed{5}, in a \boxed, as asked", "5"),
        (r"So \boxed{8}. Thus \boxed{9", "8"),
        (r"\boxed{\boxed{5} or 6}", "{5} or 6"),
    ],
)
def test_final_answer_by_hand(response, answer):
    assert final_answer(response) == answer


def test_a_hedge_in_an_answer_block_is_a_list(graders):
    both = final_answer("<answer>$x=5$ or $x=6$</answer>")
    assert [graders[0].equal(reference, both) for reference in ("5", "6", "5,6")] == [False, False, True]


@pytest.mark.parametrize(
    ("response", "outside"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("a<think>b", "a"),
        ("a<think>b</think>c<think>d</think>e", "ace"),
        ("<think><think>a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("", ""),
    ],
)
def test_outside_thinking_by_hand(response, outside):
    assert outside_thinking(response) == outside


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        (r"\text{Monday}", "Monday", True),
        (r"$x \, y$.", "x y", True),
        (r"2\pi \, r", r"2\pi r", True),
        (r"2\pi r", r"2\pir", False),
        (r"\text{\textbf{A}}", "A", True),
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
    assert [(one["accuracy"], one["format"]) for one in scores] == [(1.0, 1.0), (0.0, 0.0)]
    assert task.extract(r"so</think> \boxed{ \dfrac{3}{4} }") == r"\frac{3}{4}"
    assert task.extract(r"so \boxed{ \dfrac{3}{4} }") is None  # the thought was never closed
    assert task.extract("</think> 3/4") is None


@pytest.mark.parametrize("name", ["math", "word_problems", "vision_math"])
def test_votes_for_one_value_count_together(name):
    task = parse_task({"name": name}).build()
    assert task.same_answer(r"\frac{6}{8}", r"\frac{3}{4}")
    assert not task.same_answer(r"\frac{6}{8}", r"\frac{4}{3}")


TOKENS = (r"\boxed{", r"\boxed ", *"{}\\$5x,\n", "<answer>", "</answer>", "<think>", "</think>", r"\frac")


@settings(deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=30).map("".join) | st.text(max_size=60))
def test_any_text_has_a_short_answer_or_none(text):
    answer = final_answer(text)
    assert answer is None or (0 < len(answer) <= 1000 and answer == answer.strip())
    assert normalized(normalized(text)) == normalized(text)
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
