"""Metrics that the driver adds to NeMo-RL's: validation sets, all draws of a step, agreement of rollouts."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_grpo.nemorl.callbacks import Callback, is_validation
from nemo_grpo.nemorl.rewards import whole_groups
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.sections import OVERLAP, VLLM
from nemo_grpo.report.runs import json_lines
from nemo_grpo.tasks.base import by_set
from nemo_grpo.tasks.scoring import over_sets

log = logging.getLogger(__name__)


class ValidationSets(Callback):
    """Adds the metrics of each of several validation sets; the overall ones become the sets' means.

    NeMo-RL validates on all problems in their order, as one set, and records each response's reward.
    """

    def __init__(self, sets: Sequence[str], folder: Path, num_generations: int) -> None:
        """Set the validation problems' sets and the place of their rewards.

        Args:
            sets: name of each validation problem's set, in the order in which NeMo-RL validates.
            folder: NeMo-RL's log folder, with the rewards in ``val_data_stepN.jsonl``.
            num_generations: responses to a problem in a validation that measures pass_k; else there is one.
        """
        self.sets = sets
        self.folder = folder
        self.num_generations = num_generations

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Return the metrics of each set and their means; {} unless several sets were validated."""
        if not is_validation(metrics, prefix) or len(set(self.sets)) < 2:
            return {}
        measures_pass_k = "pass_k" in metrics
        group_size = self.num_generations if measures_pass_k else 1
        groups_by_set = self._read_rewards(step, group_size)
        # A validation on the first problems alone may have met only one set.
        if len(groups_by_set) < 2:
            return {}
        metrics_by_set: dict[str, dict[str, float]] = {}
        for name, groups in groups_by_set.items():
            set_metrics = {"accuracy": fmean(fmean(group) for group in groups)}
            if measures_pass_k:
                set_metrics["pass_k"] = fmean(max(group) > 0 for group in groups)
            metrics_by_set[name] = set_metrics
        return over_sets(metrics_by_set)

    def _read_rewards(self, step: int, group_size: int) -> dict[str, list[list[float]]]:
        """Read the rewards of a validation's whole groups, by set."""
        records = json_lines(self.folder / f"val_data_step{step}.jsonl")
        rewards = [record["rewards"][0] for record in records]
        groups = whole_groups(rewards, group_size)
        # NeMo-RL's record of a validation does not name the problems: a group's position tells its problem.
        # The record may end before the problems do, because grpo.max_val_samples limits a validation.
        return by_set(zip(self.sets, groups, strict=False))


METRIC = "gen_kl_error"
EXCEEDS = "gen_kl_error_exceeds_bound"
"""The driver's own metric: 1 for a step whose error is above the bound, else 0."""
BF16_BOUND = 1e-2
"""Bound in BF16. Rounding gives 1e-5 to 1e-3; NeMo-RL's tests allow 0.002; stale weights gave 0.046."""
FP8_BOUND = 3e-2
"""Bound with FP8 training or rollouts. NeMo-RL's tests of them allow a token_mult_prob_error of 1.1, which is
0.007 for normally distributed differences and several times that with tails; stale weights gave 0.046."""
LARGEST_STEP = math.log(1.2)
"""Largest mean change of a token's logprob in a step, nats: the usual clip of the ratio."""

WARNING = (
    "step %d: %s is %.2g, above %.2g: rollout and policy disagree about the same tokens, so vLLM has other "
    f"weights or computes differently. Check {OVERLAP} (false), the messages of the refit, {VLLM}.precision, "
    "policy.megatron_cfg.fp8_cfg, Megatron's fusions (policy.megatron_cfg.*_fusion), and of asynchronous "
    "rollouts recompute_kv_cache_after_weight_updates (true)"
)
LENGTH = "mean_gen_tokens_per_sample"
EMPTY = (
    "step %d: no response has a token, so that nothing is learnt. NeMo-RL's asynchronous rollouts print "
    "'Error generating response' with the reason of a failed request, and go on without its response"
)


def bound(recipe: Recipe, step: int) -> float:
    """Compute the largest healthy gen_kl_error: rounding, plus k3 of the steps that rollouts may lag behind.

    Args:
        recipe: tells whether FP8 is used and how far rollouts may run ahead.
        step: counts from 1; the first step's rollouts come from the weights that it trains.
    """
    rounding = FP8_BOUND if recipe.uses_fp8 else BF16_BOUND
    num_steps_behind = min(recipe.rollouts_ahead, step - 1)
    log_ratio = LARGEST_STEP * num_steps_behind
    # k3 = exp(x) - 1 - x, by expm1 because x is often 0 and always small.
    return rounding + math.expm1(log_ratio) - log_ratio


class RolloutCheck(Callback):
    """Warns of a step without tokens, and of rollouts that do not come from the trained weights.

    ``gen_kl_error`` is the token mean of k3 between the rollout's logprobs and the policy's logprobs of the
    same tokens before its update; of several updates in a step NeMo-RL logs the mean. In synchronous training
    both use the same weights and differ only by rounding and kernels; asynchronous rollouts are older by some
    steps. A refit that sends old or wrong weights, or a KV cache of older weights, raises no error but shows
    here.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Warn of a step without tokens or with a mismatch above the bound, and add `EXCEEDS`."""
        if METRIC not in metrics:
            return {}
        if metrics.get(LENGTH) == 0:
            log.warning(EMPTY, step)
        error = float(metrics[METRIC])
        limit = bound(self.recipe, step)
        # Not `error > limit`, which is False for NaN.
        exceeds = not error <= limit
        if exceeds:
            log.warning(WARNING, step, METRIC, error, limit)
        return {EXCEEDS: float(exceeds)}


MEANS_OVER_DRAWS = (LENGTH, "truncation_rate", "avg_turns_per_sample", "mean_total_tokens_per_sample")
MAXIMA_OVER_DRAWS = ("max_gen_tokens_per_sample", "max_turns_per_sample")


class DrawnRollouts(Callback):
    """Replaces a step's rollout metrics by those of all its draws under dynamic sampling.

    NeMo-RL logs the metrics of each draw when it is drawn, and repeats only the last draw's with the step.
    """

    def __init__(self) -> None:
        self.draws: list[Mapping[str, Any]] = []

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Collect the metrics of a draw, or return the combined metrics when the step is logged."""
        if prefix != "train":
            return {}
        is_whole_step = "loss" in metrics
        if not is_whole_step:
            if LENGTH in metrics:
                self.draws.append(dict(metrics))
            return {}
        draws = self.draws
        self.draws = []
        uses_dynamic_sampling = "filtered_reward" in metrics
        return combine_draws(draws) if uses_dynamic_sampling else {}


def combine_draws(draws: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the rollout metrics of a step's draws; a metric that no draw has is left out."""
    # Means of the draws' means are right, because every draw has the same number of responses.
    combined: dict[str, float] = {}
    for names, combine in ((MEANS_OVER_DRAWS, fmean), (MAXIMA_OVER_DRAWS, max)):
        for name in names:
            values = [float(draw[name]) for draw in draws if name in draw]
            if values:
                combined[name] = combine(values)
    return combined
