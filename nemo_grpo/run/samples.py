"""Rows of samples.jsonl: some responses of each step, and the greedy responses of each validation."""

from typing import Any

from nemo_grpo.evaluate.runner import ProblemResult
from nemo_grpo.run.groups import Group


def sample_rows(step: int, groups: list[Group], num_samples: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Make rows of samples.jsonl from the first ``num_samples`` responses of a step.

    The row's prompt is decoded from the tokens that the model got, special tokens included.
    """
    responses = [(group, scored) for group in groups for scored in group.responses]
    return [
        {
            "step": step,
            "problem": group.problem.id,
            "question": group.problem.question,
            "prompt": tokenizer.decode(group.prompt, skip_special_tokens=False),
            "response": scored.response.text,
            "answer": group.problem.answer,
            "reward": scored.reward,
            "scores": scored.scores,
            "truncated": scored.response.truncated,
            "num_tokens": len(scored.response.tokens),
        }
        for group, scored in responses[:num_samples]
    ]


def validation_row(validation_set: str, problem: ProblemResult) -> dict[str, Any]:
    """Make a row of samples.jsonl from a validation problem and its greedy response.

    The caller adds the step.
    """
    greedy = problem.greedy
    return {
        "validation": validation_set or "validation",
        "problem": problem.id,
        "prompt": problem.prompt,
        "response": greedy.completions[0],
        "answer": problem.gold,
        "scores": {"accuracy": greedy.scores[0], "format": greedy.formats[0]},
        "truncated": greedy.truncated[0],
        "num_tokens": greedy.lengths[0],
    }
