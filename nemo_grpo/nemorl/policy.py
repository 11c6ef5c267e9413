"""NeMo-RL's policy, which also returns entropies and passes additional tensors to the loss.

It skips the update of a step without gradient, because Adam's momentum and weight decay would still move the
weights. It never skips the first update of an optimizer: before it Adam has no moments, and Megatron-core
cannot resume from a checkpoint without moments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nemo_grpo.nemorl import compat, host_api
from nemo_grpo.nemorl.host_api import STOCK_WORKER
from nemo_grpo.nemorl.step_context import ENTROPIES, StepContext

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_grpo.core.objective import Objective
    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.recipe import Recipe

log = logging.getLogger(__name__)

NO_UPDATE = "no group carries signal: metrics only, no update"

WORKER = "nemo_grpo.nemorl.worker.PolicyWorker"
ENTROPY_WORKER = "nemo_grpo.nemorl.worker.EntropyPolicyWorker"
NEEDS: dict[str | None, tuple[str, ...]] = {
    None: (),
    WORKER: (host_api.STAGES,),
    ENTROPY_WORKER: (host_api.STAGES, host_api.ENTROPIES),
}
"""Worker -> parts of NeMo-RL that it needs."""

_Stock: Any = object
"""Placeholder for NeMo-RL's policy, which can be imported only where NeMo-RL is installed. `policy_factory`
makes the real one the base of the classes below."""


class VariantPolicy(_Stock):
    """NeMo-RL's policy, which trains with the variant's tensors and skips updates without gradient.

    Attributes:
        learns_always: every step has a gradient, or is treated so: NeMo-RL's own loss, or additional losses.
        has_moments: the optimizer was resumed or has made an update, so that an update may be skipped.
    """

    def __init__(self, *arguments: Any, run: ClusterRun, context: StepContext, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.context = context
        self.objective = run.recipe.loss_fn.build()
        self.learns_always = run.recipe.loss_fn.is_stock or run.has_further_losses
        self.has_moments = named.get("optimizer_path") is not None

    def get_logprobs(self, *arguments: Any, **named: Any) -> Any:
        """Score as NeMo-RL does, and keep the worker's entropies for the estimator."""
        scores = super().get_logprobs(*arguments, **named)
        self.context.entropies = scores.pop(ENTROPIES, None)
        return scores

    def train(self, data: Any, loss_fn: Any, **further: Any) -> Any:
        """Train as NeMo-RL does, with the estimator's tensors among the data."""
        data.update(self.context.take_train_tensors())
        if "row_factors" in data:
            data["row_factors"] = data["row_factors"] * self.context.take_row_scale(data["sample_mask"])
        if self.skips_update(has_gradient=self.may_learn(data)):
            further["eval_mode"] = True
        return super().train(data, loss_fn, **further)

    def may_learn(self, data: Mapping[str, Tensor]) -> bool:
        """Return True if a step with these advantages and masks can move the policy."""
        return self.learns_always or has_gradient(data, self.objective)

    def skips_update(self, *, has_gradient: bool) -> bool:
        """Return True if the optimizer must not step, and note an update that gives it moments."""
        if self.has_moments and not has_gradient:
            log.info(NO_UPDATE)
            return True
        self.has_moments = True
        return False


class PlanePolicy(VariantPolicy):
    """`VariantPolicy` for a batch on NeMo-RL's data plane, of which training receives only the address.

    Attributes:
        has_gradient: True if the advantages that were written last can move the policy.
    """

    has_gradient = True

    def write_to_dataplane(self, meta: Any, fields: Any) -> None:
        """Write the step's advantages as NeMo-RL does, scaled for a mean over groups."""
        fields = fields | self.context.take_train_tensors()
        self.has_gradient = self.may_learn(fields)
        scale = self.context.take_row_scale(fields["sample_mask"])
        super().write_to_dataplane(meta, fields | {"advantages": fields["advantages"] * scale})

    def train_from_meta(self, meta: Any, loss_fn: Any, **further: Any) -> Any:
        """Train as NeMo-RL does, and add the estimator's metrics."""
        if self.skips_update(has_gradient=self.has_gradient):
            further["eval_mode"] = True
        trained = super().train_from_meta(meta, loss_fn, **further)
        trained["all_mb_metrics"] |= self.context.metrics
        self.context.metrics = {}
        return trained


def policy_factory(
    run: ClusterRun, context: StepContext, kind: type[VariantPolicy] | None = None, **further: Any
) -> Callable[..., Any]:
    """Make the policy constructor for NeMo-RL's `setup`.

    Args:
        run: decides which of NeMo-RL's policies and workers are extended.
        context: receives entropies if the variant needs them, and provides the estimator's tensors.
        kind: the class to make; None: `VariantPolicy`, or `PlanePolicy` on the data plane.
        further: further arguments of ``kind``.

    Returns:
        A function with the arguments of NeMo-RL's policy.
    """
    uses_data_plane = run.recipe.uses_data_plane
    stock: Any = compat.import_name(host_api.TQ_POLICY if uses_data_plane else host_api.POLICY)
    worker = worker_class(run.recipe)
    for part in NEEDS[worker]:
        compat.require(part)
    if uses_data_plane:
        compat.require(host_api.DATA_PLANE)
    if kind is None:
        kind = PlanePolicy if uses_data_plane else VariantPolicy
    # NeMo-RL has one policy for the data plane and one without it, so the base is chosen here.
    policy = type(kind.__name__, (kind, stock), {})

    def make(**arguments: Any) -> Any:
        if uses_data_plane:
            arguments["dp_cfg"] = run.master_config.data_plane
        if worker:
            register_worker(worker)
            arguments["worker_extension_cls_fqn"] = worker
        return policy(run=run, context=context, **further, **arguments)

    return make


def worker_class(recipe: Recipe) -> str | None:
    """Name the worker class of this package that the recipe needs; None if NeMo-RL's own is enough."""
    if recipe.loss_fn.needs_entropy:
        return ENTROPY_WORKER
    if not recipe.policy.megatron_cfg.enabled:
        return None
    has_stages = recipe.policy.megatron_cfg.pipeline_model_parallel_size > 1
    divides_by_temperature = recipe.policy.generation.temperature != 1.0
    return WORKER if has_stages and divides_by_temperature else None


def has_gradient(data: Mapping[str, Tensor], objective: Objective) -> bool:
    """Return True if a row can move the policy: `Objective.rows_with_gradient` of NeMo-RL's tensors."""
    mask = data["sample_mask"].bool()[:, None]
    # In NeMo-RL's columns index t is token t, and nothing predicts the first token. The fields that are
    # written to the data plane have no token mask, because it has been there since the rollouts.
    if "token_mask" in data:
        mask = mask & data["token_mask"][:, 1:].bool()
    return bool(objective.rows_with_gradient(data["advantages"], mask).any())


def register_worker(worker: str) -> None:
    """Let one of our workers run in the Python environment of NeMo-RL's worker; Ray must be initialised."""
    python = compat.import_name(host_api.ACTOR_PYTHON)(STOCK_WORKER)
    if python.startswith("uv"):
        # Under the name of NeMo-RL's worker, so that ours shares its environment. Under our worker's name
        # NeMo-RL would build a second one.
        create_environment = compat.import_name("nemo_rl.utils.venvs:create_local_venv_on_each_node")
        python = create_environment(python, STOCK_WORKER)
    compat.import_name(host_api.ACTOR_PYTHONS)[worker] = python
