"""NeMo-RL's policy, which also returns entropies and passes additional tensors to the loss.

It skips the update of a step without gradient, in which Adam's momentum and weight decay would still move the
weights, but never the first update of an optimizer: until then Adam has no moments, and Megatron-core cannot
resume from a checkpoint without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nemo_grpo.nemorl import compat, host_api
from nemo_grpo.nemorl.step_context import ENTROPIES, StepContext
from nemo_grpo.support.dotted import value_of

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.recipe import Recipe
    from nemo_grpo.variants.base import VariantConfig

log = logging.getLogger(__name__)

NO_UPDATE = "no group carries signal: metrics only, no update"

STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
WORKER = "nemo_grpo.nemorl.worker.PolicyWorker"
ENTROPY_WORKER = "nemo_grpo.nemorl.worker.EntropyPolicyWorker"
NEEDS: dict[str | None, tuple[str, ...]] = {
    None: (),
    WORKER: (host_api.STAGES,),
    ENTROPY_WORKER: (host_api.STAGES, host_api.ENTROPIES),
}
"""Worker -> parts of NeMo-RL that it needs."""


def policy_factory(
    run: ClusterRun, context: StepContext, extend: Callable[[Any], Any] = lambda base: base
) -> Callable[..., Any]:
    """Make the policy constructor for NeMo-RL's `setup`.

    Args:    context: receives entropies if the variant needs them, and provides the estimator's tensors.
          extend: `VariantPolicy` -> the class to make.
    """
    data_plane = data_plane_of(run.master_config)
    stock: Any = compat.import_name(host_api.TQ_POLICY if data_plane else host_api.POLICY)
    worker = worker_class(run.recipe)
    for part in (*NEEDS[worker], *([host_api.DATA_PLANE] if data_plane else [])):
        compat.require(part)
    config = run.recipe.loss_fn
    learns_always = config.is_stock or has_further_losses(run.master_config)

    def may_learn(data: Mapping[str, Tensor]) -> bool:
        return learns_always or not has_no_gradient(data, config)

    class VariantPolicy(stock):
        """NeMo-RL's policy with the variant's tensors; the base class exists only with NeMo-RL installed."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.has_moments = named.get("optimizer_path") is not None
            self.learns_always = learns_always

        def get_logprobs(self, *arguments: Any, **named: Any) -> Any:
            found = super().get_logprobs(*arguments, **named)
            context.entropies = found.pop(ENTROPIES, None)
            return found

        def train(self, data: Any, loss_fn: Any, **further: Any) -> Any:
            data.update(context.take_train_tensors())
            if "row_factors" in data:
                data["row_factors"] = data["row_factors"] * context.take_row_scale(data["sample_mask"])
            return super().train(data, loss_fn, **further, **self.mode(may_learn(data)))

        def mode(self, has_gradient: bool) -> dict[str, bool]:
            """Return arguments for ``train``: evaluate only, if the step has no gradient."""
            if self.has_moments and not has_gradient:
                log.info(NO_UPDATE)
                return {"eval_mode": True}
            self.has_moments = True
            return {}

        def write_to_dataplane(self, meta: Any, fields: Any) -> None:
            fields = fields | context.take_train_tensors()
            context.has_gradient = may_learn(fields)
            scale = context.take_row_scale(fields["sample_mask"])
            super().write_to_dataplane(meta, fields | {"advantages": fields["advantages"] * scale})

        def train_from_meta(self, meta: Any, loss_fn: Any, **further: Any) -> Any:
            trained = super().train_from_meta(meta, loss_fn, **further, **self.mode(context.has_gradient))
            trained["all_mb_metrics"] |= context.metrics
            context.metrics = {}
            return trained

    policy = extend(VariantPolicy)

    def make(**arguments: Any) -> Any:
        if data_plane:
            arguments["dp_cfg"] = data_plane
        if worker:
            register_worker(worker)
            arguments["worker_extension_cls_fqn"] = worker
        return policy(**arguments)

    return make


def worker_class(recipe: Recipe) -> str | None:
    """Name the worker class of ours that the recipe needs; None: NeMo-RL's own will do."""
    if recipe.loss_fn.needs_entropy:
        return ENTROPY_WORKER
    if not recipe.policy.megatron_cfg.enabled:
        return None
    has_stages = recipe.policy.megatron_cfg.pipeline_model_parallel_size > 1
    return WORKER if has_stages and recipe.policy.generation.temperature != 1.0 else None


def has_no_gradient(data: Mapping[str, Tensor], config: VariantConfig) -> bool:
    """True for a step whose loss is 0 whatever the policy does.

    All advantages are 0 and nothing else has a gradient, such as a KL penalty, or all responses are filtered.
    """
    if getattr(config, "reference_policy_kl_penalty", 0.0) == 0 and not config.learns_without_advantages:
        return not bool(data["advantages"].any())
    trains = data["sample_mask"].bool()
    if "token_mask" in data:  # the data plane has it already
        trains = trains & data["token_mask"][:, 1:].any(1)
    return not bool(trains.any())


def data_plane_of(master_config: Any) -> Any:
    """Return NeMo-RL's section ``data_plane`` if it is enabled, else None."""
    section = value_of(master_config, "data_plane", None)
    return section if value_of(section or {}, "enabled", False) else None


def has_further_losses(master_config: Any) -> bool:
    """True if NeMo-RL adds losses to the variant's: expert load balance, multi-token prediction, draft.

    These have a gradient even if all advantages are 0. Not detected: a z loss set by a model's
    Megatron-Bridge provider (EXAONE MoE).
    """

    def of_model(key: str, default: Any) -> Any:
        return value_of(master_config, f"policy.megatron_cfg.{key}", default)

    balances = of_model("moe_router_load_balancing_type", "none")
    return (
        any(kind != "none" for kind in ([balances] if isinstance(balances, str) else balances))
        or bool(of_model("model_overrides.moe_z_loss_coeff", 0))
        or bool(of_model("mtp_num_layers", 0) and of_model("mtp_loss_scaling_factor", 0.1))
        or bool(value_of(master_config, "policy.draft.enabled", False))
    )


def register_worker(worker: str) -> None:
    """Let one of our workers run in the environment of NeMo-RL's; Ray must be initialised."""
    python = compat.import_name(host_api.ACTOR_PYTHON)(STOCK_WORKER)
    if python.startswith("uv"):
        make = compat.import_name("nemo_rl.utils.venvs:create_local_venv_on_each_node")
        python = make(python, STOCK_WORKER)
    compat.import_name(host_api.ACTOR_PYTHONS)[worker] = python
