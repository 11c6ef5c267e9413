"""Perturbation study of a policy's most uncertain tokens (ERPO Figure 1).

For every problem that the model solves greedily, at three kinds of positions of its response,

    pivot    the positions of largest entropy           random   drawn uniformly
    calm     the positions of smallest entropy

the token is replaced, or the response is cut before it, and the rest resampled. The control keeps the token
and resamples the rest from the same position. The drop in accuracy between the two is the effect of the token
without that of resampling.

Deviation: the paper replaces all chosen tokens of a response at once (``perturbation: together``) and does
not say how the response continues; here it continues after the last of them. By default each is replaced
separately, so that an effect belongs to one position. The paper does not explain its "controlled truncation".
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.pivot_results import PivotSettings, PivotStudy, Point, Solved
from nemo_grpo.core.logprobs import logprobs_and_entropy
from nemo_grpo.sampling.episodes import text_reader
from nemo_grpo.sampling.local_generator import LocalGenerator
from nemo_grpo.sampling.requests import Request, SamplingParams
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.progress import progress
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt
from nemo_grpo.tasks.base import stream

ROWS_PER_FORWARD = 16

Choice = tuple[Solved, str, int, list[int], list[int]]
"""A response, kind, last position, and the prefix kept and perturbed, prompt included."""
Tails = dict[tuple[int, ...], list[list[int]]]
"""Prefix -> continuations."""


@dataclass(frozen=True)
class Experiment:
    """The study of one policy.

    Attributes:
        generator: the policy.
        tokenizer: the policy's tokenizer.
        task: scores the responses.
        prompt: the recipe's prompt.
        sampling: parameters of the continuations.
        settings: the study's settings.
    """

    generator: LocalGenerator
    tokenizer: Any
    task: Task
    prompt: Prompt
    sampling: SamplingParams
    settings: PivotSettings

    def study(self, problems: Sequence[Problem]) -> PivotStudy:
        """Find solved problems, choose positions, replace tokens, resample, and score.

        Args:
            problems: problems to search, in this order, for solved ones.

        Returns:
            The study; the same arguments give the same one.
        """
        solved, num_tried = self._find_solved(problems)
        points = self.choose_points(solved)
        tails = self._continue_all(points)
        measured_points = []
        for item, kind, position, original, perturbed in points:
            accuracy = self._accuracy(item, original, tails[tuple(original)])
            perturbed_accuracy = self._accuracy(item, perturbed, tails[tuple(perturbed)])
            # A perturbed prefix is shorter than the original if the response was cut before the position.
            changed = []
            for index, token_id in enumerate(original):
                if index >= len(perturbed) or token_id != perturbed[index]:
                    changed.append(index)
            token = self.tokenizer.decode([original[index] for index in changed])
            replacement = self.tokenizer.decode([perturbed[i] for i in changed if i < len(perturbed)])
            positions = tuple(index - len(item.prompt) for index in changed)
            entropy = float(item.entropies[list(positions)].mean())
            accuracies = (accuracy, perturbed_accuracy)
            measured_points.append(
                Point(item.problem.id, kind, position, entropy, token, replacement, *accuracies, positions)
            )
        return PivotStudy(self.settings, num_tried, solved, measured_points)

    def _find_solved(self, problems: Sequence[Problem]) -> tuple[list[Solved], int]:
        """Find the first problems whose greedy response is correct and has two tokens or more."""
        greedy = replace(self.sampling, greedy=True)
        num_problems = self.settings.num_problems
        solutions: list[tuple[Problem, list[int], list[int]]] = []
        num_tried = 0
        for start in range(0, len(problems), num_problems):
            part = problems[start : start + num_problems]
            prompts = [encode_prompt(self.tokenizer, self.prompt, problem) for problem in part]
            rollout = self.generator.generate(Request(prompts, 1, greedy, self.settings.seed))
            for problem, ids, row, length in zip(
                part, prompts, rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True
            ):
                (text,) = text_reader(self.tokenizer, self.task)([row[:length]])
                num_tried += 1
                if length >= 2 and self.task.score(problem, text)["accuracy"] >= 1:
                    solutions.append((problem, ids, row[:length]))
                if len(solutions) == num_problems:
                    break
            if len(solutions) == num_problems:
                break
        if not solutions:
            raise UserError(
                f"the model solves none of {num_tried} problems greedily, so there is nothing to perturb; "
                "train it further, or raise nemo_grpo.evaluation.num_problems"
            )
        entropies = response_entropies(self.generator, [(ids, response) for _, ids, response in solutions])
        solved = []
        for (problem, ids, response), entropy in zip(solutions, entropies, strict=True):
            solved.append(Solved(problem, ids, response, entropy))
        return solved, num_tried

    def choose_points(self, solved: Sequence[Solved]) -> list[Choice]:
        """Choose positions and replacements of the whole study."""
        points: list[Choice] = []
        for item in solved:
            for kind, positions in choose_positions(item, self.settings).items():
                groups = [[position] for position in positions]
                if self.settings.perturbation == "together":
                    groups = [sorted(positions)]
                for group in groups:
                    last = group[-1]
                    original = item.prompt + item.response[: last + 1]
                    points.append((item, kind, last, original, self._perturbed(item, group)))
        return points

    def _perturbed(self, item: Solved, positions: Sequence[int]) -> list[int]:
        """Return prompt and response up to the last of these positions, perturbed at all of them."""
        start = len(item.prompt)
        tokens = item.prompt + item.response[: positions[-1] + 1]
        if self.settings.perturbation == "truncate":
            return tokens[:-1]
        for position in positions:
            rng = stream(self.settings.seed, item.problem.id, "replacement", position)
            token = item.response[position]
            if self.settings.replacement == "uniform":
                replacement = _uniform_other(token, self.tokenizer, rng)
            else:
                replacement = _other_by_policy(self.generator, tokens[: start + position], token, rng)
            tokens[start + position] = replacement
        return tokens

    def _continue_all(self, points: Sequence[Choice]) -> Tails:
        """Continue every prefix once; prefixes of one length are sampled together."""
        # Dictionaries serve as ordered sets: several points may share a prefix.
        by_length: dict[tuple[int, int], dict[tuple[int, ...], None]] = defaultdict(dict)
        for item, _, _, *prefixes in points:
            for prefix in prefixes:
                remaining = self.sampling.max_new_tokens - (len(prefix) - len(item.prompt))
                by_length[remaining, len(prefix)][tuple(prefix)] = None
        tails: Tails = {}
        with progress("continuations", len(by_length)) as advance:
            for (remaining, _), prefixes_of_length in sorted(by_length.items()):
                tails |= self._continue(list(prefixes_of_length), remaining)
                advance("")
        return tails

    def _continue(self, prefixes: Sequence[tuple[int, ...]], remaining: int) -> Tails:
        """Sample continuations of each prefix; empty ones after a stop token or at the length limit."""
        sampling = self.sampling
        number = self.settings.num_continuations
        # A cut at the first token leaves the prompt, whose last token may be a stop token.
        is_prompt = remaining == sampling.max_new_tokens
        unfinished = [prefix for prefix in prefixes if is_prompt or prefix[-1] not in sampling.stop_token_ids]
        tails: Tails = {prefix: [[]] for prefix in prefixes}
        if remaining <= 0 or not unfinished:
            return tails
        limited = replace(sampling, max_new_tokens=remaining)
        prompts = [list(prefix) for prefix in unfinished]
        rollout = self.generator.generate(Request(prompts, number, limited, self.settings.seed))
        rows = []
        for row, length in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True):
            rows.append(row[:length])
        for index, prefix in enumerate(unfinished):
            tails[prefix] = rows[index * number : (index + 1) * number]
        return tails

    def _accuracy(self, item: Solved, prefix: list[int], tails: list[list[int]]) -> float:
        """Average the accuracy of the response so far over its continuations."""
        response_so_far = prefix[len(item.prompt) :]
        responses = [response_so_far + tail for tail in tails]
        texts = text_reader(self.tokenizer, self.task)(responses)
        return sum(self.task.score(item.problem, text)["accuracy"] for text in texts) / len(texts)


def response_entropies(
    generator: LocalGenerator, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[Tensor]:
    """Return [T] per (prompt, response): entropy at temperature 1 of each token's distribution."""
    entropies = []
    for start in range(0, len(pairs), ROWS_PER_FORWARD):
        part = pairs[start : start + ROWS_PER_FORWARD]
        logits = generator.logits([prompt + response for prompt, response in part])
        for row, (prompt, response) in enumerate(part):
            # The logits at a token predict the next one.
            predicting = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            targets = torch.tensor(response, device=logits.device)
            _, response_entropy = logprobs_and_entropy(logits[row, predicting].float(), targets)
            entropies.append(response_entropy.cpu())
    return entropies


