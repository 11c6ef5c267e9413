"""NeMo-RL's policy with two more things passing through: entropies out, further tensors for the loss in.

It also leaves out the update of a step that has no gradient: Adam's momentum and weight decay would make one.
What it sends to vLLM is watched by `Refits`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.compat import value
from nemo_grpo.nemorl.exchange import ENTROPIES, StepExchange
from nemo_grpo.nemorl.refit import Refits

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.variants.base import VariantConfig

log = logging.getLogger(__name__)

STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
WORKER = "nemo_grpo.nemorl.worker.EntropyPolicyWorker"
_REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"


def policy_factory(run: ClusterRun, exchange: StepExchange, refits: Refits) -> Callable[..., Any]:
    """What NeMo-RL's `setup` makes its policy with.

    Args: exchange: gets the entropies, where the variant needs them, and gives what the estimator has put.
          refits: is told of every send of weights.
    """
    stock: Any = compat.import_name("nemo_rl.models.policy.lm_policy:Policy")

    learns_always = has_further_losses(run.master_config)

    class ExchangingPolicy(stock):  # type: ignore[misc]
        """NeMo-RL's policy; its base is known only where NeMo-RL is."""

        def get_logprobs(self, data: Any, **further: Any) -> Any:
            found = super().get_logprobs(data, **further)
            exchange.entropies = found.pop(ENTROPIES, None)
            return found

        def train(self, data: Any, loss_fn: Any, **further: Any) -> Any:
            for name, tensor in exchange.take_train_tensors().items():
                data[name] = tensor
            if not learns_always and has_no_gradient(data, run.recipe.loss_fn):
                log.info("no group carries signal: metrics only, no update")
                further["eval_mode"] = True
            return super().train(data, loss_fn, **further)

        def stream_weights_via_ipc_zmq(self, *args: Any, **further: Any) -> Any:
            return refits.sends(self, super().stream_weights_via_ipc_zmq(*args, **further))

        def broadcast_weights_for_collective(self, *args: Any, **further: Any) -> Any:
            return refits.sends(self, super().broadcast_weights_for_collective(*args, **further))

    def make(**arguments: Any) -> Any:
        if run.recipe.loss_fn.needs_entropy:
            register_worker()
            arguments["worker_extension_cls_fqn"] = WORKER
        return ExchangingPolicy(**arguments)

    return make


def has_no_gradient(data: Mapping[str, Tensor], config: VariantConfig) -> bool:
    """True for a step whose loss is 0 whatever the policy does.

    It has no advantage and no KL penalty, or nothing that trains (all responses filtered).
    """
    if getattr(config, "reference_policy_kl_penalty", 0.0) == 0:
        return not bool(data["advantages"].any())
    return not bool((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).any())


def has_further_losses(master_config: Any) -> bool:
    """True if NeMo-RL adds losses to the variant's: experts' balance, multi-token prediction, draft.

    They have a gradient without any advantage. A z loss that a model's Megatron-Bridge provider brings along
    (EXAONE MoE) is not seen.
    """

    def of_model(key: str, default: Any) -> Any:
        return value(master_config, f"policy.megatron_cfg.{key}", default)

    balances = of_model("moe_router_load_balancing_type", "none")
    return (
        any(kind != "none" for kind in ([balances] if isinstance(balances, str) else balances))
        or bool(of_model("model_overrides.moe_z_loss_coeff", 0))
        or bool(of_model("mtp_num_layers", 0) and of_model("mtp_loss_scaling_factor", 0.1))
        or bool(value(master_config, "policy.draft.enabled", False))
    )


def register_worker() -> None:
    """Let our worker run in the environment of NeMo-RL's Megatron worker; Ray must be initialised."""
    registry = compat.import_name(f"{_REGISTRY}:ACTOR_ENVIRONMENT_REGISTRY")
    python = compat.import_name(f"{_REGISTRY}:get_actor_python_env")(STOCK_WORKER)
    if python.startswith("uv"):
        make = compat.import_name("nemo_rl.utils.venvs:create_local_venv_on_each_node")
        python = make(python, STOCK_WORKER)
    registry[WORKER] = python
