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

    Attributes: generator: the policy.  sampling: of the continuations.
    """

    generator: LocalGenerator
    tokenizer: Any
    task: Task
    prompt: Prompt
    sampling: SamplingParams
    settings: PivotSettings

    def study(self, problems: Sequence[Problem]) -> PivotStudy:
        """Find solved problems, choose positions, replace tokens, resample, and score.

        Args:    problems: searched in this order for solved ones.
        Returns: the study; the same arguments give the same one.
        """
        solved, num_tried = self._find_solved(problems)
        points = self.choose_points(solved)
        tails = self._continue_all(points)
        done = []
        for item, kind, position, kept, replaced in points:
            before, after = (
                self._accuracy(item, prefix, tails[tuple(prefix)]) for prefix in (kept, replaced)
            )
            touched = [i for i, token in enumerate(kept) if i >= len(replaced) or token != replaced[i]]
            token, other = (
                self.tokenizer.decode([row[i] for i in touched if i < len(row)]) for row in (kept, replaced)
            )
            positions = tuple(i - len(item.prompt) for i in touched)
            entropy = float(item.entropies[list(positions)].mean())
            ends = (token, other, before, after)
            done.append(Point(item.problem.id, kind, position, entropy, *ends, positions))
        return PivotStudy(self.settings, num_tried, solved, done)

    def _find_solved(self, problems: Sequence[Problem]) -> tuple[list[Solved], int]:
        """Find the first problems whose greedy response is correct and has two tokens or more."""
        greedy, num_problems = replace(self.sampling, greedy=True), self.settings.num_problems
        found, num_tried = list[tuple[Problem, list[int], list[int]]](), 0
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
                    found.append((problem, ids, row[:length]))
                if len(found) == num_problems:
                    break
            if len(found) == num_problems:
                break
        if not found:
            raise UserError(
                f"the model solves none of {num_tried} problems greedily, so there is nothing to perturb; "
                "train it further, or raise nemo_grpo.evaluation.num_problems"
            )
        entropies = response_entropies(self.generator, [(ids, response) for _, ids, response in found])
        return [Solved(*item, entropy) for item, entropy in zip(found, entropies, strict=True)], num_tried

    def choose_points(self, solved: Sequence[Solved]) -> list[Choice]:
        """Choose positions and replacements of the whole study."""
        together, points = self.settings.perturbation == "together", []
        for item in solved:
            for kind, positions in choose_positions(item, self.settings).items():
                for group in [sorted(positions)] if together else [[p] for p in positions]:
                    kept = item.prompt + item.response[: group[-1] + 1]
                    points.append((item, kind, group[-1], kept, self._perturbed(item, group)))
        return points

    def _perturbed(self, item: Solved, positions: Sequence[int]) -> list[int]:
        """Return prompt and response up to the last of these positions, perturbed at all of them."""
        start, tokens = len(item.prompt), item.prompt + item.response[: positions[-1] + 1]
        if self.settings.perturbation == "truncate":
            return tokens[:-1]
        for position in positions:
            rng = stream(self.settings.seed, item.problem.id, "replacement", position)
            token = item.response[position]
            if self.settings.replacement == "uniform":
                other = _uniform_other(token, self.tokenizer, rng)
            else:
                other = _other_by_policy(self.generator, tokens[: start + position], token, rng)
            tokens[start + position] = other
        return tokens

    def _continue_all(self, points: Sequence[Choice]) -> Tails:
        """Continue every prefix once; prefixes of one length are sampled together."""
        by_length: dict[tuple[int, int], dict[tuple[int, ...], None]] = defaultdict(dict)
        for item, _, _, *prefixes in points:
            for prefix in prefixes:
                remaining = self.sampling.max_new_tokens - (len(prefix) - len(item.prompt))
                by_length[remaining, len(prefix)][tuple(prefix)] = None
        tails: Tails = {}
        with progress("continuations", len(by_length)) as advance:
            for (remaining, _), alike in sorted(by_length.items()):
                tails |= self._continue(list(alike), remaining)
                advance("")
        return tails

    def _continue(self, prefixes: Sequence[tuple[int, ...]], remaining: int) -> Tails:
        """Sample continuations of each prefix; none if it ends with a stop token or at the length limit."""
        sampling, number = self.sampling, self.settings.num_continuations
        whole = remaining == sampling.max_new_tokens  # a cut at the first token leaves the prompt
        going = [prefix for prefix in prefixes if whole or prefix[-1] not in sampling.stop_token_ids]
        going = going if remaining > 0 else []
        tails: Tails = {prefix: [[]] for prefix in prefixes}
        if going:
            limited = replace(sampling, max_new_tokens=remaining)
            prompts = [list(prefix) for prefix in going]
            rollout = self.generator.generate(Request(prompts, number, limited, self.settings.seed))
            rows = [row[:n] for row, n in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)]
            tails |= {prefix: rows[i * number : (i + 1) * number] for i, prefix in enumerate(going)}
        return tails

    def _accuracy(self, item: Solved, prefix: list[int], tails: list[list[int]]) -> float:
        """Average the accuracy of the response so far over its continuations."""
        begun = prefix[len(item.prompt) :]
        texts = text_reader(self.tokenizer, self.task)([begun + tail for tail in tails])
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
            where = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            targets = torch.tensor(response, device=logits.device)
            entropies.append(logprobs_and_entropy(logits[row, where].float(), targets)[1].cpu())
    return entropies


def choose_positions(item: Solved, settings: PivotSettings) -> dict[str, list[int]]:
    """Choose positions of each kind in a response; never the last, which nothing follows."""
    candidates = len(item.response) - 1
    number = settings.num_positions(candidates)
    order = item.entropies[:candidates].argsort(descending=True, stable=True).tolist()
    chance = stream(settings.seed, item.problem.id, "positions").sample(range(candidates), number)
    return {"pivot": order[:number], "random": sorted(chance), "calm": order[-number:]}


def _uniform_other(token: int, tokenizer: Any, rng: random.Random) -> int:
    """Draw another token of the vocabulary that is not a special one."""
    special = {token, *tokenizer.all_special_ids}
    while (other := rng.randrange(len(tokenizer))) in special:
        continue
    return other


def _other_by_policy(generator: LocalGenerator, before: list[int], token: int, rng: random.Random) -> int:
    """Draw another token from the policy at temperature 1 without the given one."""
    logits = generator.logits([before])[0, -1].double()
    logits[token] = -torch.inf
    mass = logits.softmax(-1).cumsum(-1)
    return int(
        torch.searchsorted(mass, torch.tensor(rng.random(), dtype=mass.dtype, device=mass.device) * mass[-1])
    )
