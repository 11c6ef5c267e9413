"""AdamW with the state layout of Transformer Engine's and Apex's FusedAdam, on torch's kernel.

megatron-core's distributed optimizer saves and loads the fused layout (an integer step in the parameter
group, two moments per parameter) and fails on torch.optim.AdamW's (a step tensor per parameter). This class
stands in for theirs where there are none, so checkpoints are the same with and without a GPU.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def install() -> None:
    """Make megatron-core use what is here where it found neither Transformer Engine nor Apex."""
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distrib_optimizer.Adam = FusedLayoutAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
        clip_grads.l2_norm_impl = _l2_norm
        clip_grads.multi_tensor_scale_impl = optimizer.optimizer.multi_tensor_scale_impl = _scale


def _l2_norm(
    _chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    """The norm of all tensors together, [1]; megatron-core's own waits for the GPU at every tensor."""
    return torch.stack(torch._foreach_norm(tensors[0])).norm()[None], None


def _scale(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], factor: float | Tensor) -> None:
    """The second list becomes the first times a factor; megatron-core's own makes a copy in between."""
    sources, targets = tensors
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)  # of gradients that are clipped: onto themselves
        if factor != 1:
            torch._foreach_mul_(targets, factor)


class FusedLayoutAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019).

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_fused_kernel_options: Any,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode=False: only decoupled weight decay is implemented; use True")
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step") or 0) + 1
            self._update([p for p in group["params"] if p.grad is not None], group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Torch's fused kernel: one pass over each parameter, the same bits on every run."""
        states = [self.state[p] for p in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            # adamw counts up what it is given; torch.tensor would wait for the GPU
            [torch.full((), group["step"] - 1.0, device=p.device) for p in parameters],
            fused=True,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
