"""What a rehearsal has left behind: metrics, responses, validation, read once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_grpo.rehearsal import recipe as small
from nemo_grpo.rehearsal import vision
from nemo_grpo.rehearsal.problems import RehearsedTask
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, metrics, newest_checkpoint, run_python
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.base import reward_of
from nemo_grpo.tasks.scoring import Scorer

Row = Mapping[str, Any]
"""One response in NeMo-RL's record of a step or of a validation."""


@dataclass(frozen=True)
class Scored:
    """A recorded response, graded once more.

    Attributes: step: its step; 0: of the validation.  recorded: the reward that the run trained on.
                reward: the recipe's, of `scores`.
    """

    step: int
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
    def rows(self) -> list[dict[str, float]]:
        """Rows of metrics.jsonl that hold an update."""
        return [row for row in metrics(self.recipe) if "loss/total" in row]

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by step."""
        found: dict[int, dict[str, float]] = {}
        for row in metrics(self.recipe):
            found.setdefault(int(row["step"]), {}).update(row)
        return {step: row for step, row in found.items() if "loss/total" in row}

    @property
    def is_supervised(self) -> bool:
        """The run learns from demonstrations and has no rollouts."""
        return self.rehearsal.recipe.loss_fn.learns_from_demonstrations

    @property
    def sees_images(self) -> bool:
        """Prompts have images."""
        return self.rehearsal.stack.sees_images

    @property
    def is_graded_here(self) -> bool:
        """Rewards are those of `nemo_grpo.task`, not of NeMo-RL's own environments."""
        return self.rehearsal.recipe.nemo_grpo.task is not None

    @property
    def resumed_step(self) -> int:
        """The first step after the stop."""
        return self.rehearsal.stopped_after + 1

    def series(self, name: str) -> list[float]:
        """One metric's values in the order of steps."""
        return [row[name] for _, row in sorted(self.steps.items()) if name in row]

    def validations(self, name: str) -> dict[int, float]:
        """One metric of the validations, by step."""
        key = f"validation/{name}"
        return {int(row["step"]): row[key] for row in metrics(self.recipe) if key in row}

    def responses(self, step: int, kind: str = "train") -> list[Row]:
        """NeMo-RL's record of a step's responses, or of a validation's (``val``)."""
        folder = Path(str(self.recipe.logger.log_dir))
        files = sorted(folder.glob(f"exp_*/{kind}_data_step{step}.jsonl"))
        return [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []

    @cached_property
    def scored(self) -> list[Scored]:
        """The responses to the training prompts whose problem is recognised."""
        return self._graded([(step, row) for step in sorted(self.steps) for row in self.responses(step)])

    def validated(self, step: int) -> list[Scored]:
        """The validation's responses whose problem is recognised."""
        return self._graded([(step, row) for row in self.responses(step, "val")], is_validation=True)

    def _graded(self, rows: list[tuple[int, Row]], *, is_validation: bool = False) -> list[Scored]:
        settings, task = self.rehearsal.taught.nemo_grpo, self._task
        has_turns = hasattr(task.task, "observe")
        known = task.validation_problems(small.NUM_VALIDATION) if is_validation else task.known
        found: list[tuple[int, Row, Problem, str]] = []
        for step, row in rows:
            prompt, *turns = self._conversation(row, has_turns)
            problem = self._asked(prompt, known)
            if problem is not None:  # after the last turn NeMo-RL's environments say whether it was right
                found.append((step, row, problem, "".join(turns if has_turns else turns[:1])))
        scorer = Scorer(task, settings.rewards, settings.prompt)
        texts = [scorer.first_words + text for *_, text in found]
        try:
            scores = scorer([problem for _, _, problem, _ in found], texts)
        finally:
            scorer.close()
        return [
            Scored(step, problem, text, _length(row), reward(row), of, reward_of(of, settings.rewards))
            for (step, row, problem, _), text, of in zip(found, texts, scores, strict=True)
        ]

    @cached_property
    def _task(self) -> RehearsedTask:
        return RehearsedTask(self.rehearsal.taught, self.rehearsal.problems.task)

    def _asked(self, prompt: str, problems: Sequence[Problem]) -> Problem | None:
        """The problem of a prompt, by the longest question that fits and the names of its images.

        Images have no names in NeMo-RL's own data; what stands for those has no question twice.
        """
        for problem in sorted(problems, key=lambda problem: -len(problem.question)):
            names = problem.metadata.get("images", ()) if self.is_graded_here else ()
            if all(part in prompt for part in (problem.question, *names)):
                return problem
        return None

    def images_of(self, rows: Sequence[Row]) -> list[Mapping[str, Any]] | None:
        """What the model sees of the images of each response's problem; None for tasks without images.

        Raises: Failed: a response's problem is not recognised.
        """
        if not self.sees_images:
            return None
        problems = [self._asked(self._conversation(row, False)[0], self._task.known) for row in rows]
        if None in problems:
            raise Failed(f"the problem of response {problems.index(None)} is not recognised by its images")
        return [self._seen(problem) for problem in problems if problem is not None]

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self.rehearsal.model.folder)

    def _seen(self, problem: Problem) -> Mapping[str, Any]:
        return vision.encoded(self._processor, self.rehearsal.taught.nemo_grpo.prompt, problem)[1]

    def _conversation(self, row: Row, has_turns: bool) -> list[str]:
        """The prompt, then what followed.

        NeMo-RL's trainer on its data plane records the printed array of the turns; they are decoded then.
        """
        if "token_ids" not in row or not self.recipe.uses_data_plane:
            content = row["content"]
            return [_text(turn) for turn in (content[0] if isinstance(content[0], list) else content)]
        number = row["input_lengths"][0]
        ids, counts = row["token_ids"][0][:number], row["token_loss_mask"][0][:number]
        start = counts.index(1) if 1 in counts else number
        said = ids[start:] if has_turns else [one for one, count in zip(ids, counts, strict=True) if count]
        return [self._tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:start], said)]

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.rehearsal.model.folder)

    @cached_property
    def stop_checkpoint(self) -> Path:
        """The checkpoint of the stop, which the resumed run started from.

        Raises: Failed: there is no checkpoint.
        """
        step = self.recipe.checkpoint_dir / f"step_{self.rehearsal.stopped_after}"
        return step if step.is_dir() else newest_checkpoint(self.rehearsal)

    def checkpoint_before(self, step: int) -> Path:
        """Where the checkpoint that a step started from was; training may have removed it."""
        return self.recipe.checkpoint_dir / f"step_{step - 1}"

    def export_of(self, checkpoint: Path) -> Path:
        """The converters' export of a checkpoint."""
        if checkpoint == self.stop_checkpoint:
            return self.exported
        return convert(self.rehearsal, checkpoint, f"hf-{checkpoint.name}")

    @cached_property
    def exported(self) -> Path:
        """The converters' export of `stop_checkpoint`.

        Raises: Failed: there is no checkpoint, or the converter fails.
        """
        return convert(self.rehearsal, self.stop_checkpoint)


