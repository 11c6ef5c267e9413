"""Several benchmarks under one set of conditions: results, their average, files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_grpo.engine.protocols import Generator, SamplingParams
from nemo_grpo.errors import UserError
from nemo_grpo.evaluate.benchmarks import Benchmark, opens_think
from nemo_grpo.evaluate.responses import ResponseLog, Resumable
from nemo_grpo.evaluate.runner import EvalResult, ProblemResult, evaluate
from nemo_grpo.evaluate.summary import BENCHMARKS, SUMMARY, average, joined, read_summary
from nemo_grpo.tasks import Problem, PromptLike, Task, encode_prompt
from nemo_grpo.tasks.environment import MultiTurnTask
from nemo_grpo.tasks.prompts import check_vocabulary

RESPONSES = "responses.jsonl"
GROUPED_BY = ("num_people",)
"""Metadata by whose value a benchmark's results are also given: puzzles by size (TR-GRPO Table 1)."""


@dataclass(frozen=True)
class Conditions:
    """Everything beside the problems and prompts that decides about a response.

    Attributes: model: fingerprint of the folder.  generator, dtype, device: what computes.
    """

    model: str
    generator: str
    dtype: str
    device: str
    sampling: SamplingParams
    num_samples: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SuiteResult:
    """Results by benchmark, in the order asked for."""

    conditions: Conditions
    benchmarks: dict[str, Benchmark]
    results: dict[str, EvalResult]

    def average(self) -> tuple[dict[str, float], dict[str, float]]:
        """See `nemo_grpo.evaluate.summary.average`."""
        return average(self._entries().values())

    def groups(self, name: str) -> dict[str, dict[str, float]]:
        """Of one benchmark, by ``key=value`` of its problems' metadata: avg@k, greedy, number of problems."""
        members: dict[str, list[ProblemResult]] = {}
        for problem, answered in zip(
            self.benchmarks[name].problems, self.results[name].problems, strict=True
        ):
            for key in GROUPED_BY:
                if key in problem.metadata:
                    members.setdefault(f"{key}={problem.metadata[key]}", []).append(answered)
        return {
            label: {
                "accuracy": math.fsum(math.fsum(p.samples.scores) / len(p.samples.scores) for p in found)
                / len(found),
                "greedy": math.fsum(p.greedy.scores[0] for p in found) / len(found),
                "num_problems": len(found),
            }
            for label, found in members.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return joined(None, {"conditions": self.conditions.to_dict(), BENCHMARKS: self._entries()})

    def _entries(self) -> dict[str, Any]:
        return {
            name: {
                "file": str(benchmark.path),
                **benchmark.identity(),
                "num_problems": len(benchmark.problems),
                "task": self.results[name].task,
                "metrics": self.results[name].metrics(),
                "standard_errors": self.results[name].standard_errors(),
                "num_votes_cut_short": self.results[name].num_votes_cut_short,
                "groups": self.groups(name),
            }
            for name, benchmark in self.benchmarks.items()
        }

    def write(self, folder: Path, model: Path) -> dict[str, Any]:
        """summary.json, and samples-NAME.jsonl of each benchmark.

        Returns: the summary, with the other benchmarks that the folder had under the same conditions.
        """
        for name, result in self.results.items():
            result.write_samples(folder / f"samples-{name}.jsonl")
        summary = {"model": str(model), **joined(read_summary(folder), self.to_dict())}
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary


def run_suite(
    generator: Generator,
    tokenizer: Any,
    benchmarks: Sequence[Benchmark],
    conditions: Conditions,
    log: ResponseLog,
    *,
    problems_per_call: int,
    on_progress: Callable[[str], None] | None = None,
) -> SuiteResult:
    """Evaluate one benchmark after the other; responses that ``log`` holds are not sampled again."""
    results = {}
    for benchmark in benchmarks:
        results[benchmark.name] = evaluate(
            generator,
            tokenizer,
            _as_prompted(benchmark, tokenizer),
            benchmark.prompt,
            benchmark.problems,
            conditions.num_samples,
            conditions.sampling,
            conditions.seed,
            on_progress,
            Resumable(log, benchmark.name, {**conditions.to_dict(), **tool_conditions(benchmark.task)}),
            problems_per_call,
        )
    return SuiteResult(conditions, {b.name: b for b in benchmarks}, results)


def tool_conditions(task: Task) -> dict[str, Any]:
    """What a task with several turns adds to what decides about a response: its tool's parameters."""
    return {"task": task.config.model_dump(mode="json")} if isinstance(task, MultiTurnTask) else {}


def _as_prompted(benchmark: Benchmark, tokenizer: Any) -> Any:
    prompt = encode_prompt(tokenizer, benchmark.prompt, benchmark.problems[0])
    return opens_think(benchmark.task, tokenizer.decode(prompt, skip_special_tokens=False))


def longest_prompt(
    asked: Iterable[tuple[PromptLike, Sequence[Problem]]],
    tokenizer: Any,
    max_new_tokens: int,
    limit: int | None,
    vocab_size: int | None = None,
) -> int:
    """Tokens of the longest prompt.

    Args:    asked: problems with their prompt.  limit: the model's longest sequence; None: none is known.
             vocab_size: the model's; None: it is not known.
    Raises:  UserError: it and its response do not fit, or the tokenizer is of another model; names the
             problem.
    """
    longest = 0
    for prompt, problems in asked:
        for problem in problems:
            tokens = encode_prompt(tokenizer, prompt, problem)
            check_vocabulary(tokens, problem, vocab_size)
            length = len(tokens)
            if limit is not None and length + max_new_tokens > limit:
                remedy = "lower it" if length < limit else "leave it out"
                raise UserError(
                    f"prompt and response must fit into the model's max_position_embeddings={limit}; problem "
                    f"{problem.id!r} has {length} tokens and --max-tokens is {max_new_tokens}: {remedy}"
                )
            longest = max(longest, length)
    return longest
