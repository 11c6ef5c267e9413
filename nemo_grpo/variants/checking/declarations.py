"""Checks of what a variant's class says of itself: names, shapes, and what the engines may leave out."""

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Objective, Shaped
from nemo_grpo.variants.base import RatioConfig, VariantConfig
from nemo_grpo.variants.checking.steps import SEED, TOKEN_TENSORS, changed, counts, loss_and_gradient, whole

NEAR = 0.8
"""Likeness from which a name counts as a misspelt one."""


def names_are_known(config: VariantConfig) -> str | None:
    """No attribute of the user's class is a near miss of one that the package reads."""
    known = {name for name in dir(RatioConfig) if not name.startswith("_")} | set(RatioConfig.model_fields)
    for owner in type(config).__mro__:
        if (
            owner.__module__.startswith("nemo_grpo.")
            or not issubclass(owner, BaseModel)
            or owner is BaseModel
        ):
            continue
        own = {*vars(owner), *vars(owner).get("__annotations__", {})}
        for name in sorted(name for name in own - known if not name.startswith("_")):
            if near := difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
                return (
                    f"expected names that something reads; found {name}, which nothing does; did you mean "
                    f"{near[0]}?"
                )
    return None


def what_it_declares(
    config: VariantConfig, batch: TokenBatch
) -> tuple[TokenBatch, dict[str, tuple[str, Tensor]]]:
    """The step as the engines give it to this variant.

    Returns: the step; field -> (declaration that asks for it, values) of what was left out.
    """
    needed = {
        "entropies": ("needs_entropy", config.needs_entropy),
        "reference_policy_logprobs": ("compares_with_reference", config.needs_reference),
    }
    left_out = {
        field: (declaration, getattr(batch, field))
        for field, (declaration, is_needed) in needed.items()
        if not is_needed
    }
    absent: dict[str, Any] = dict.fromkeys(left_out)
    return replace(batch, **absent), left_out


def shapes_fit(objective: Objective, batch: TokenBatch) -> str | None:
    """Advantages, weights, terms and metrics have a number per token, or where allowed per response."""
    prepared = objective.prepare(batch, seed=SEED)
    tokens, rows = tuple(batch.prev_logprobs.shape), tuple(batch.rewards.shape)
    shaped = _shaped(objective, batch)
    for name, value in (("advantages", shaped.advantages), ("token_weights", shaped.token_weights)):
        if value is not None and tuple(value.shape) != tokens:
            return _shape(f"Shaped.{name}", value, tokens, "base.per_token(batch.mask) spreads [B] over them")
    if shaped.advantages[~batch.mask].any():
        return (
            "expected advantages of exactly 0 outside batch.mask; found others; multiply the group's, or use "
            "core.masking.zero_outside"
        )
    for part in whole(objective, batch):
        terms = objective.terms(prepared.select(part, next_token_logprobs=batch.next_token_logprobs[part]))
        size = (len(part), tokens[1])
        for name, value in (("policy", terms.policy), ("kl", terms.kl)):
            if value is not None and tuple(value.shape) != size:
                remedy = "x[:, None].expand_as(batch.mask) spreads [B] over them"
                return _shape(f"TokenTerms.{name}", value, size, remedy)
        for name, value in terms.metrics.items():
            if tuple(value.shape) not in (size, (len(part),)):
                return _shape(f"the metric {name}", value, size, f"or a number per response, {list(rows)}")
            if value.requires_grad:
                return f"expected metrics without gradient; found one of {name}; append .detach()"
    return None


def _shape(name: str, value: Tensor, want: tuple[int, ...], remedy: str) -> str:
    return (
        f"expected {name} of shape {list(want)}, a number per token; found {list(value.shape)}, which torch "
        f"spreads in silence or refuses; {remedy}"
    )


def has_a_gradient(objective: Objective, batch: TokenBatch) -> str | None:
    """The loss depends on the current policy, and moves it in a step's first update."""
    current = batch.prev_logprobs.clone().requires_grad_()
    prepared = objective.prepare(batch, seed=SEED)
    parts = [prepared.select(part, next_token_logprobs=current[part]) for part in whole(objective, batch)]
    total = torch.stack([objective.loss(part, **counts(batch))[0] for part in parts]).sum()
    gradient = torch.autograd.grad(total, current, allow_unused=True)[0] if total.requires_grad else None
    if gradient is not None and gradient.any():
        return None
    return (
        "expected that the loss of a step whose rewards differ moves the policy; found no gradient at any "
        "token; compute the policy term from prepared.batch.next_token_logprobs, without detach() on its way"
    )


def is_finite(objective: Objective, batch: TokenBatch) -> str | None:
    """Loss, gradient and metrics are numbers on ordinary steps and on hard ones, in float32."""
    for name, step in hard_steps(batch):
        value, gradient, prepared = loss_and_gradient(objective, step)
        where = "expected finite numbers for a step with " + name
        if not prepared.advantages.isfinite().all():
            return f"{where}; found advantages that are not; add an eps to the divisor in shape()"
        if not (value.isfinite() and gradient.isfinite().all()):
            return (
                f"{where}; found the loss {value.item():.3g}; use core.surrogates.importance_ratio and "
                "core.kl.kl_estimate, which clamp, or clamp your exponents"
            )
        about = dict(prepared.metrics)
        for part in whole(objective, step):
            about |= objective.loss(prepared.select(part), **counts(step))[1]
        if bad := [metric for metric, number in about.items() if not number.isfinite()]:
            return f"{where}; found metrics that are not: {bad}; clamp them likewise"
    return None


