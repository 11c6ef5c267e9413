"""Evaluation of a task: sampling, scoring, metrics, with the prompt, extraction and reward of training."""

import json
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_grpo.evaluate.passk import (
    Majority,
    SameAnswer,
    majority_at_k,
    mean_and_stderr,
    pass_at_k,
    stderr_of_runs,
)
from nemo_grpo.evaluate.sampling import Completion, EvalRequest, ResponseSource
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.tasks import Problem, Task
from nemo_grpo.tasks.grading import checked_score, extracted_answer
from nemo_grpo.tasks.scoring import Scorer, validation_rewards

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdicts:
    """Responses to one problem with the task's verdicts; all sequences have one entry per response.

    ``lengths`` counts the policy's tokens.
    """

    completions: list[str]
    extracted: list[str | None]
    scores: list[float]
    formats: list[float]
    lengths: list[int]
    truncated: list[bool]


@dataclass(frozen=True)
class ProblemResult:
    """One problem, its greedy response and its samples. ``prompt`` is the text that the policy continued."""

    id: str
    prompt: str
    gold: str
    greedy: Verdicts
    samples: Verdicts

    @property
    def num_correct(self) -> int:
        """Samples with full accuracy; partial credit does not count towards pass@k."""
        return sum(score >= 1 for score in self.samples.scores)

    def to_record(self) -> dict[str, Any]:
        """Return the problem's line of samples.jsonl."""
        names = {"scores": "score", "formats": "format", "lengths": "num_tokens"}
        return {
            "id": self.id,
            "prompt": self.prompt,
            "gold": self.gold,
            **{names.get(name, name): values for name, values in asdict(self.samples).items()},
            "greedy_completion": self.greedy.completions[0],
            "greedy_extracted": self.greedy.extracted[0],
            "greedy_score": self.greedy.scores[0],
        }


