"""The engine's Adam, its configuration and schedule, against the equations in plain float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from nemo_grpo.engine.megatron import optimizer as megatron_optimizer
from nemo_grpo.engine.megatron.optimizer import FusedLayoutAdam
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer, MegatronScheduler

LR, BETA1, BETA2, EPS, DECAY = 0.1, 0.8, 0.95, 1e-2, 0.3


def plain_adam(p: float, gradients: list[float], decay: float) -> float:
    """Decoupled weight decay (Loshchilov and Hutter 2019), Algorithm 2."""
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        p -= LR * decay * p
        p -= LR * (m / (1 - BETA1**t)) / (math.sqrt(v / (1 - BETA2**t)) + EPS)
    return p


def adam(parameters, decay: float = DECAY) -> FusedLayoutAdam:
    return FusedLayoutAdam(parameters, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=decay)


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_adam_is_the_papers(decay):
    starts, gradients = [1.0, -2.0, 0.5], [[0.3, -0.1, 0.0], [-0.2, 0.4, 1e-3], [0.1, 0.1, 2.0], [5.0, 0, 0]]
    parameter = torch.nn.Parameter(torch.tensor(starts, dtype=torch.float64))
    optimizer = adam([parameter], decay)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    expected = [plain_adam(p, [g[i] for g in gradients], decay) for i, p in enumerate(starts)]
    torch.testing.assert_close(
        parameter.data, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_only_what_has_a_gradient_is_updated_and_counted():
    """As Transformer Engine's; a rank may have none of a group's parameters."""
    moved, still = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = adam([{"params": [moved, still]}, {"params": []}])
    moved.grad = torch.ones(1)
    optimizer.step()
    assert still.item() == 1.0
    assert moved.item() != 1.0
    assert [group.get("step") for group in optimizer.param_groups] == [1, None]
    assert optimizer.param_groups[0]["bias_correction"], "the fused optimizer that loads this reads it"


def test_step_goes_on_from_a_loaded_state():
    """The count of steps is in the group, as the fused optimizers save it."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = adam([parameter])
    optimizer.param_groups[0]["step"] = None  # as megatron-core leaves it before the first update
    for gradient in (0.5, -0.25):
        parameter.grad = torch.full((1,), gradient, dtype=torch.float64)
        optimizer.step()
    again = torch.nn.Parameter(parameter.data.clone())
    resumed = adam([again])
    resumed.load_state_dict(optimizer.state_dict())
    again.grad = torch.ones(1, dtype=torch.float64)
    resumed.step()
    assert again.item() == pytest.approx(plain_adam(1.0, [0.5, -0.25, 1.0], DECAY), rel=1e-12)


def test_only_decoupled_decay_is_offered():
    with pytest.raises(ValueError, match="adam_w_mode=False"):
        FusedLayoutAdam([torch.nn.Parameter(torch.ones(1))], adam_w_mode=False)


SECTION = MegatronOptimizer(lr=1.0, min_lr=0.2, weight_decay=0.1)


@pytest.mark.parametrize(
    ("style", "after", "expected"),
    [
        ("constant", 10, 1.0),
        ("linear", 0, 0.1),  # lr_warmup_init
        ("linear", 1, 0.55),  # halfway from 0.1 to 1
        ("linear", 2, 1.0),
        ("linear", 6, 0.6),  # half of 10 - 2 steps down to min_lr
        ("linear", 10, 0.2),
        ("linear", 99, 0.2),
        ("cosine", 4, 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))),
    ],
)
def test_schedule_is_the_recipes(style, after, expected):
    section = MegatronScheduler(
        lr_decay_style=style, lr_warmup_iters=2, lr_decay_iters=10, lr_warmup_init=0.1
    )
    optimizer = SimpleNamespace(param_groups=[{}])
    schedule = megatron_optimizer._schedule(optimizer, SECTION, section)
    schedule.step(after)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
    assert optimizer.param_groups[0].get("weight_decay", schedule.get_wd()) == pytest.approx(0.1)
