"""Responses to the same held-out problems at each validation, from a run's samples.jsonl."""

from dataclasses import dataclass
from typing import Any

from nemo_grpo.report.runs import RunLog, json_lines

SAMPLES_FILE = "samples.jsonl"
MAX_PROBLEMS = 8
"""Most problems that a report shows."""
MAX_VALIDATIONS = 8
"""Most validations of a problem that a report shows, the first and the last among them."""
MAX_LETTERS = 2000
"""Most letters of a response that a report shows."""


@dataclass(frozen=True)
class HeldOutProblem:
    """A held-out problem with its greedy responses during the run.

    Attributes:
        title: validation set and name of the problem.
        prompt: prompt that the policy continued.
        answer: right answer.
        rows: [step, accuracy, response] as texts, in the order of steps.
    """

    title: str
    prompt: str
    answer: str
    rows: list[list[str]]


def held_out_problems(run: RunLog) -> list[HeldOutProblem]:
    """Read the first held-out problems of a run. There are none if its samples.jsonl has no validation.

    If a resumed run has validated a step twice, the later responses count.
    """
    by_problem = dict[tuple[str, str], dict[int, dict[str, Any]]]()
    for row in json_lines(run.path / SAMPLES_FILE):
        if isinstance(row.get("step"), int) and "validation" in row and "response" in row:
            key = (str(row["validation"]), str(row.get("problem")))
            by_problem.setdefault(key, {})[row["step"]] = row
    problems = []
    for (name, problem), by_step in list(by_problem.items())[:MAX_PROBLEMS]:
        steps = _spread(sorted(by_step))
        first = by_step[steps[0]]
        problems.append(
            HeldOutProblem(
                title=f"{name}: {problem}",
                prompt=str(first.get("prompt", "")),
                answer=str(first.get("answer", "")),
                rows=[_cells(step, by_step[step]) for step in steps],
            )
        )
    return problems


def _spread(steps: list[int]) -> list[int]:
    """Choose at most `MAX_VALIDATIONS` steps at about equal distances, including the first and the last."""
    if len(steps) <= MAX_VALIDATIONS:
        return steps
    last = len(steps) - 1
    places = {round(number * last / (MAX_VALIDATIONS - 1)) for number in range(MAX_VALIDATIONS)}
    return [steps[place] for place in sorted(places)]


def _cells(step: int, row: dict[str, Any]) -> list[str]:
    """Write one response as a row of the table. A user-defined task may have no accuracy."""
    scores = row.get("scores")
    accuracy = scores.get("accuracy") if isinstance(scores, dict) else None
    response = str(row["response"])
    if len(response) > MAX_LETTERS:
        response = f"{response[:MAX_LETTERS]} ... ({len(response)} letters)"
    return [str(step), "-" if accuracy is None else f"{accuracy:g}", response]
