"""Evaluation of a model folder on several benchmarks, under one or more seeds, with its files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_grpo.evaluate.benchmarks import Benchmark, load_benchmarks
from nemo_grpo.evaluate.config import EvalConfig
from nemo_grpo.evaluate.folders import check_place, finite_logits, model_limits, result_name, tokenizer_of
from nemo_grpo.evaluate.passk import parse_ks
from nemo_grpo.evaluate.runner import EvalResult, ProblemResult, evaluate_problems
from nemo_grpo.evaluate.sampling import ResponseFile, ResponseSource
from nemo_grpo.evaluate.summary import BENCHMARKS, SUMMARY, check_summary, joined, read_summary
from nemo_grpo.recipe import Recipe
from nemo_grpo.sampling.images import ImageTokens
from nemo_grpo.sampling.requests import Request, Rollout, Sampler
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.progress import TokenMeter, progress
from nemo_grpo.support.sections import EvalOptions
from nemo_grpo.tasks import encode_prompt
from nemo_grpo.tasks.base import make_ready
from nemo_grpo.tasks.prompts import check_vocabulary

GROUPED_BY = ("num_people", "type", "task")
"""Metadata by which results are also grouped: puzzles by size (TR-GRPO Table 1), CV-Bench by 2D and 3D and by
task (GPG Table 7), MATH by subject."""


@dataclass(frozen=True)
class SuiteResult:
    """Results under one seed.

    Attributes:
        conditions: see `EvalConfig.conditions`.
        benchmarks: name -> benchmark, in the order of the command.
        results: name of the benchmark -> its results.
        protocol: name and source of the protocol, if one is used.
    """

    conditions: dict[str, Any]
    benchmarks: dict[str, Benchmark]
    results: dict[str, EvalResult]
    protocol: dict[str, str] | None = None

    def groups(self, name: str) -> dict[str, dict[str, float]]:
        """Compute avg@k, greedy accuracy and size of a benchmark's groups of problems.

        A group has one value of a key of `GROUPED_BY` in the problems' metadata; its label is ``key=value``.
        """
        members: dict[str, list[ProblemResult]] = {}
        results = self.results[name].problems
        for problem, result in zip(self.benchmarks[name].problems, results, strict=True):
            for key in GROUPED_BY:
                if key in problem.metadata:
                    members.setdefault(f"{key}={problem.metadata[key]}", []).append(result)
        groups: dict[str, dict[str, float]] = {}
        for label, group in members.items():
            groups[label] = {
                "accuracy": fmean(fmean(result.samples.scores) for result in group),
                "greedy": fmean(result.greedy.scores[0] for result in group),
                "num_problems": len(group),
            }
        return groups

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        entries = {name: self._entry(benchmark) for name, benchmark in self.benchmarks.items()}
        return joined(None, {"conditions": self.conditions, BENCHMARKS: entries})

    def _entry(self, benchmark: Benchmark) -> dict[str, Any]:
        """Return a benchmark's part of the summary."""
        file = None if benchmark.path is None else str(benchmark.path)
        entry: dict[str, Any] = {"file": file, **benchmark.identity(len(benchmark.problems))}
        if self.protocol:
            entry["protocol"] = self.protocol
        entry |= self.results[benchmark.name].to_dict()
        entry["groups"] = self.groups(benchmark.name)
        return entry

    def write(self, folder: Path, model: Path) -> dict[str, Any]:
        """Write summary.json, and samples-NAME.jsonl of each benchmark.

        Returns:
            The summary. It includes benchmarks that the folder already holds under the same conditions.
        """
        folder.mkdir(exist_ok=True)
        for name, result in self.results.items():
            result.write_samples(folder / f"samples-{name}.jsonl")
        summary = {"model": str(model), **joined(read_summary(folder), self.to_dict())}
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary


