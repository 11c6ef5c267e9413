"""Rules about the algorithm: which settings contradict each other or would train something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nemo_grpo.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.recipe.recipe import Recipe


STEP_LEVEL_VARIANTS = {
    "cw_grpo": "the weights are part of the advantages",
    "erpo": "the advantages are shaped per token",
    "clip_cov": "the choice of tokens reads the advantages",
    "gpg": "alpha is part of the advantages",
}
"""Variants that change advantages after the group statistics: why clipping those would distort the loss."""

STOCK_LOSS_KEYS = {
    "force_on_policy_ratio": "it would replace prev_logprobs by zeros, and cw_grpo, erpo and clip_cov need "
    "them; one update per step (policy.train_global_batch_size = prompts x generations) has ratio 1 anyway",
    "token_level_loss": "use loss_fn.aggregation=token_mean or sequence_mean",
    "disable_ppo_ratio": "use loss_fn.variant=gpg for plain policy gradient",
    "use_kl_in_reward": "the KL penalty is a term of the loss in every variant; leave this key out",
}
"""Keys of NeMo-RL's own loss that no variant has, and what to do instead."""


def refuse_stock_loss_keys(loss_fn: Mapping[str, Any]) -> None:
    """Raise for a key of NeMo-RL's own loss that is refused for a reason.

    Raises: UserError: the key, the reason and the remedy.
    """
    for key, remedy in STOCK_LOSS_KEYS.items():
        if key in loss_fn:
            raise UserError(f"loss_fn.{key}={_yaml(loss_fn[key])} is not supported: {remedy}")


def model_is_named(recipe: Recipe) -> Iterator[str]:
    if recipe.policy.model_name is None and recipe.nemo_grpo.warm_start is None:
        yield "policy.model_name=null: no model; name a folder or a Hub model, or give nemo_grpo.warm_start"


def groups_have_a_spread(recipe: Recipe) -> Iterator[str]:
    if recipe.grpo.num_generations_per_prompt < 2:
        yield (
            f"grpo.num_generations_per_prompt={recipe.grpo.num_generations_per_prompt}: a group of one has "
            "no advantage; use at least 2"
        )


def loss_agrees_with_grpo_section(recipe: Recipe) -> Iterator[str]:
    given = (recipe.grpo.model_extra or {}).get("adv_estimator")
    estimator = given if isinstance(given, Mapping) else {}
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        used = getattr(recipe.loss_fn, key, False)
        places = {f"grpo.{key}": getattr(recipe.grpo, key), f"grpo.adv_estimator.{key}": estimator.get(key)}
        for place, wanted in places.items():
            if wanted is not None and wanted != used:
                yield (
                    f"{place}={_yaml(wanted)}, but {recipe.loss_fn.variant} trains with loss_fn.{key}="
                    f"{_yaml(used)}; leave {place} out or make both the same"
                )
    if estimator.get("name", "grpo") != "grpo":
        yield (
            f"grpo.adv_estimator.name={estimator['name']}: the advantages are those of loss_fn.variant="
            f"{recipe.loss_fn.variant}, and this would be ignored; leave it out"
        )


def warmup_ends_before_the_decay(recipe: Recipe) -> Iterator[str]:
    s = recipe.policy.megatron_cfg.scheduler
    if s.lr_decay_iters is not None and s.lr_warmup_iters >= s.lr_decay_iters:
        yield (
            f"policy.megatron_cfg.scheduler.lr_warmup_iters={s.lr_warmup_iters} must be less than "
            f"lr_decay_iters={s.lr_decay_iters}; the decay counts from the first update"
        )


def min_lr_is_below_lr(recipe: Recipe) -> Iterator[str]:
    o = recipe.policy.megatron_cfg.optimizer
    if o.min_lr > o.lr:
        yield f"policy.megatron_cfg.optimizer.min_lr={o.min_lr} is above lr={o.lr}; lower it"


def overlong_buffer_fits(recipe: Recipe) -> Iterator[str]:
    r = recipe.grpo.reward_shaping
    if r.enabled and r.overlong_buffer_length >= r.max_response_length:
        yield (
            f"grpo.reward_shaping.overlong_buffer_length={r.overlong_buffer_length} must be less than "
            f"max_response_length={r.max_response_length}, or every response is punished; lower it"
        )


def early_stop_is_complete(recipe: Recipe) -> Iterator[str]:
    g = recipe.grpo
    if (g.stop_at_validation_metric is None) != (g.stop_at_validation_threshold is None):
        yield (
            f"grpo.stop_at_validation_metric={_yaml(g.stop_at_validation_metric)} and "
            f"stop_at_validation_threshold={_yaml(g.stop_at_validation_threshold)} belong together; "
            "give both or none"
        )


