"""Proof that a rehearsal's rewards and accuracies are the recipe's: every response is graded again."""

import math
import re
from collections.abc import Mapping
from statistics import fmean

import torch

from nemo_grpo.core.advantages import overlong_penalty
from nemo_grpo.rehearsal.run_output import Recorded, Scored
from nemo_grpo.rehearsal.stages import fail_if
from nemo_grpo.tasks.base import VALIDATION_SET
from nemo_grpo.tasks.scoring import component_means, over_sets

SAMPLE_LENGTH = 300
"""Characters of a text that the report shows."""


def rewards(run: Recorded) -> str:
    """Prove that the run trained on the recipe's rewards: each response is graded again."""
    means = run.series("reward/mean")
    components = reward_components(run)
    proof = f"mean {', '.join(f'{mean:.3f}' for mean in means)}; {_listed(components)}"
    fail_if(not means or not all(map(math.isfinite, means)), proof)
    if not run.is_graded_here:
        return f"{proof}; by NeMo-RL's environment"
    for scored in run.scored:
        expected = _scaled(run, scored.reward) + _penalty(run, scored)
        response = scored.response[:SAMPLE_LENGTH]
        fail_if(
            not _same(scored.recorded, expected),
            f"{proof}; {response!r} has {scored.recorded:g}, the grader says {scored.reward:g}",
        )
    fail_if(not run.scored, f"{proof}, so no reward is compared")
    return f"{proof}; {len(run.scored)} rewards are the grader's"


def _same(recorded: float, graded: float) -> bool:
    """Compare two rewards; NaN means that a function abstained."""
    if math.isnan(recorded) and math.isnan(graded):
        return True
    return math.isclose(recorded, graded, abs_tol=1e-4)


def _scaled(run: Recorded, graded: float) -> float:
    """Scale a reward as NeMo-RL does before it penalises lengths."""
    scaling = run.reward_scaling
    if not scaling["enabled"]:
        return graded
    source_range = scaling["source_max"] - scaling["source_min"]
    target_range = scaling["target_max"] - scaling["target_min"]
    clamped = min(max(graded, scaling["source_min"]), scaling["source_max"])
    return float(scaling["target_min"] + (clamped - scaling["source_min"]) / source_range * target_range)


def _penalty(run: Recorded, scored: Scored) -> float:
    """Compute the penalty of a response's length, as the recipe shapes its rewards."""
    shaping = run.recipe.grpo.reward_shaping
    if not shaping.enabled:
        return 0.0
    penalties = overlong_penalty(
        torch.tensor([scored.length]),
        max_response_length=shaping.max_response_length,
        buffer_length=shaping.overlong_buffer_length,
        penalty=shaping.overlong_buffer_penalty,
    )
    return float(penalties)


def validation(run: Recorded) -> str:
    """Prove that the logged accuracy is the grader's; supervised training logs a loss."""
    if not run.rehearsal.recipe.grpo.validates:
        return "the recipe has none"
    name = "val_loss" if run.is_supervised else "accuracy"
    value_by_step = run.validations(name)
    fail_if(not value_by_step, f"no validation/{name} is logged")
    step, value = max(value_by_step.items())
    number = run.recipe.grpo.num_val_problems
    proof = f"{name} {value:.3f} of {number} problems"
    fail_if(not math.isfinite(value), proof)
    if run.is_supervised:
        return proof
    if not run.is_graded_here:
        return f"{proof}, by NeMo-RL's environment"

    graded = run.validated(step)
    fail_if(len(graded) != number, f"{proof}; {len(graded)} of them are recognised")
    accuracy_by_set = _accuracy_by_set(graded)
    sets = {set_name: {"accuracy": accuracy} for set_name, accuracy in accuracy_by_set.items()}
    for metric, accuracy in over_sets(sets).items():
        logged = run.validations(metric).get(step, math.nan)
        agrees = math.isclose(logged, accuracy, abs_tol=1e-4)
        fail_if(not agrees, f"{proof}; {metric} {logged:.3f}: the grader says {accuracy:.3f}")
    if len(accuracy_by_set) > 1:
        proof += "".join(f", {set_name} {accuracy:.3f}" for set_name, accuracy in accuracy_by_set.items())
    return f"{proof}, as the grader says"


def _accuracy_by_set(graded: list[Scored]) -> dict[str, float]:
    """Average the accuracy over each validation set; a single set has no name."""
    accuracies: dict[str, list[float]] = {}
    for scored in graded:
        set_name = scored.problem.metadata.get(VALIDATION_SET, "")
        accuracies.setdefault(set_name, []).append(scored.scores["accuracy"])
    return {set_name: fmean(values) for set_name, values in accuracies.items()}


def reward_components(run: Recorded) -> dict[str, float]:
    """Compute the mean of each component that the recipe weights, over the run's responses."""
    weights = run.rehearsal.toy_recipe.nemo_grpo.rewards
    means = component_means([scored.scores for scored in run.scored]) if run.scored else {}
    return {name: means[f"reward/{name}"] for name in weights if f"reward/{name}" in means}


def _listed(components: Mapping[str, float]) -> str:
    """Write components with their values."""
    if not components:
        return "no response was recognised"
    return ", ".join(f"{name} {mean:.2f}" for name, mean in components.items())


def sample(run: Recorded) -> str:
    """Show the best response with its reward; nothing without one."""
    # A reward is NaN where a function abstains.
    rewarded = [scored for scored in run.scored if not math.isnan(scored.reward)]
    best = max(rewarded, key=lambda scored: scored.reward, default=None)
    if best is None:
        return ""
    question = _in_one_line(best.problem.question)
    response = _in_one_line(best.response)
    return f"{question!r} -> {response!r}: reward {best.reward:g} ({_listed(best.scores)})"


def _in_one_line(text: str) -> str:
    """Shorten a text to `SAMPLE_LENGTH`, without line breaks."""
    return re.sub(r"\s+", " ", text)[:SAMPLE_LENGTH]
