"""Reads a rehearsal's output: metrics, responses, validation."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_grpo.rehearsal.stages import Rehearsal, metrics
from nemo_grpo.rehearsal.tiny_data import ToyTask
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.base import reward_of
from nemo_grpo.tasks.scoring import Scorer

NO_SCALING = {
    "enabled": False,
    "source_min": 0.0,
    "source_max": 1.0,
    "target_min": 0.0,
    "target_max": 1.0,
}
"""NeMo-RL's defaults of ``grpo.reward_scaling``."""

Row = Mapping[str, Any]
"""One response in NeMo-RL's record of a step or of a validation."""


@dataclass(frozen=True)
class Scored:
    """A recorded response, graded again.

    Attributes:
        problem: the problem that the prompt asks.
        response: text of the response.
        length: tokens in the response.
        recorded: the reward that the run trained on.
        scores: components of the recipe's reward.
        reward: the recipe's, computed from `scores`.
    """

    problem: Problem
    response: str
    length: int
    recorded: float
    scores: Mapping[str, float]
    reward: float


class Recorded:
    """A rehearsal's output."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self.recipe = rehearsal.small

    @cached_property
    def task(self) -> ToyTask:
        """Task that the small model has learnt."""
        return ToyTask(self.rehearsal.toy_recipe, self.rehearsal.problems.task)

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by step."""
        metrics_by_step: dict[int, dict[str, float]] = {}
        for row in metrics(self.recipe):
            metrics_by_step.setdefault(int(row["step"]), {}).update(row)
        # A validation before the first step has a row of step 0, without a loss.
        return {step: row for step, row in metrics_by_step.items() if "loss/total" in row}

    @property
    def is_supervised(self) -> bool:
        """True if the run learns from demonstrations and has no rollouts."""
        return self.rehearsal.recipe.loss_fn.learns_from_demonstrations

    @property
    def is_graded_here(self) -> bool:
        """True if rewards are those of `nemo_grpo.task`, not of NeMo-RL's own environments."""
        return self.rehearsal.recipe.nemo_grpo.task is not None

    @property
    def keeps_a_part(self) -> bool:
        """True if a step trains on a part of the responses that were drawn for it, and records that part."""
        return self.recipe.grpo.use_dynamic_sampling and not self.recipe.has_single_controller

    @cached_property
    def reward_scaling(self) -> Mapping[str, Any]:
        """The recipe's ``grpo.reward_scaling``, with NeMo-RL's defaults."""
        settings = self.recipe.grpo.model_dump().get("reward_scaling")
        return NO_SCALING if settings is None else {**NO_SCALING, **settings}

    def series(self, name: str) -> list[float]:
        """List one metric's values in the order of steps."""
        return [row[name] for _, row in sorted(self.steps.items()) if name in row]

    def validations(self, name: str) -> dict[int, float]:
        """List one metric of the validations, by step."""
        key = f"validation/{name}"
        return {int(row["step"]): row[key] for row in metrics(self.recipe) if key in row}

    def responses(self, step: int, kind: str = "train") -> list[Row]:
        """Read NeMo-RL's record of a step's responses, or of a validation's (``val``)."""
        folder = Path(str(self.recipe.logger.log_dir))
        # Every start of the driver writes a folder. If two trained the same step, the last one counts.
        files = sorted(folder.glob(f"exp_*/{kind}_data_step{step}.jsonl"))
        if not files:
            return []
        return [json.loads(line) for line in files[-1].read_text().splitlines()]

    @cached_property
    def scored(self) -> list[Scored]:
        """Responses to the training prompts whose problem is recognised."""
        rows = [row for step in sorted(self.steps) for row in self.responses(step)]
        return self._graded(rows, self.task.learnt_problems)

    def validated(self, step: int) -> list[Scored]:
        """Grade the validation's responses whose problem is recognised."""
        problems = self.task.validation_problems(self.recipe.grpo.num_val_problems)
        return self._graded(self.responses(step, "val"), problems)

    def _graded(self, rows: list[Row], problems: Sequence[Problem]) -> list[Scored]:
        """Grade the responses whose problem is among these."""
        settings = self.rehearsal.toy_recipe.nemo_grpo
        has_turns = hasattr(self.task.task, "observe")
        recognised_rows: list[Row] = []
        recognised_problems: list[Problem] = []
        responses: list[str] = []
        with closing(Scorer(self.task, settings.rewards, settings.prompt)) as scorer:
            for row in rows:
                prompt, *turns = self._conversation(row, has_turns)
                problem = self._problem_of(prompt, problems)
                if problem is None:
                    continue
                # Without turns the response is the first message; NeMo-RL's environments add their verdict
                # as another one.
                response_turns = turns if has_turns else turns[:1]
                recognised_rows.append(row)
                recognised_problems.append(problem)
                responses.append(scorer.first_words + "".join(response_turns))
            all_scores = scorer(recognised_problems, responses)
        graded = []
        for row, problem, response, scores in zip(
            recognised_rows, recognised_problems, responses, all_scores, strict=True
        ):
            expected = reward_of(scores, settings.rewards)
            graded.append(Scored(problem, response, num_tokens(row), reward(row), scores, expected))
        return graded

    def _problem_of(self, prompt: str, problems: Sequence[Problem]) -> Problem | None:
        """Find the problem whose question and image names the prompt contains.

        In NeMo-RL's own data images have no names; there the question alone identifies the problem.
        """
        # Longest first, because a short question such as "3 + 4?" may be a part of another.
        for problem in sorted(problems, key=lambda problem: len(problem.question), reverse=True):
            names = problem.metadata.get("images", ()) if self.is_graded_here else ()
            if problem.question in prompt and all(name in prompt for name in names):
                return problem
        return None

    def _conversation(self, row: Row, has_turns: bool) -> list[str]:
        """Return the texts of the prompt and of each turn.

        NeMo-RL's trainer on the data plane records the turns only as a printed array, so its recorded tokens
        are decoded.
        """
        if "token_ids" not in row or not self.recipe.uses_data_plane:
            content = row["content"]
            # NeMo-RL's trainers write a list of turns, or a list with that list in it.
            turns = content[0] if isinstance(content[0], list) else content
            return [_text(turn) for turn in turns]
        length = row["input_lengths"][0]
        token_ids = row["token_ids"][0][:length]
        is_response = row["token_loss_mask"][0][:length]
        start = is_response.index(1) if 1 in is_response else length
        if has_turns:
            answer = token_ids[start:]
        else:
            answer = [token for token, counts in zip(token_ids, is_response, strict=True) if counts]
        return [
            self._tokenizer.decode(part, skip_special_tokens=True) for part in (token_ids[:start], answer)
        ]

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.rehearsal.model.folder)


def reward(row: Row) -> float:
    """Read the reward that a response was trained on; under dynamic sampling, that of the kept groups."""
    return float(row.get("filtered_rewards", row["rewards"])[0])


def _text(turn: Any) -> str:
    """Return a turn's text; an image in it is the name of its file."""
    content = turn["content"] if isinstance(turn, Mapping) else turn
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(part[part["type"]]) for part in content)


def num_tokens(row: Row) -> int:
    """Count a training response's tokens; 0 for a validation's, whose tokens are not recorded."""
    return int(sum(row["token_loss_mask"][0])) if "token_loss_mask" in row else 0
