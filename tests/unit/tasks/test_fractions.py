"""Fractions: what a problem is drawn from, and which spellings of its value count."""

from nemo_grpo.tasks import Problem, parse_task


def task(**parameters):
    return parse_task({"name": "fractions", **parameters}).build()


def test_denominators_stay_below_the_largest():
    pairs = [task(max_denominator=4).train_problem(i, 0).metadata["left"] for i in range(200)]
    assert {bottom for _, bottom in pairs} == {2, 3, 4}
    assert all(0 < top < bottom for top, bottom in pairs)


def test_value_counts_and_not_its_spelling():
    fractions = task()
    problem = Problem("x", "q", r"\frac{3}{4}")
    for answer, accuracy in [(r"\boxed{\frac{6}{8}}", 1.0), ("0.75", 1.0), (r"$\frac{3}{5}$", 0.0)]:
        response = f"<think>a</think><answer>{answer}</answer>"
        assert fractions.score(problem, response) == {"accuracy": accuracy, "format": 1.0}
