"""NeMo-RL's Megatron worker that can return to its start, so that one start serves every variant."""

from typing import Any

import ray
import torch
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from torch import Tensor

from nemo_grpo.nemorl.worker import EntropyPolicyWorkerImpl


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class ReturningPolicyWorker(EntropyPolicyWorkerImpl):
    """The worker that also returns entropies; its logprobs are the same as the stock worker's."""

    def keep_start(self) -> None:
        """Keep a copy of the weights for `back_to_start`."""
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def back_to_start(self) -> None:
        """Restore the remembered weights, and reset optimizer and schedule."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.start[name])
        self.optimizer.reload_model_params()
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                group["step"] = 0
            for state in part.optimizer.state.values():
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment in state:
                        state[moment].zero_()
        self.scheduler.num_steps = 0
        self.scheduler.step(0)

    def hf_tensors(self) -> dict[str, Tensor]:
        """Export the weights by their Hugging Face names, as a refit does."""
        exported = self.megatron_bridge.export_hf_weights([self.model], show_progress=False)
        return {name: tensor.detach().float().cpu().clone() for name, tensor in exported}

    def settings(self) -> list[dict[str, Any]]:
        """Return the optimizer's settings per parameter group."""
        names = ("lr", "weight_decay", "betas", "eps", "wd_mult", "lr_mult")
        return [{name: group.get(name) for name in names} for group in self.optimizer.param_groups]