@dataclass(frozen=True)
class Suite:
    """Benchmarks to evaluate under one configuration.

    Attributes:
        config: resolved configuration.
        conditions: conditions of ``config``; computed once, because that hashes all of the model's files.
        tokenizer: tokenizer of the model.
        benchmarks: benchmarks to evaluate, in order.
        out: folder of the recorded responses.
    """

    config: EvalConfig
    conditions: dict[str, Any]
    tokenizer: Any
    benchmarks: Sequence[Benchmark]
    out: Path

    def responses(self, benchmark: Benchmark) -> Path:
        """Return the file of a benchmark's responses."""
        key = benchmark.response_key(self.conditions)
        return self.out / f"responses-{benchmark.name}-{key}.jsonl"

    def run(self, generator: Sampler, seed: int, meter: TokenMeter | None = None) -> SuiteResult:
        """Evaluate the benchmarks one by one. Recorded responses are not sampled again."""
        config = self.config
        results = {}
        for benchmark in self.benchmarks:
            with ResponseFile(self.responses(benchmark)) as recorded:
                source = ResponseSource(
                    generator=generator,
                    tokenizer=self.tokenizer,
                    task=benchmark.as_prompted(self.tokenizer),
                    prompt=benchmark.prompt,
                    sampling=config.sampling,
                    seed=seed,
                    meter=meter,
                    recorded=recorded,
                    problems_per_call=config.problems_per_call,
                )
                result = evaluate_problems(source, benchmark.problems, config.num_samples)
            pass_at = parse_ks(config.pass_at, config.num_samples)
            results[benchmark.name] = replace(result, pass_at=pass_at)
        protocol = None
        if config.protocol:
            protocol = {"name": config.protocol, "source": config.source}
        conditions = {**self.conditions, "seed": seed}
        benchmarks = {benchmark.name: benchmark for benchmark in self.benchmarks}
        return SuiteResult(conditions, benchmarks, results, protocol)


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation.

    Attributes:
        results: seed -> results.
        summaries: seed -> the summary that was written.
        out: folder of all files.
    """

    results: dict[int, SuiteResult]
    summaries: dict[int, dict[str, Any]]
    out: Path


def evaluate(
    model: Path,
    options: EvalOptions,
    recipe: Recipe | None = None,
    out: Path | None = None,
    *,
    overwrite: bool = False,
) -> Evaluation:
    """Evaluate a model folder on benchmarks, and write the results.

    Args:
        model: Hugging Face folder.
        options: options of the command line; they take precedence over the recipe.
        recipe: gives the task, prompt and settings.
        out: folder of the results. The default is ``eval-NAME`` in the recipe's folder of runs, or in
            ``runs`` without a recipe.
        overwrite: replace results of other conditions in ``out``.

    Raises:
        UserError: settings, prompts or results exclude each other; nothing is created then.
    """
    tokenizer = tokenizer_of(model)
    config = EvalConfig.of(model, options, recipe)
    benchmarks = load_benchmarks(config)
    limit, vocab_size = model_limits(model)
    if config.protocol and options.max_tokens is None and limit is not None:
        # A protocol's response length may exceed what this model can hold after the longest prompt.
        room = limit - longest_prompt(benchmarks, tokenizer, model, 0, None, vocab_size)
        config = replace(config, max_tokens=max(1, min(config.max_tokens, room)))
    if out is None:
        runs_dir = recipe.nemo_grpo.runs_dir if recipe else "runs"
        out = Path(runs_dir) / f"eval-{result_name(model)}"
    check_place(out)
    longest = longest_prompt(benchmarks, tokenizer, model, config.max_tokens, limit, vocab_size)
    config = config.resolved(tokenizer)
    suite = Suite(config, config.conditions(), tokenizer, benchmarks, out)
    folders = {config.seed: out}
    if config.seeds is not None:
        folders = {seed: out / f"seed-{seed}" for seed in config.all_seeds()}
    with finite_logits(model):
        results = _evaluate_seeds(suite, folders, longest, overwrite)
    summaries = {seed: result.write(folders[seed], model) for seed, result in results.items()}
    return Evaluation(results, summaries, out)


def _evaluate_seeds(
    suite: Suite, folders: Mapping[int, Path], longest: int, overwrite: bool
) -> dict[int, SuiteResult]:
    """Evaluate under every seed; results are not written yet.

    Args:
        suite: benchmarks with their configuration.
        folders: seed -> folder of its results.
        longest: tokens of the longest prompt.
        overwrite: replace results of other conditions.
    """
    config = suite.config
    benchmarks = suite.benchmarks
    max_images = max(
        len(problem.metadata["images"]) if benchmark.task.config.needs_images else 0
        for benchmark in benchmarks
        for problem in benchmark.problems
    )
    if not overwrite:
        for seed, folder in folders.items():
            check_summary(folder, {**suite.conditions, "seed": seed}, benchmarks)

    def build() -> Sampler:
        # The tasks' tools come first, so that an index that cannot be built is reported before the model
        # takes minutes to load.
        for benchmark in benchmarks:
            make_ready(benchmark.task)
        return config.build_generator(longest, max_images)

    generator = LazyGenerator(build)
    if not all(suite.responses(benchmark).exists() for benchmark in benchmarks):
        # Load the model now, so that a broken one is reported before any file is created.
        generator.load()
    num_problems = sum(len(benchmark.problems) for benchmark in benchmarks)
    responses_per_problem = 1 if config.sampling.greedy else 1 + config.num_samples
    num_responses = len(folders) * num_problems * responses_per_problem
    with progress("responses", num_responses, metered=True) as advance:
        meter = TokenMeter(advance, num_responses, config.max_tokens)
        return {seed: suite.run(generator, seed, meter) for seed in folders}


class LazyGenerator:
    """Generator that loads the model when the first response is sampled, so never if all are recorded.

    Args:
        build: makes the generator, with the model's weights.
    """

    def __init__(self, build: Callable[[], Sampler]) -> None:
        self.load = cache(build)

    def generate(self, request: Request) -> Rollout:
        """See `Sampler.generate`."""
        return self.load().generate(request)


def longest_prompt(
    benchmarks: Sequence[Benchmark],
    tokenizer: Any,
    model: Path,
    max_new_tokens: int,
    limit: int | None,
    vocab_size: int | None = None,
) -> int:
    """Count the tokens of the longest prompt, images included.

    Args:
        benchmarks: benchmarks whose prompts are counted.
        tokenizer: tokenizer of the model.
        model: folder of the model.
        max_new_tokens: largest number of tokens of a response.
        limit: the model's longest sequence, if it is known.
        vocab_size: size of the model's vocabulary, if it is known.

    Raises:
        UserError: a prompt does not fit into the model, or has a token that the model does not know.
    """
    longest = 0
    image_tokens = cache(ImageTokens)  # loads the model's processor when the first problem has images
    for benchmark in benchmarks:
        has_images = benchmark.task.config.needs_images
        for problem in benchmark.problems:
            tokens = encode_prompt(tokenizer, benchmark.prompt, problem, with_images=has_images)
            check_vocabulary(tokens, problem, vocab_size)
            length = len(tokens)
            if has_images:
                length += image_tokens(model)(problem.metadata["images"])
            if limit is not None and length + max_new_tokens > limit:
                raise UserError(
                    f"prompt and response must fit into the model's max_position_embeddings={limit}; problem "
                    f"{problem.id!r} has {length} tokens{_remedy(length, max_new_tokens, limit)}"
                )
            longest = max(longest, length)
    return longest


def _remedy(length: int, max_new_tokens: int, limit: int) -> str:
    """Write what to do about a prompt that is too long: shorten the responses, or else leave it out."""
    if length < limit:
        return f" and --max-tokens is {max_new_tokens}: use --max-tokens {limit - length} or less"
    return ", which leaves no room for a response; take it out, or choose a model with more positions"
