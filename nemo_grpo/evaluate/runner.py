"""Evaluation of a task: sampling, scoring, metrics, with the prompt, extraction and reward of training."""

import json
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

    Attributes:
        completions: texts of the responses.
        extracted: answer in each response, or None if it has none.
        scores: reward component "accuracy" of each response.
        formats: reward component "format" of each response.
        lengths: number of the policy's tokens in each response.
        truncated: True for responses that the length limit ended.
    """

    completions: list[str]
    extracted: list[str | None]
    scores: list[float]
    formats: list[float]
    lengths: list[int]
    truncated: list[bool]


@dataclass(frozen=True)
class ProblemResult:
    """One problem, its greedy response and its samples.

    Attributes:
        id: identity of the problem.
        prompt: text that the policy continued.
        gold: reference answer.
        greedy: the greedy response.
        samples: the random responses.
    """

    id: str
    prompt: str
    gold: str
    greedy: Verdicts
    samples: Verdicts

    @property
    def num_correct(self) -> int:
        """Number of samples with full accuracy; partial credit does not count towards pass@k."""
        return sum(score >= 1 for score in self.samples.scores)

    def to_record(self) -> dict[str, Any]:
        """Return the problem's line of samples.jsonl."""
        return {
            "id": self.id,
            "prompt": self.prompt,
            "gold": self.gold,
            "completions": self.samples.completions,
            "extracted": self.samples.extracted,
            "score": self.samples.scores,
            "format": self.samples.formats,
            "num_tokens": self.samples.lengths,
            "truncated": self.samples.truncated,
            "greedy_completion": self.greedy.completions[0],
            "greedy_extracted": self.greedy.extracted[0],
            "greedy_score": self.greedy.scores[0],
        }