def rewards_count(recipe: Recipe) -> Iterator[str]:
    if not any(recipe.nemo_grpo.rewards.values()):
        yield f"nemo_grpo.rewards={recipe.nemo_grpo.rewards}: every reward is 0; give a component a weight"


def gpg_threshold_is_switched_on(recipe: Recipe) -> Iterator[str]:
    changed = _changed(recipe, "valid_fraction_threshold", "max_resample_attempts")
    if changed and not recipe.grpo.use_dynamic_sampling:
        yield (
            f"loss_fn.{changed[0]} has no effect with grpo.use_dynamic_sampling=false; set "
            "grpo.use_dynamic_sampling=true"
        )


def erpo_has_a_reference(recipe: Recipe) -> Iterator[str]:
    if recipe.loss_fn.variant != "erpo":
        return
    if getattr(recipe.loss_fn, "reference_policy_kl_penalty", None) == 0:
        yield (
            "loss_fn.reference_policy_kl_penalty=0: NeMo-RL loads the reference policy, from which ERPO "
            "measures progress, only for a penalty above 0; use 0.001 as the paper, or 1e-9 for nearly none"
        )
    if (recipe.policy.megatron_cfg.model_extra or {}).get("use_fused_linear_logprobs"):
        yield (
            "policy.megatron_cfg.use_fused_linear_logprobs=true yields no entropies, which ERPO needs; "
            "set it to false"
        )


def released_loss_sees_whole_groups(recipe: Recipe) -> Iterator[str]:
    if not getattr(recipe.loss_fn, "author_compat", False):
        return
    size, group = recipe.policy.train_global_batch_size, recipe.grpo.num_generations_per_prompt
    if size % group or size // group < recipe.data_parallel_size:
        yield (
            f"loss_fn.author_compat=true sums over whole groups: policy.train_global_batch_size={size} must "
            f"be a multiple of grpo.num_generations_per_prompt={group}, with at least one group for each of "
            f"the {recipe.data_parallel_size} data-parallel ranks; use {recipe.num_sequences_per_step}"
        )


def advantages_are_not_clipped(recipe: Recipe) -> Iterator[str]:
    reason = STEP_LEVEL_VARIANTS.get(recipe.loss_fn.variant)
    for key in ("advantage_clip_low", "advantage_clip_high"):
        value = (recipe.grpo.model_extra or {}).get(key)
        if reason and value is not None:
            yield f"grpo.{key}={value}: {recipe.loss_fn.variant} forbids it because {reason}; set it to null"


def data_plane_is_off(recipe: Recipe) -> Iterator[str]:
    plane = (recipe.model_extra or {}).get("data_plane")
    if isinstance(plane, Mapping) and plane.get("enabled"):
        yield (
            "data_plane.enabled=true drops the tensors that variants add to a batch (weights, entropies); "
            "set it to false"
        )


def dapo_samples_dynamically(recipe: Recipe) -> Iterator[str]:
    if recipe.loss_fn.variant == "dapo" and not recipe.grpo.use_dynamic_sampling:
        yield "dapo without grpo.use_dynamic_sampling=true: groups of equal rewards stay in the step"


def gpg_samples_dynamically(recipe: Recipe) -> Iterator[str]:
    if recipe.loss_fn.variant == "gpg" and not recipe.grpo.use_dynamic_sampling:
        yield "gpg without grpo.use_dynamic_sampling=true: no threshold on valid groups, alpha only"


def ratio_clip_can_act(recipe: Recipe) -> Iterator[str]:
    changed = _changed(recipe, "ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
    if changed and recipe.num_updates_per_step == 1:
        yield (
            f"loss_fn.{changed[0]}: with one update per step the ratio is 1 and no clip acts; "
            "policy.train_global_batch_size below prompts x generations makes several updates"
        )


def _changed(recipe: Recipe, *keys: str) -> list[str]:
    """Those keys of ``loss_fn`` that differ from the variant's default; a resolved recipe gives them all."""
    fields = type(recipe.loss_fn).model_fields
    return [k for k in keys if k in fields and getattr(recipe.loss_fn, k) not in (None, fields[k].default)]


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


RULES = (
    model_is_named,
    groups_have_a_spread,
    loss_agrees_with_grpo_section,
    warmup_ends_before_the_decay,
    min_lr_is_below_lr,
    overlong_buffer_fits,
    early_stop_is_complete,
    rewards_count,
    gpg_threshold_is_switched_on,
    erpo_has_a_reference,
    released_loss_sees_whole_groups,
    advantages_are_not_clipped,
    data_plane_is_off,
)
"""Every rule of this file that refuses a recipe."""

ADVICE = (dapo_samples_dynamically, gpg_samples_dynamically, ratio_clip_can_act)
"""Every rule of this file that only warns."""