def choose_positions(item: Solved, settings: PivotSettings) -> dict[str, list[int]]:
    """Choose positions of each kind in a response; never the last, which nothing follows."""
    num_candidates = len(item.response) - 1
    number = settings.num_positions(num_candidates)
    by_entropy = item.entropies[:num_candidates].argsort(descending=True, stable=True).tolist()
    rng = stream(settings.seed, item.problem.id, "positions")
    random_positions = sorted(rng.sample(range(num_candidates), number))
    return {"pivot": by_entropy[:number], "random": random_positions, "calm": by_entropy[-number:]}


def _uniform_other(token: int, tokenizer: Any, rng: random.Random) -> int:
    """Draw another token of the vocabulary that is not a special one."""
    excluded = {token, *tokenizer.all_special_ids}
    while True:
        replacement = rng.randrange(len(tokenizer))
        if replacement not in excluded:
            return replacement


def _other_by_policy(generator: LocalGenerator, before: list[int], token: int, rng: random.Random) -> int:
    """Draw another token from the policy at temperature 1 without the given one."""
    logits = generator.logits([before])[0, -1].double()
    logits[token] = -torch.inf
    # Invert the cumulative distribution at a uniform number, so that the draw depends on `rng` alone.
    mass = logits.softmax(-1).cumsum(-1)
    uniform = torch.tensor(rng.random(), dtype=mass.dtype, device=mass.device)
    return int(torch.searchsorted(mass, uniform * mass[-1]))