@dataclass(frozen=True)
class EvalResult:
    """All problems with their responses, and the task's parameters.

    Attributes:
        undecided: True if a reference and an extracted answer could not be compared within the limits.
        pass_at: values of k for pass@k in addition to powers of two; at most the number of samples.
        overall: the task's own metrics, see `nemo_grpo.tasks.base.Answered`.
        rewards: the samples' `validation_rewards`; none of an evaluation without a scorer.
    """

    task: dict[str, Any]
    num_samples: int
    problems: list[ProblemResult]
    same_answer: SameAnswer = field(default=operator.eq, compare=False)
    undecided: Callable[[str, str], bool] = field(default=lambda _reference, _answer: False, compare=False)
    pass_at: tuple[int, ...] = ()
    overall: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Average over problems.

        Returns: ``accuracy`` (avg@k) and ``greedy``, each with ``_stderr`` over problems; ``pass@1,2,4,8,..``
                 up to and including the number of samples, and those of ``pass_at``;
                 ``maj@<samples>``; ``format``, ``truncated`` and ``num_tokens`` as means over samples; with
                 a scorer ``reward`` and every component.
        """
        found = dict(self.rewards)
        for name, values in self._by_problem.items():
            found[name], stderr = mean_and_stderr(values)
            if name in ("accuracy", "greedy") and len(values) > 1:
                found[f"{name}_stderr"] = stderr
        return {
            **found,
            "format": fmean(fmean(p.samples.formats) for p in self.problems),
            "truncated": fmean(fmean(p.samples.truncated) for p in self.problems),
            "num_tokens": fmean(fmean(p.samples.lengths) for p in self.problems),
            **self.overall,
        }

    def standard_errors(self) -> dict[str, float]:
        """Return ``accuracy_runs`` (`stderr_of_runs`) and, over two problems or more, the metrics' errors."""
        runs = {"accuracy_runs": stderr_of_runs([p.samples.scores for p in self.problems])}
        if len(self.problems) == 1:
            return runs
        errors = {name: mean_and_stderr(values)[1] for name, values in self._by_problem.items()}
        return {"accuracy": errors.pop("accuracy"), **runs, **errors}

    @cached_property
    def _by_problem(self) -> dict[str, list[float]]:
        """Metrics that have a value per problem."""
        n, problems = self.num_samples, self.problems
        return {
            "accuracy": [fmean(p.samples.scores) for p in problems],
            "greedy": [p.greedy.scores[0] for p in problems],
            **{f"pass@{k}": [pass_at_k(n, p.num_correct, k) for p in problems] for k in ks(n, self.pass_at)},
            f"maj@{n}": [vote.score for vote in self._votes],
        }

    @property
    def num_votes_cut_short(self) -> int:
        """Problems whose vote hit a limit of `majority_at_k`; their maj@k may be slightly low."""
        return sum(vote.cut_short for vote in self._votes)

    @cached_property
    def _votes(self) -> list[Majority]:
        votes = []
        for problem in self.problems:
            extracted, scores = problem.samples.extracted, problem.samples.scores
            given = {answer for answer in extracted if answer is not None}
            hopeless = {answer for answer in given if self.undecided(problem.gold, answer)}
            votes.append(majority_at_k(extracted, scores, self.same_answer, hopeless))
        if num_cut := sum(vote.cut_short for vote in votes):
            log.warning(
                "maj@%d: %d of %d votes hit the limits on comparing answers; equal answers may have counted "
                "separately there",
                *(self.num_samples, num_cut, len(votes)),
            )
        return votes

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics with their errors, as JSON values."""
        return {
            "num_problems": len(self.problems),
            "task": self.task,
            "metrics": self.metrics(),
            "standard_errors": self.standard_errors(),
            "num_votes_cut_short": self.num_votes_cut_short,
        }

    def write_samples(self, path: Path) -> None:
        """Write a JSON line per problem: id, prompt, gold, completions, extracted, score, greedy response."""
        with path.open("w", encoding="utf-8") as file:
            for problem in self.problems:
                file.write(json.dumps(problem.to_record(), ensure_ascii=False) + "\n")


def ks(num_samples: int, others: Sequence[int] = ()) -> list[int]:
    """List 1, 2, 4, 8, ... below the number of samples, that number, and others, in order."""
    powers = [1 << i for i in range(num_samples.bit_length()) if 1 << i < num_samples]
    return sorted({*powers, num_samples, *others})


def evaluate_problems(
    source: ResponseSource,
    problems: Sequence[Problem],
    num_samples: int,
    scorer: Scorer | None = None,
    *,
    requests: Sequence[EvalRequest] | None = None,
) -> EvalResult:
    """Answer each problem once greedily and ``num_samples`` times at random.

    Args:    problems: at least one.
             scorer: also computes the rewards of the samples; None: the task's score alone.
             requests: the problems' encoded prompts; None: they are encoded here.
    Returns: `EvalResult`; the same arguments give the same result, whatever is recorded.
    Raises:  UserError: a prompt and its response do not fit into the model's context.
    """
    assert problems
    assert num_samples >= 1
    task = source.task
    if requests is None:
        requests = [source.request(problem) for problem in problems]
    results: dict[int, ProblemResult] = {}
    components: list[dict[str, float]] = []
    for indices, call_seed in source.calls(requests):
        asked = [requests[index] for index in indices]
        greedy = source.greedy(asked, call_seed)
        if source.sampling.greedy:  # every sample equals that response
            samples = [responses * num_samples for responses in greedy]
        else:
            samples = source.samples(asked, num_samples, call_seed)
        scores = _scores(scorer, task, [problems[index] for index in indices], samples)
        for place, index in enumerate(indices):
            problem = problems[index]
            text = source.tokenizer.decode(requests[index].tokens, skip_special_tokens=False)
            (greedy_scores,) = _scores(None, task, [problem], [greedy[place]])
            results[index] = ProblemResult(
                problem.id,
                text,
                problem.answer,
                _judge(task, greedy[place], greedy_scores),
                _judge(task, samples[place], scores[place]),
            )
            components += scores[place]
    ordered = [results[index] for index in range(len(problems))]
    own: dict[str, Any] = {
        name: getattr(task, name) for name in ("same_answer", "undecided") if hasattr(task, name)
    }
    if hasattr(task, "overall"):
        completions = [result.samples.completions for result in ordered]
        own["overall"] = task.overall(list(zip(problems, completions, strict=True)))
    if scorer is not None:
        own["rewards"] = validation_rewards(components, scorer.weights)
    return EvalResult(task.config.model_dump(mode="json"), num_samples, ordered, **own)


def _scores(
    scorer: Scorer | None,
    task: Task,
    problems: Sequence[Problem],
    responses: Sequence[Sequence[Completion]],
) -> list[list[dict[str, float]]]:
    """Score each problem's responses, with the scorer's own functions if there is one."""
    rows = [problem for problem, some in zip(problems, responses, strict=True) for _ in some]
    texts = [response.text for some in responses for response in some]

    def score() -> list[dict[str, float]]:
        if scorer is not None:
            return scorer(rows, texts)
        return [checked_score(task, problem, text) for problem, text in zip(rows, texts, strict=True)]

    flat = iter(from_first_rank(score))  # as in rollouts: the same on all ranks
    return [[next(flat) for _ in some] for some in responses]


def _judge(task: Task, responses: Sequence[Completion], scores: Sequence[Mapping[str, float]]) -> Verdicts:
    extracted = from_first_rank(lambda: [extracted_answer(task, response.text) for response in responses])
    return Verdicts(
        completions=[response.text for response in responses],
        extracted=extracted,
        scores=[score["accuracy"] for score in scores],
        formats=[score["format"] for score in scores],
        lengths=[response.num_tokens for response in responses],
        truncated=[response.truncated for response in responses],
    )
