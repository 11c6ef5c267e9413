"""Validation during training: schedule, measurement, and the goal that ends a run."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nemo_grpo.engine.rollout import Rollouts
from nemo_grpo.evaluate.runner import evaluate_problems
from nemo_grpo.evaluate.sampling import ResponseSource
from nemo_grpo.recipe.sections import GRPOSection, metric_key
from nemo_grpo.run.samples import validation_row
from nemo_grpo.sampling.requests import SamplingParams
from nemo_grpo.support.progress import TokenMeter, progress
from nemo_grpo.tasks.base import by_validation_set
from nemo_grpo.tasks.scoring import over_sets

log = logging.getLogger(__name__)
Row = dict[str, Any]


def is_due(grpo: GRPOSection, step: int) -> bool:
    """True if a validation follows this step."""
    last = grpo.val_at_end and step == grpo.max_num_steps
    return last or (grpo.val_period > 0 and step % grpo.val_period == 0)


def validate(
    rollouts: Rollouts, named_tensors: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, float], list[Row]]:
    """Measure greedy, avg@k, pass@k and rewards of these weights on each validation set.

    Returns: the metrics, as ``validation/*``; rows of samples.jsonl, the greedy responses to each set's first
             ``nemo_grpo.engine.log_samples`` problems, which are the same in every validation.
    """
    recipe = rollouts.recipe
    sampling = rollouts.validation_sampling
    rollouts.generator.update_weights(named_tensors)
    k = recipe.grpo.val_num_generations_per_prompt
    found: dict[str, dict[str, float]] = {}
    samples: list[Row] = []
    with _shown(recipe.world_size, len(rollouts.problems), k, sampling) as meter:
        source = ResponseSource(
            rollouts.generator,
            rollouts.tokenizer,
            rollouts.task,
            recipe.nemo_grpo.prompt,
            sampling,
            recipe.grpo.seed,
            meter,
        )
        for name, some in by_validation_set(rollouts.problems).items():
            result = evaluate_problems(source, some, k, rollouts.scorer)
            found[name] = result.metrics()
            for problem in result.problems[: recipe.logger.num_val_samples_to_print]:
                log.info("%s -> %r (gold %s)", problem.id, problem.greedy.completions[0], problem.gold)
            number = recipe.nemo_grpo.engine.log_samples
            samples += [validation_row(name, problem) for problem in result.problems[:number]]
    return {f"validation/{name}": value for name, value in over_sets(found).items()}, samples


@contextmanager
def _shown(num_ranks: int, num_problems: int, k: int, sampling: SamplingParams) -> Iterator[TokenMeter]:
    """Log rates and time left, if a validation takes longer than a few seconds.

    Only the first rank logs, and counts its own share; the others take about as long.
    """
    num_responses = -(-num_problems // num_ranks) * (1 if sampling.greedy else 1 + k)
    name = "validation responses" + (f" of rank 0 of {num_ranks}" if num_ranks > 1 else "")
    with progress(name, num_responses, bar=False, metered=True) as advance:
        yield TokenMeter(advance, num_responses, sampling.max_new_tokens)


def reached_goal(grpo: GRPOSection, row: Mapping[str, Any]) -> bool:
    """True if a step's metrics meet grpo.stop_at_validation_threshold, which is logged."""
    reached = grpo.is_goal(row)
    if reached:
        name = grpo.stop_at_validation_metric
        log.info("%s=%.3f reached: training ends", name, row[metric_key(name) or ""])
    return reached
