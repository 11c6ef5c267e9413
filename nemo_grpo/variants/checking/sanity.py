"""Checks that a loss is well formed: repeatable, of the right shapes and sign, finite."""

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from nemo_grpo.core.advantages import implausible_advantage
from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Objective
from nemo_grpo.variants.base import RatioConfig, VariantConfig
from nemo_grpo.variants.checking.small_steps import (
    SEED,
    TOKEN_TENSORS,
    changed,
    counts,
    loss_and_gradient,
    loss_of,
    random_step,
    shaped_by,
    split,
    token_tensors,
)

NEAR = 0.8
"""Similarity from which a name counts as misspelt."""


def names_are_known(config: VariantConfig) -> str | None:
    """Check that no attribute of the user's class is a near miss of one that the package reads."""
    # pydantic removes fields from the class's attributes.
    read_names = set(dir(RatioConfig)) | set(RatioConfig.model_fields)
    public_names = {name for name in read_names if not name.startswith("_")}
    for owner in type(config).__mro__:
        if owner.__module__.startswith(("nemo_grpo.", "pydantic.")) or not issubclass(owner, BaseModel):
            continue
        attributes = set(vars(owner)) | set(vars(owner).get("__annotations__", {}))
        for name in sorted(attributes - public_names):
            if name.startswith("_"):
                continue
            near_names = difflib.get_close_matches(name, public_names, n=1, cutoff=NEAR)
            if near_names:
                return (
                    f"expected names that something reads; found {name}, which nothing does; did you mean "
                    f"{near_names[0]}?"
                )
    return None


def declared_inputs(
    config: VariantConfig, batch: TokenBatch
) -> tuple[TokenBatch, dict[str, tuple[str, Tensor]]]:
    """Remove from a step the tensors that the variant does not declare, as the engines do.

    Returns: the step; and the removed tensors: field -> (declaration that would ask for it, its values).
    """
    left_out = dict[str, tuple[str, Tensor]]()
    if not config.needs_entropy and batch.entropies is not None:
        left_out["entropies"] = ("needs_entropy", batch.entropies)
    if not config.needs_reference and batch.reference_policy_logprobs is not None:
        left_out["reference_policy_logprobs"] = (
            "compares_with_reference",
            batch.reference_policy_logprobs,
        )
    removed_fields: dict[str, Any] = dict.fromkeys(left_out)  # each None
    return replace(batch, **removed_fields), left_out


