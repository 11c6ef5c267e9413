"""Which of our workers a recipe needs, and which steps it trains; the others train with NeMo-RL's own."""

from dataclasses import replace

import pytest
import torch

from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.policy import ENTROPY_WORKER, WORKER, has_gradient, worker_class
from nemo_grpo.recipe import load_recipe
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.base import RatioConfig

GRPO = "cw_grpo/grpo-r1-distill-qwen-1.5b-1n8g.yaml"
PP2 = "policy.megatron_cfg.pipeline_model_parallel_size=2"
WARM, COLD = "policy.generation.temperature=1.0", "policy.generation.temperature=0.7"


@pytest.mark.parametrize(
    ("recipe", "overrides", "worker"),
    [
        (GRPO, [PP2, COLD], WORKER),
        (GRPO, [PP2, WARM], None),
        (GRPO, [COLD], None),
        ("erpo/erpo-qwen2.5-7b-1n8g.yaml", [], ENTROPY_WORKER),
        ("tr_grpo/tr_grpo-llama-3.1-70b-instruct-logic-8n8g.yaml", [], WORKER),
    ],
)
def test_only_temperature_with_pipeline_parallelism_and_entropies_need_a_worker_of_ours(
    recipe, overrides, worker
):
    assert worker_class(load_recipe(recipe, overrides)) == worker


class Bonus(RatioConfig):
    def terms(self, prepared):
        terms = super().terms(prepared)
        return replace(terms, policy=terms.policy - 0.1 * prepared.batch.next_token_logprobs)


def test_a_loss_that_learns_without_advantages_trains_in_a_step_without_signal():
    data = {"advantages": torch.zeros(2, 3), "token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    plain = parse_loss_fn({"variant": "gpg"})
    penalised = parse_loss_fn({"variant": "grpo", "reference_policy_kl_penalty": 0.01})
    assert not has_gradient(data, plain.build())
    assert has_gradient(data | {"advantages": torch.tensor([[0.0, -1.0]])}, plain.build())
    only_first = torch.tensor([[1.0, 0.0, 0.0]] * 2)  # which nothing predicts
    for learns in (penalised.build(), Bonus(variant="bonus").build()):
        assert has_gradient(data, learns)
        assert not has_gradient(data | {"sample_mask": torch.zeros(2)}, learns), "all responses are filtered"
        assert not has_gradient(data | {"token_mask": only_first}, learns)


@pytest.mark.parametrize(
    ("megatron", "draft", "expected"),
    [
        ({}, {}, False),
        ({"moe_router_load_balancing_type": "none", "mtp_loss_scaling_factor": 0.1}, {}, False),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, {}, True),
        ({"moe_router_load_balancing_type": ["none", "aux_loss"]}, {}, True),
        ({"moe_router_load_balancing_type": ["none"]}, {}, False),
        ({"model_overrides": {"moe_z_loss_coeff": 1e-3}}, {}, True),
        ({"mtp_num_layers": 1}, {}, True),  # megatron-core's own factor is 0.1
        ({"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0}, {}, False),
        ({}, {"enabled": True}, True),
        ({}, {"enabled": False}, False),
    ],
)
def test_losses_that_nemo_rl_adds_have_a_gradient_without_signal(megatron, draft, expected):
    run = ClusterRun(None, {"policy": {"megatron_cfg": megatron, "draft": draft}})
    assert run.has_further_losses == expected
