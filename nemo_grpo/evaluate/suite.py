"""Several benchmarks under one set of conditions: results, their average, files."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nemo_grpo.errors import UserError
from nemo_grpo.evaluate.benchmarks import Benchmark
from nemo_grpo.evaluate.responses import ResponseLog, Resumable
from nemo_grpo.evaluate.runner import EvalResult, ProblemResult, evaluate
from nemo_grpo.evaluate.summary import BENCHMARKS, SUMMARY, joined, read_summary
from nemo_grpo.progress import TokenMeter
from nemo_grpo.sampling.requests import Sampler, SamplingParams
from nemo_grpo.tasks import Task, encode_prompt
from nemo_grpo.tasks.environment import MultiTurnTask
from nemo_grpo.tasks.prompts import check_vocabulary

RESPONSES = "responses.jsonl"
GROUPED_BY = ("num_people", "type", "task")
"""Metadata by which results are also grouped: puzzles by size (TR-GRPO Table 1), CV-Bench by 2D and 3D and by
task (GPG Table 7), MATH by subject."""


@dataclass(frozen=True)
class Conditions:
    """Everything except problems and prompts that a response depends on.

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

    def describe(self, seeds: Sequence[int] = ()) -> str:
        """In words; ``seeds``: of several results under these conditions."""
        sampling = self.sampling
        seeded = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {self.seed}"
        drawn = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
        return (
            f"{self.num_samples} samples, {'greedy' if sampling.greedy else drawn}, "
            f"at most {sampling.max_new_tokens} tokens, {seeded}, {self.generator} in {self.dtype} "
            f"on {self.device}"
        )


@dataclass(frozen=True)
class SuiteResult:
    """Results by benchmark, in the order asked for; ``protocol``: name and source, if one was asked for."""

    conditions: Conditions
    benchmarks: dict[str, Benchmark]
    results: dict[str, EvalResult]
    protocol: dict[str, str] | None = None

    def groups(self, name: str) -> dict[str, dict[str, float]]:
        """One benchmark's avg@k, greedy and number of problems, by ``key=value`` of their metadata."""
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
                "file": benchmark.path and str(benchmark.path),
                **benchmark.identity(len(benchmark.problems)),
                **({"protocol": self.protocol} if self.protocol else {}),
                **self.results[name].to_dict(),
                "groups": self.groups(name),
            }
            for name, benchmark in self.benchmarks.items()
        }

    def write(self, folder: Path, model: Path) -> dict[str, Any]:
        """summary.json, and samples-NAME.jsonl of each benchmark.

        Returns: the summary, with the other benchmarks that the folder had under the same conditions.
        """
        folder.mkdir(exist_ok=True)
        for name, result in self.results.items():
            result.write_samples(folder / f"samples-{name}.jsonl")
        summary = {"model": str(model), **joined(read_summary(folder), self.to_dict())}
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary


def run_suite(
    generator: Sampler,
    tokenizer: Any,
    benchmarks: Sequence[Benchmark],
    conditions: Conditions,
    log: ResponseLog,
    *,
    problems_per_call: int,
    meter: TokenMeter | None = None,
    pass_at: tuple[int, ...] = (),
) -> SuiteResult:
    """Evaluate one benchmark after the other; responses that ``log`` holds are not sampled again."""
    results = {}
    for benchmark in benchmarks:
        result = evaluate(
            generator,
            tokenizer,
            benchmark.as_prompted(tokenizer),
            benchmark.prompt,
            benchmark.problems,
            conditions.num_samples,
            conditions.sampling,
            conditions.seed,
            meter,
            Resumable(log, benchmark.name, {**conditions.to_dict(), **tool_conditions(benchmark.task)}),
            problems_per_call,
        )
        results[benchmark.name] = replace(result, pass_at=pass_at)
    return SuiteResult(conditions, {b.name: b for b in benchmarks}, results)


def tool_conditions(task: Task) -> dict[str, Any]:
    """What a task with several turns adds to what decides about a response: its tool's parameters."""
    return {"task": task.config.model_dump(mode="json")} if isinstance(task, MultiTurnTask) else {}


def longest_prompt(
    benchmarks: Iterable[Benchmark],
    tokenizer: Any,
    max_new_tokens: int,
    limit: int | None,
    vocab_size: int | None = None,
    image_tokens: Callable[[Sequence[str]], int] | None = None,
) -> int:
    """Tokens of the longest prompt.

    Args:    limit: the model's longest sequence; None: none is known.
             vocab_size: the model's; None: it is not known.
             image_tokens: what a problem's images take beside their placeholders, for tasks with images.
    Raises:  UserError: it and its response do not fit, or the tokenizer is of another model; names the
             problem.
    """
    longest = 0
    for benchmark in benchmarks:
        for problem in benchmark.problems:
            has_images = benchmark.task.config.needs_images
            tokens = encode_prompt(tokenizer, benchmark.prompt, problem, with_images=has_images)
            check_vocabulary(tokens, problem, vocab_size)
            length = len(tokens)
            if has_images:
                assert image_tokens is not None
                length += image_tokens(problem.metadata["images"])
            if limit is not None and length + max_new_tokens > limit:
                remedy = "lower it" if length < limit else "leave it out"
                raise UserError(
                    f"prompt and response must fit into the model's max_position_embeddings={limit}; problem "
                    f"{problem.id!r} has {length} tokens and --max-tokens is {max_new_tokens}: {remedy}"
                )
            longest = max(longest, length)
    return longest