def reward(row: Row) -> float:
    """The reward that a response was trained on; under dynamic sampling that of the groups that were kept."""
    return float(row.get("filtered_rewards", row["rewards"])[0])


def _text(turn: Any) -> str:
    """A turn's text, with the names of its images."""
    content = turn["content"] if isinstance(turn, Mapping) else turn
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(part[part["type"]]) for part in content)


def _length(row: Row) -> int:
    """Tokens of a training response; 0 for a validation's, whose tokens are not recorded."""
    return int(sum(row["token_loss_mask"][0])) if "token_loss_mask" in row else 0


def convert(rehearsal: Rehearsal, checkpoint: Path, name: str = "hf") -> Path:
    """Export a checkpoint with the converters, adapters merged, to the rehearsal's folder ``name``."""
    output = rehearsal.folder / name
    arguments = ["-m", "checkpoints_conv", "megatron-to-hf", "--megatron-checkpoint", str(checkpoint)]
    arguments += ["--hf-config", str(checkpoint / "policy" / "tokenizer"), "--output", str(output), "--force"]
    if rehearsal.small.policy.megatron_cfg.lora_in_use:
        arguments += ["--lora", "merge", "--base", str(rehearsal.model.folder)]
    with rehearsal.timed("conversion"):
        run_python(rehearsal, arguments, "conversion.log")
    return output