def hard_steps(batch: TokenBatch) -> Iterator[tuple[str, TokenBatch]]:
    """(what is hard about it, the step in float32)."""
    tensors = {n: x.detach().float() for n in TOKEN_TENSORS if (x := getattr(batch, n)) is not None}
    plain = changed(batch, **tensors, rewards=batch.rewards.float())
    yield "ordinary numbers", plain
    for name, far in (("the policy 100 nats above the scored one", 0.0), ("100 nats below it", -100.0)):
        scored = torch.full_like(plain.prev_logprobs, -100.0 - far)
        apart = {
            "next_token_logprobs": scored * 0 + far,
            "prev_logprobs": scored,
            "generation_logprobs": scored,
        }
        if plain.reference_policy_logprobs is not None:
            apart["reference_policy_logprobs"] = scored
        yield name, changed(plain, **apart)
    yield "tokens of probability 1", changed(plain, **{name: x * 0 for name, x in tensors.items()})
    yield "equal rewards in every group", changed(plain, rewards=plain.rewards * 0 + 1)
    yield "one response per group", changed(plain, group_ids=torch.arange(len(plain.rewards)))


def prev_logprobs_are_declared(objective: Objective, batch: TokenBatch) -> str | None:
    """Without needs_prev_logprobs `shape` gives the same for any scored logprobs and entropies."""
    if objective.needs_scores or not reads_scores(objective, batch):
        return None
    return (
        "expected that shape() does not read prev_logprobs, as needs_prev_logprobs = False says; found that "
        "it does; set it to True, or the engine will not compute them"
    )


def reads_scores(objective: Objective, batch: TokenBatch) -> bool:
    """Whether other scored logprobs or entropies give other advantages or weights."""
    batch = changed(batch, response_ids=torch.arange(len(batch.rewards)) * 7919)
    entropies = None if batch.entropies is None else batch.entropies.flip(1)
    other = changed(batch, prev_logprobs=0.3 * batch.prev_logprobs, entropies=entropies)
    one, two = (objective.prepare(each, seed=SEED) for each in (batch, other))
    return not (torch.equal(one.advantages, two.advantages) and _equal(one.token_weights, two.token_weights))


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two or (one is not None and two is not None and torch.equal(one, two))


def shaping_is_declared(config: VariantConfig, objective: Objective, batch: TokenBatch) -> str | None:
    """Without shapes_advantages, every token carries its response's group advantage."""
    shaped = _shaped(objective, batch)
    is_plain = torch.equal(shaped.advantages, shaped.base.per_token(batch.mask))
    if config.shapes_advantages or config.learns_from_demonstrations or is_plain:
        return None
    return (
        "expected the group's advantages at every token, as shapes_advantages = False says; found others; "
        "set it to True, so that settings that would distort them are refused"
    )


def _shaped(objective: Objective, batch: TokenBatch) -> Shaped:
    clean = batch.clean()
    return objective.shape(replace(clean, next_token_logprobs=clean.prev_logprobs), SEED)


def rows_without_advantage_are_declared(objective: Objective, batch: TokenBatch) -> str | None:
    """Rows that the engine leaves out of the update, as in groups of equal rewards, have no gradient."""
    _, gradient, prepared = loss_and_gradient(objective, changed(batch, rewards=batch.rewards * 0))
    skipped = ~objective.rows_with_gradient(prepared)
    if not gradient[skipped].any():
        return None
    return (
        "expected no gradient where the advantage is 0, so that the engine may leave these responses out; "
        "found one; set the class attribute learns_without_advantages = True"
    )


def independent_groups_are_declared(
    config: VariantConfig, objective: Objective, batch: TokenBatch
) -> str | None:
    """Where `beyond_groups` says None, a group's advantages are those of a step that has it alone."""
    if config.beyond_groups is not None:
        return None
    shaped = _shaped(objective, batch)
    for number in batch.group_ids.unique():
        rows = batch.group_ids == number
        alone = _shaped(objective, batch.select(rows))
        for name in ("advantages", "token_weights"):
            here, there = getattr(shaped, name), getattr(alone, name)
            if here is not None and not torch.allclose(here[rows], there):
                return (
                    f"expected the same {name} for a group alone, as beyond_groups = None says; found "
                    "others; let it say what spans the step"
                )
    return None


def scaling_is_declared(config: VariantConfig, objective: Objective, batch: TokenBatch) -> str | None:
    """With scales_with_advantages, factors of the advantages are factors of the policy term."""
    if not config.scales_with_advantages or config.needs_whole_groups:  # the latter is not of NeMo-RL
        return None
    prepared = objective.prepare(batch, seed=SEED)
    factors = 0.5 + torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1)).double()
    for rows in whole(objective, batch):
        part = prepared.select(rows, next_token_logprobs=batch.next_token_logprobs[rows])
        scaled = replace(part, advantages=part.advantages * factors[rows])
        if not torch.allclose(objective.terms(scaled).policy, factors[rows] * objective.terms(part).policy):
            return (
                "expected a policy term proportional to the advantages, as scales_with_advantages = True "
                "says; found another; set it to False"
            )
    return None