def gives_the_same_again(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that a step gives the same advantages and losses again, after another step, too."""

    def results(step: TokenBatch) -> list[Tensor]:
        """Return the losses of the parts, the same computed again, the advantages, and the weights."""
        prepared = objective.prepare(step, seed=SEED)
        parts = split(objective, prepared, step.next_token_logprobs)

        def losses() -> Tensor:
            return torch.stack([objective.loss(part, **counts(step))[0].detach() for part in parts])

        weights = prepared.advantages if prepared.token_weights is None else prepared.token_weights
        return [losses(), losses(), prepared.advantages, weights]

    try:
        first = results(batch)
        results(changed(batch, rewards=1.7 - 0.6 * batch.rewards))
        second = results(batch)
    except Exception:  # the next checks say where
        return None
    pairs = [(first[0], first[1])]
    pairs += zip(first, second, strict=True)
    if all(torch.allclose(before, after, 0, 0, equal_nan=True) for before, after in pairs):
        return None
    losses = ", ".join(f"{value.sum().item():.6g}" for value in first[:2] + second[:2])
    return (
        f"expected the same from the same step; found the losses {losses}, or other advantages; keep nothing "
        "between calls, in a module's variable or on self, and change no tensor in place (Shaped.carried "
        "hands numbers to the next step); draw by core.random.token_uniforms(batch, seed)"
    )


def shapes_fit(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that advantages, weights, terms and metrics are per token, or where allowed per response."""
    prepared = objective.prepare(batch, seed=SEED)
    step_shape = tuple(batch.prev_logprobs.shape)
    shaped = shaped_by(objective, batch)
    for name, value in (("advantages", shaped.advantages), ("token_weights", shaped.token_weights)):
        if value is not None and tuple(value.shape) != step_shape:
            remedy = "base.per_token(batch.mask) spreads [B] over them"
            return _wrong_shape(f"Shaped.{name}", value, step_shape, remedy)
    if shaped.advantages[~batch.mask].any():
        return (
            "expected advantages of exactly 0 outside batch.mask; found others; multiply the group's, or use "
            "core.statistics.zero_outside"
        )
    for part in split(objective, prepared, batch.next_token_logprobs):
        terms = objective.terms(part)
        part_shape = tuple(part.advantages.shape)
        for name, value in (("policy", terms.policy), ("kl", terms.kl)):
            if value is not None and tuple(value.shape) != part_shape:
                remedy = "x[:, None].expand_as(batch.mask) spreads [B] over them"
                return _wrong_shape(f"TokenTerms.{name}", value, part_shape, remedy)
        for name, value in terms.metrics.items():
            if tuple(value.shape) not in (part_shape, part_shape[:1]):
                remedy = f"or a number per response, {list(batch.rewards.shape)}"
                return _wrong_shape(f"the metric {name}", value, part_shape, remedy)
            if value.requires_grad:
                return f"expected metrics without gradient; found one of {name}; append .detach()"
    return None


def _wrong_shape(name: str, value: Tensor, expected: tuple[int, ...], remedy: str) -> str:
    return (
        f"expected {name} of shape {list(expected)}, a number per token; found {list(value.shape)}, which "
        f"torch spreads in silence or refuses; {remedy}"
    )


def has_a_gradient(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that the loss depends on the current policy, and moves it in a step's first update."""
    # At the scored logprobs every ratio is 1, as in a step's first update.
    current = batch.prev_logprobs.clone().requires_grad_()
    total = loss_of(objective, objective.prepare(batch, seed=SEED), current)
    gradient = None
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, current, allow_unused=True)
    if gradient is not None and gradient.any():
        return None
    return (
        "expected that the loss of a step whose rewards differ moves the policy; found no gradient at any "
        "token; compute the policy term from prepared.batch.next_token_logprobs, without detach() on its way"
    )


def moves_the_right_way(config: VariantConfig, objective: Objective, batch: TokenBatch) -> str | None:
    """Check that a step's first update raises tokens with an advantage > 0, and lowers the others."""
    plain = replace(objective, kl_penalty=0.0)
    prepared = plain.prepare(batch, seed=SEED)
    goal = shaped_by(plain, batch).base.per_token(batch.mask)
    if config.learns_from_demonstrations:
        goal = prepared.advantages

    def downhill(part: PreparedBatch) -> Tensor:
        current = batch.prev_logprobs.clone().requires_grad_()
        return -torch.autograd.grad(loss_of(plain, part, current), current)[0]

    # What a loss does without advantages, such as a bonus for entropy, is not the advantages' doing.
    without_advantages = replace(prepared, advantages=torch.zeros_like(prepared.advantages))
    moves = downhill(prepared) - downhill(without_advantages)
    raised = moves[goal > 0].sum().item()
    lowered = -moves[goal < 0].sum().item()
    for progress, verb, relation in ((raised, "raises", ">"), (lowered, "lowers", "<")):
        if progress < -1e-12:
            return (
                f"expected that an update {verb} the tokens of responses with an advantage "
                f"{relation} 0; found the opposite ({progress:.3g}); policy is to be maximised: look for "
                "a minus sign, an abs() or exp(prev - next)"
            )
    return None


def is_finite(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that loss, gradient and metrics are finite on ordinary and hard steps, in float32."""
    for name, step in hard_steps(batch):
        value, gradient, prepared = loss_and_gradient(objective, step)
        where = "expected finite numbers for a step with " + name
        if not prepared.advantages.isfinite().all():
            return f"{where}; found advantages that are not; add an eps to the divisor in shape()"
        warning = implausible_advantage(prepared)
        if warning:
            return f"expected plausible advantages for a step with {name}; found that {warning}"
        if not (value.isfinite() and gradient.isfinite().all()):
            return (
                f"{where}; found the loss {value.item():.3g}; use core.surrogates.importance_ratio and "
                "core.kl.kl_estimate, which clamp, or clamp your exponents"
            )
        metrics = dict(prepared.metrics)
        for part in split(objective, prepared, step.next_token_logprobs):
            metrics |= objective.loss(part, **counts(step))[1]
        infinite = [metric for metric, number in metrics.items() if not number.isfinite()]
        if infinite:
            return f"{where}; found metrics that are not: {infinite}; clamp them likewise"
    return None


def hard_steps(batch: TokenBatch) -> Iterator[tuple[str, TokenBatch]]:
    """Yield (description, step) of numerically hard steps: all in float32, outliers in float64 too."""
    tensors = token_tensors(batch, torch.float32)
    plain = changed(batch, **tensors, rewards=batch.rewards.float())
    yield "ordinary numbers", plain
    for name, far in (("the policy 100 nats above the scored one", 0.0), ("100 nats below it", -100.0)):
        scored = torch.full_like(plain.prev_logprobs, -100.0 - far)
        logprobs = {
            "next_token_logprobs": scored * 0 + far,
            "prev_logprobs": scored,
            "generation_logprobs": scored,
        }
        if plain.reference_policy_logprobs is not None:
            logprobs["reference_policy_logprobs"] = scored
        yield name, changed(plain, **logprobs)
    yield "tokens of probability 1", changed(plain, **{name: x * 0 for name, x in tensors.items()})
    yield "equal rewards in every group", changed(plain, rewards=plain.rewards * 0 + 1)
    yield "one response per group", changed(plain, group_ids=torch.arange(len(plain.rewards)))
    # One reward apart from many equal ones.
    rewards = [0.05] + [-3.3] * 7 + [10.0] + [1.4] * 15 + [0.1] + [1.4] * 4
    group_ids = [0] * 8 + [1] * 16 + [2] * 5
    outlier_step = random_step([3] * len(rewards), rewards, group_ids)
    # In both dtypes, because a sum of equal rewards may be exact in one and rounded in the other.
    for dtype in (torch.float32, torch.float64):
        outliers = dict[str, Any]()
        for name in TOKEN_TENSORS:
            # The variant gets the tensors that it declares.
            outliers[name] = getattr(outlier_step, name).detach().to(dtype) if name in tensors else None
        yield (
            "one outlier per group",
            changed(outlier_step, **outliers, rewards=outlier_step.rewards.to(dtype)),
        )
