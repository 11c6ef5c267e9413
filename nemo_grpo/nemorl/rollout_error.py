"""Checks by NeMo-RL's own metrics that there are rollouts, and that they come from the trained weights.

``gen_kl_error`` is the token mean of k3 between the rollout's logprobs and the policy's logprobs of the same
tokens before its update; of several updates in a step NeMo-RL logs the mean. In synchronous training both use
the same weights and differ only by rounding and kernels; asynchronous rollouts are older by some steps, too.
A refit that sends old or wrong weights raises no error, nor does a cache of what older weights computed, but
both show here.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_grpo.nemorl.observers import listening
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.cluster_rules import OVERLAP
from nemo_grpo.recipe.rollout_rules import uses_fp8
from nemo_grpo.recipe.sections import VLLM

log = logging.getLogger(__name__)

METRIC = "gen_kl_error"
EXCEEDS = "gen_kl_error_exceeds_bound"
"""The driver's own metric: 1 for a step whose error is above the bound, else 0."""

BF16_BOUND = 1e-2
"""Rounding alone gives 1e-5 to 1e-3: NeMo-RL's tests of BF16 runs allow 0.002; stale weights gave 0.046."""
FP8_BOUND = 3e-2
"""Of FP8 training or rollouts. NeMo-RL's tests of such runs allow a token_mult_prob_error of 1.1, which is
0.007 for normally distributed differences and several times that with tails; stale weights gave 0.046."""
STEP = math.log(1.2)
"""Most by which a step moves a token's logprob in the mean: where the ratio's usual clip stops it."""

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
    """Largest healthy error of a step: rounding, and k3 of as many steps as its rollouts may be older.

    Args: step: from 1, whose rollouts come from the weights that it trains.
    """
    older = STEP * min(recipe.rollouts_ahead, step - 1)
    return (FP8_BOUND if uses_fp8(recipe) else BF16_BOUND) + math.expm1(older) - older


@contextmanager
def watch_rollouts(recipe: Recipe, logger: Any) -> Iterator[None]:
    """Within the block, warn of every step without tokens and of every one above the bound; log `EXCEEDS`.

    Args: logger: NeMo-RL's.
    """

    def judge(metrics: Mapping[str, Any], step: int, _prefix: str) -> Mapping[str, float]:
        if METRIC not in metrics:
            return {}
        if metrics.get(LENGTH) == 0:
            log.warning(EMPTY, step)
        error, limit = float(metrics[METRIC]), bound(recipe, step)
        exceeds = not error <= limit  # nan does
        if exceeds:
            log.warning(WARNING, step, METRIC, error, limit)
        return {EXCEEDS: float(exceeds)}

    with listening(logger, adds=judge):
        yield
