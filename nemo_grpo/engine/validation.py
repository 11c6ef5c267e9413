"""Validation during training: when it is due, its metrics, and the goal that ends a run early."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_grpo.engine.learning import Learner
from nemo_grpo.engine.rollout import Rollouts
from nemo_grpo.evaluate.runner import evaluate_problems
from nemo_grpo.evaluate.sampling import ResponseSource
from nemo_grpo.recipe.sections import GRPOSection, metric_key
from nemo_grpo.run.groups import assemble
from nemo_grpo.run.samples import validation_row
from nemo_grpo.sampling.requests import SamplingParams
from nemo_grpo.support import machine
from nemo_grpo.support.progress import TokenMeter, progress
from nemo_grpo.tasks.base import by_set, set_of
from nemo_grpo.tasks.scoring import over_sets

log = logging.getLogger(__name__)
Row = dict[str, Any]


def is_due(grpo: GRPOSection, step: int) -> bool:
    """True if a validation follows this step. Step 0 is the start of the run."""
    if step == 0:
        return grpo.val_at_start
    if grpo.val_at_end and step == grpo.max_num_steps:
        return True
    return grpo.val_period > 0 and step % grpo.val_period == 0


def validate(rollouts: Rollouts, learner: Learner) -> tuple[dict[str, float], list[Row]]:
    """Measure the policy on the held-out problems.

    Returns:
        Metrics ``validation/*``, and rows of samples.jsonl. The metrics are greedy accuracy, avg@k, pass@k
        and rewards of each validation set, and in a supervised run also the loss per token of the
        demonstrations. The rows have the greedy responses to the first ``nemo_grpo.engine.log_samples``
        problems of each set, which are the same in every validation.
    """
    machine.release_freed_memory()
    start = time.monotonic()
    metrics: dict[str, float] = {}
    if rollouts.demonstrations is not None:
        metrics["validation/val_loss"] = demonstration_loss(rollouts, learner)
    rollouts.generator.update_weights(learner.policy.named_tensors())
    by_validation_set, samples = measure_responses(rollouts)
    metrics |= {f"validation/{name}": value for name, value in over_sets(by_validation_set).items()}
    metrics["time/validation"] = time.monotonic() - start
    return metrics, [{"step": learner.state.step} | row for row in samples]


def demonstration_loss(rollouts: Rollouts, learner: Learner) -> float:
    """Compute the policy's loss per token on the demonstrations of the held-out problems, in nats."""
    assert rollouts.demonstrations is not None
    step = assemble([rollouts.demonstrations.held_out(problem) for problem in rollouts.problems])
    logprobs = learner.score(step, with_entropies=False).logprobs
    # The mean is over many thousands of tokens, and would lose digits in float32.
    return float(-logprobs[step.token_mask].double().mean())


def measure_responses(rollouts: Rollouts) -> tuple[dict[str, dict[str, float]], list[Row]]:
    """Sample responses to the held-out problems with the generator's current weights, and score them.

    Returns:
        Metrics by name of the validation set, and rows of samples.jsonl without the step.
    """
    recipe = rollouts.recipe
    sampling = rollouts.validation_sampling
    num_samples = recipe.grpo.val_num_generations_per_prompt
    by_validation_set: dict[str, dict[str, float]] = {}
    samples: list[Row] = []
    with _metered(recipe.world_size, len(rollouts.problems), num_samples, sampling) as meter:
        source = ResponseSource(
            rollouts.generator,
            rollouts.tokenizer,
            rollouts.task,
            recipe.nemo_grpo.prompt,
            sampling,
            recipe.grpo.seed,
            meter,
        )
        encoded = zip(rollouts.problems, rollouts.validation_requests, strict=True)
        sets = by_set((set_of(problem), (problem, request)) for problem, request in encoded)
        for name, members in sets.items():
            problems = [problem for problem, _ in members]
            requests = [request for _, request in members]
            result = evaluate_problems(source, problems, num_samples, rollouts.scorer, requests=requests)
            by_validation_set[name] = result.metrics()
            for problem in result.problems[: recipe.logger.num_val_samples_to_print]:
                log.info("%s -> %r (gold %s)", problem.id, problem.greedy.completions[0], problem.gold)
            num_rows = recipe.nemo_grpo.engine.log_samples
            samples += [validation_row(name, problem) for problem in result.problems[:num_rows]]
    return by_validation_set, samples


@contextmanager
def _metered(
    num_ranks: int, num_problems: int, num_samples: int, sampling: SamplingParams
) -> Iterator[TokenMeter]:
    """Within the block, log rates and the time left if a validation takes longer than a few seconds.

    Only the first rank logs. It counts its own share of the responses; the other ranks take about as long.
    """
    # With greedy sampling all samples are equal to the greedy response, which is sampled once.
    num_per_problem = 1 if sampling.greedy else 1 + num_samples
    problems_of_rank = -(-num_problems // num_ranks)
    num_responses = problems_of_rank * num_per_problem
    name = "validation responses"
    if num_ranks > 1:
        name += f" of rank 0 of {num_ranks}"
    with progress(name, num_responses, bar=False, metered=True) as advance:
        yield TokenMeter(advance, num_responses, sampling.max_new_tokens)


def reached_goal(grpo: GRPOSection, row: Mapping[str, Any]) -> bool:
    """True if the metrics of a step reach grpo.stop_at_validation_threshold. That is logged, too."""
    reached = grpo.is_goal(row)
    if reached:
        name = grpo.stop_at_validation_metric
        log.info("%s=%.3f reached: training ends", name, row[metric_key(name) or ""])
    return reached