@dataclass(frozen=True)
class EvalResult:
    """All problems with their responses, and the task's parameters.

    Attributes:
        task: the task's parameters.
        num_samples: random responses to each problem.
        problems: the problems with their responses.
        same_answer: compares two extracted answers for the vote of maj@k.
        undecided: returns True if a reference and an extracted answer could not be compared in time.
        pass_at: values of k for pass@k in addition to powers of two; at most the number of samples.
        overall: the task's own metrics, see `nemo_grpo.tasks.base.Answered`.
        rewards: `validation_rewards` of the samples; empty for an evaluation without a scorer.
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

        Returns:
            - ``accuracy`` (avg@k) and ``greedy``, each with ``_stderr`` over problems
            - ``pass@1,2,4,8,..`` up to and including the number of samples, and those of ``pass_at``
            - ``maj@<samples>``
            - ``format``, ``truncated`` and ``num_tokens`` as means over samples
            - with a scorer, ``reward`` and every component
        """
        means = dict(self.rewards)
        for name, values in self._by_problem.items():
            means[name], stderr = mean_and_stderr(values)
            if name in ("accuracy", "greedy") and len(values) > 1:
                means[f"{name}_stderr"] = stderr
        means["format"] = fmean(fmean(problem.samples.formats) for problem in self.problems)
        means["truncated"] = fmean(fmean(problem.samples.truncated) for problem in self.problems)
        means["num_tokens"] = fmean(fmean(problem.samples.lengths) for problem in self.problems)
        return means | self.overall

    def standard_errors(self) -> dict[str, float]:
        """Return the standard error of each metric over problems, if there are two problems or more.

        ``accuracy_runs`` is that of the accuracy over repeated evaluations, see `stderr_of_runs`.
        """
        run_error = stderr_of_runs([problem.samples.scores for problem in self.problems])
        if len(self.problems) == 1:
            return {"accuracy_runs": run_error}
        errors = {name: mean_and_stderr(values)[1] for name, values in self._by_problem.items()}
        # The two errors of the accuracy come first, side by side.
        return {"accuracy": errors.pop("accuracy"), "accuracy_runs": run_error, **errors}

    @cached_property
    def _by_problem(self) -> dict[str, list[float]]:
        """Metrics that have a value per problem."""
        num_samples = self.num_samples
        values = {
            "accuracy": [fmean(problem.samples.scores) for problem in self.problems],
            "greedy": [problem.greedy.scores[0] for problem in self.problems],
        }
        for k in ks(num_samples, self.pass_at):
            values[f"pass@{k}"] = [
                pass_at_k(num_samples, problem.num_correct, k) for problem in self.problems
            ]
        values[f"maj@{num_samples}"] = [vote.score for vote in self._votes]
        return values

    @property
    def num_votes_cut_short(self) -> int:
        """Number of problems whose vote hit a limit of `majority_at_k`; their maj@k may be slightly low."""
        return sum(vote.cut_short for vote in self._votes)

    @cached_property
    def _votes(self) -> list[Majority]:
        votes = []
        for problem in self.problems:
            extracted = problem.samples.extracted
            answers = {answer for answer in extracted if answer is not None}
            # Scoring already ran into the time limit on these answers. The vote does not compare them again.
            hopeless = {answer for answer in answers if self.undecided(problem.gold, answer)}
            votes.append(majority_at_k(extracted, problem.samples.scores, self.same_answer, hopeless))
        num_cut_short = sum(vote.cut_short for vote in votes)
        if num_cut_short:
            log.warning(
                "maj@%d: %d of %d votes hit the limits on comparing answers; equal answers may have counted "
                "separately there",
                self.num_samples,
                num_cut_short,
                len(votes),
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


def ks(num_samples: int, further: Sequence[int] = ()) -> list[int]:
    """List the k of pass@k: powers of two below the number of samples, that number, and ``further``."""
    powers = [2**exponent for exponent in range(num_samples.bit_length())]
    smaller_powers = [power for power in powers if power < num_samples]
    return sorted({*smaller_powers, num_samples, *further})


def evaluate_problems(
    source: ResponseSource,
    problems: Sequence[Problem],
    num_samples: int,
    scorer: Scorer | None = None,
    *,
    requests: Sequence[EvalRequest] | None = None,
) -> EvalResult:
    """Answer each problem once greedily and ``num_samples`` times at random.

    Args:
        source: gives the responses.
        problems: at least one problem.
        num_samples: random responses to each problem.
        scorer: also computes the rewards of the samples. Without it, only the task's score is computed.
        requests: encoded prompts of the problems, if the caller has them already.

    Returns:
        The result. It does not depend on which responses were recorded before.

    Raises:
        UserError: a prompt and its response do not fit into the model's context.
    """
    assert problems
    assert num_samples >= 1
    task = source.task
    if requests is None:
        requests = [source.request(problem) for problem in problems]
    results: dict[int, ProblemResult] = {}
    components: list[dict[str, float]] = []
    for indices, call_seed in source.calls(requests):
        call_requests = [requests[index] for index in indices]
        greedy = source.greedy(call_requests, call_seed)
        if source.sampling.greedy:
            # At temperature 0 every sample would be the greedy response again.
            samples = [responses * num_samples for responses in greedy]
        else:
            samples = source.samples(call_requests, num_samples, call_seed)
        scores = _scores(scorer, task, [problems[index] for index in indices], samples)
        for place, index in enumerate(indices):
            problem = problems[index]
            # The greedy response gets no reward, so that the scorer's own reward functions do not see it.
            (greedy_scores,) = _scores(None, task, [problem], [greedy[place]])
            results[index] = ProblemResult(
                id=problem.id,
                prompt=source.tokenizer.decode(requests[index].tokens, skip_special_tokens=False),
                gold=problem.answer,
                greedy=_judge(task, greedy[place], greedy_scores),
                samples=_judge(task, samples[place], scores[place]),
            )
            components += scores[place]
    # Calls are not in the order of the problems, because repeated prompts come last.
    ordered = [results[index] for index in range(len(problems))]
    optional = _task_fields(task, problems, ordered)
    if scorer is not None:
        optional["rewards"] = validation_rewards(components, scorer.weights)
    return EvalResult(task.config.model_dump(mode="json"), num_samples, ordered, **optional)


def _task_fields(task: Any, problems: Sequence[Problem], results: Sequence[ProblemResult]) -> dict[str, Any]:
    """Return the fields of `EvalResult` that come from optional attributes of the task."""
    task_fields: dict[str, Any] = {}
    for name in ("same_answer", "undecided"):
        if hasattr(task, name):
            task_fields[name] = getattr(task, name)
    if hasattr(task, "overall"):
        completions = [result.samples.completions for result in results]
        task_fields["overall"] = task.overall(list(zip(problems, completions, strict=True)))
    return task_fields


def _scores(
    scorer: Scorer | None,
    task: Task,
    problems: Sequence[Problem],
    responses: Sequence[Sequence[Completion]],
) -> list[list[dict[str, float]]]:
    """Score each problem's responses, with the scorer's own functions if there is one."""
    repeated_problems: list[Problem] = []
    texts: list[str] = []
    for problem, responses_to_problem in zip(problems, responses, strict=True):
        for response in responses_to_problem:
            repeated_problems.append(problem)
            texts.append(response.text)

    def score() -> list[dict[str, float]]:
        if scorer is not None:
            return scorer(repeated_problems, texts)
        pairs = zip(repeated_problems, texts, strict=True)
        return [checked_score(task, problem, text) for problem, text in pairs]

    # As in rollouts, one rank scores for all, because a user's reward function may be random.
    scores = iter(from_first_rank(score))
    return [[next(scores) for _ in responses_to_problem] for responses_to_problem in responses]


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
