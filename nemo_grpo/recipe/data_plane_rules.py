"""Rules about NeMo-RL's data plane, which brings batches to the workers past the driver. See `cluster_rules`.

Its trainer, ``grpo_train_sync``, gives the driver rewards, masks and logprobs, and takes advantages and a
sample mask in return; no other column of a step reaches the loss.
"""

from collections.abc import Iterator

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule

ON = "data_plane.enabled=true"


@rule(Scope.CLUSTER)
def data_plane_trains_synchronously(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL's ``async_grpo_train`` keeps its own replay buffer, and SFT has no rollouts."""
    if not recipe.uses_data_plane:
        return
    if recipe.grpo.is_async:
        yield (
            f"{ON} with grpo.async_grpo.enabled=true: NeMo-RL's asynchronous trainer does not read the data "
            "plane; set one of them to false"
        )
    if recipe.loss_fn.learns_from_demonstrations:
        yield f"{ON}: {recipe.loss_fn.variant} trains without rollouts; set it to false"


@rule(Scope.CLUSTER)
def data_plane_brings_what_the_loss_reads(recipe: Recipe) -> Iterator[str]:
    if not recipe.uses_data_plane:
        return
    variant = recipe.loss_fn
    if variant.needs_entropy:
        yield (
            f"{ON}: {variant.variant} needs the policy's entropies, and NeMo-RL's workers write only "
            "logprobs to the data plane; set it to false"
        )
    if getattr(variant, "weighting", None) == "random" and not recipe.policy_is_scored:
        yield (
            f"{ON} with force_on_policy_ratio=true leaves nothing by which loss_fn.weighting=random could "
            "draw for a response: neither its tokens nor its logprobs; set one of them to false"
        )
    if variant.beside_advantages is not None:
        yield (
            f"{ON} brings the loss advantages alone, and {variant.beside_advantages}; set it to false, or "
            "change the latter"
        )


@rule(Scope.CLUSTER)
def weighted_advantages_are_not_clipped(recipe: Recipe) -> Iterator[str]:
    if not recipe.uses_data_plane or recipe.loss_fn.aggregation != "group_token_mean":
        return
    if recipe.has_single_controller:  # which clips none
        return
    for key in ("advantage_clip_low", "advantage_clip_high"):
        if (value := getattr(recipe.grpo, key)) is not None:
            yield (
                f"grpo.{key}={value:g} with {ON} and aggregation=group_token_mean would clip advantages that "
                "carry the weights of their groups; set it to null, or data_plane.enabled to false"
            )


@rule(Scope.CLUSTER)
def data_plane_draws_whole_groups(recipe: Recipe) -> Iterator[str]:
    """``grpo_train_sync`` drops rows whose std is 0; no function of it selects groups in another way."""
    if not (recipe.uses_data_plane and recipe.grpo.use_dynamic_sampling) or recipe.loss_fn.is_stock:
        return
    if recipe.has_single_controller:  # which draws none
        return
    off = "set data_plane.enabled or grpo.use_dynamic_sampling to false"
    if recipe.loss_fn.sampling_keys:
        yield (
            f"{ON} with grpo.use_dynamic_sampling=true: NeMo-RL then selects groups by itself, without "
            f"{recipe.loss_fn.variant}'s {' and '.join(recipe.loss_fn.sampling_keys)}; {off}"
        )
    elif recipe.grpo.use_leave_one_out_baseline is not False:
        yield (
            f"{ON} with grpo.use_dynamic_sampling=true and grpo.use_leave_one_out_baseline=true: NeMo-RL "
            "then drops the only correct response of a group, whose own std is 0; set the last one to false"
        )
