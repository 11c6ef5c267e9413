"""Observations of a loss's behaviour, to compare with what its class declares.

Each function below runs the loss on one step and returns the value of a declaration that fits. The safe value
fits the loss if it fits on any step. An observation can therefore refute a declaration but never prove one.
The steps' logprobs have several magnitudes, so that a loss's thresholds are passed on some of them.
"""

from collections.abc import Callable
from dataclasses import replace

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Objective, Shaped
from nemo_grpo.variants.base import SAFE_DECLARATIONS, VariantConfig
from nemo_grpo.variants.checking.small_steps import (
    SEED,
    changed,
    distinct_ids,
    loss_and_gradient,
    loss_of,
    random_step,
    shaped_by,
)

SPREADS = (1.0, 8.0, 64.0, 512.0)
"""Factors of the logprobs, so that thresholds of any usual size are passed on some step."""
REPLACEMENT_LOGPROBS = (float("nan"), 0.0, -1e9)
"""Values that replace the scored logprobs, to see whether a loss reads them."""

GAINS = {
    "reads_scores": "a step with one update needs no scoring pass",
    "shapes_advantages": "grpo.advantage_clip_low and _high may be set on NeMo-RL",
    "spans_groups": "the single controller may train on part of a step's groups at a time",
    "learns_without_advantages": "responses with advantage 0 are left out of the update",
    "folds": "NeMo-RL's data plane, which brings the loss advantages alone, can train it",
}
"""Declaration other than the safe value -> what it lets the engines do."""


def reads_scores(objective: Objective, step: TokenBatch) -> bool:
    """Return True if other scored logprobs give other advantages, weights or carried numbers."""
    expected = shaped_by(objective, step)
    replacements = [torch.full_like(step.prev_logprobs, value) for value in REPLACEMENT_LOGPROBS]
    replacements.append(0.5 * step.prev_logprobs.flip(0) - 0.1)
    for logprobs in replacements:
        shaped = shaped_by(objective, replace(step, prev_logprobs=logprobs))
        if not _are_equal(expected, shaped):
            return True
    return False


def shapes_advantages(objective: Objective, step: TokenBatch) -> bool:
    """Return True if some token's advantage is not the group advantage of its response."""
    shaped = shaped_by(objective, step)
    return not torch.equal(shaped.advantages, shaped.base.per_token(step.mask))


def spans_groups(objective: Objective, step: TokenBatch) -> bool:
    """Return True if a group's advantages or weights change where it is the only group of the step."""
    together = shaped_by(objective, step)
    for number in step.group_ids.unique():
        rows = step.group_ids == number
        alone = shaped_by(objective, step.select(rows))
        if together.carried != alone.carried:
            return True
        if not _are_close(together.advantages[rows], alone.advantages):
            return True
        if together.token_weights is None or alone.token_weights is None:
            continue
        if not _are_close(together.token_weights[rows], alone.token_weights):
            return True
    return False


def learns_without_advantages(objective: Objective, step: TokenBatch) -> bool:
    """Return True if the loss has a gradient where all advantages are 0, without a KL penalty."""
    objective = replace(objective, kl_penalty=0.0)
    prepared = objective.prepare(step, seed=SEED)
    prepared = replace(prepared, advantages=torch.zeros_like(prepared.advantages))
    loss = loss_of(objective, prepared, step.next_token_logprobs)
    (gradient,) = torch.autograd.grad(loss, step.next_token_logprobs)
    return bool(gradient.any())


def folds(objective: Objective, step: TokenBatch) -> bool:
    """Return True if loss and gradient stay the same with all weights multiplied into the advantages."""
    loss, gradient, _ = loss_and_gradient(objective, step)
    folded_loss, folded_gradient, _ = loss_and_gradient(objective, step, folded=True)
    return _are_close(loss, folded_loss) and _are_close(gradient, folded_gradient)


OBSERVATIONS: dict[str, Callable[[Objective, TokenBatch], bool]] = {
    "reads_scores": reads_scores,
    "shapes_advantages": shapes_advantages,
    "spans_groups": spans_groups,
    "learns_without_advantages": learns_without_advantages,
    "folds": folds,
}
"""Declaration -> its behaviour on one step."""


def observed(config: VariantConfig) -> dict[str, bool]:
    """Observe the loss on all `telling_steps`; a property whose observation fails gets its safe value."""
    objective = config.build()
    steps = telling_steps()
    return {name: _observe(name, objective, steps) for name in SAFE_DECLARATIONS}


def undeclared(config: VariantConfig) -> dict[str, bool]:
    """Return the declarations that the loss could make: it declares the safe value but behaves otherwise."""
    behaviour = observed(config)
    possible = {}
    for name, safe in SAFE_DECLARATIONS.items():
        declares_safe_value = getattr(config, name) == safe
        if declares_safe_value and behaviour[name] != safe:
            possible[name] = behaviour[name]
    return possible


def are_true(config: VariantConfig, objective: Objective, batch: TokenBatch) -> str | None:
    """Check that no declaration is refuted by this step."""
    step = changed(batch, response_ids=distinct_ids(len(batch.rewards)))
    for name, safe in SAFE_DECLARATIONS.items():
        declared = getattr(config, name)
        if declared != safe and OBSERVATIONS[name](objective, step) == safe:
            return (
                f"expected {name} = {declared}, as the class declares; found {safe}; remove the "
                f"declaration, or declare {name} = {safe}"
            )
    return None


def telling_steps() -> list[TokenBatch]:
    """Draw steps of groups with and without signal, one of them with an outlier."""
    rewards_by_group = [[1.0, 0.0, 0.3], [0.0, 0.0], [0.05, 1.4, 1.4, 1.4], [1.0, 1.0, 0.0], [2.0, 5.0]]
    rewards = []
    group_ids = []
    for number, group_rewards in enumerate(rewards_by_group):
        rewards += group_rewards
        group_ids += [number] * len(group_rewards)
    lengths = [1 + 3 * row % 8 for row in range(len(rewards))]
    steps = []
    for seed in range(2):
        for spread in SPREADS:
            step = random_step(lengths, rewards, group_ids, seed, spread)
            steps.append(replace(step, response_ids=distinct_ids(len(rewards))))
    return steps


def _observe(name: str, objective: Objective, steps: list[TokenBatch]) -> bool:
    """Return the safe value if any step shows it, else the other one."""
    safe = SAFE_DECLARATIONS[name]
    try:
        behaves_safely = any(OBSERVATIONS[name](objective, step) == safe for step in steps)
    except Exception:  # of a user's own code; the other checks name it
        return safe
    return safe if behaves_safely else not safe


def _are_equal(first: Shaped, second: Shaped) -> bool:
    if first.carried != second.carried or not torch.equal(first.advantages, second.advantages):
        return False
    if first.token_weights is None or second.token_weights is None:
        return first.token_weights is second.token_weights
    return torch.equal(first.token_weights, second.token_weights)


def _are_close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, 1e-9, 1e-12)
