"""Every layout computes what one process computes: scores, loss, gradient norm, parameters after a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks, slow_but
from small_models import TRAINED, small_config
from test_megatron_policy import step, token_batch
from transformers import AutoModelForCausalLM

from nemo_grpo import build_objective
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer
from nemo_grpo.variants import OBJECTIVES

LAYOUTS = {
    "tp2": (2, Layout(tensor=2)),
    "tp2-sp": (2, Layout(tensor=2, sequence_parallel=True)),
    "pp2": (2, Layout(pipeline=2)),
    "pp2-uneven": (2, Layout(pipeline=2, first_stage_layers=1)),
    "cp2": (2, Layout(context=2)),
    "dp2": (2, Layout()),
    "tp2-pp2": (4, Layout(tensor=2, pipeline=2)),
    "tp2-cp2-sp": (4, Layout(tensor=2, context=2, sequence_parallel=True)),
    "dp2-pp2": (4, Layout(pipeline=2)),
}
EXTRA = {"dr_grpo": {"max_response_length": 12}, "clip_cov": {"covariance_min": 0.0, "clip_fraction": 0.1}}


def hf_model(family: str, num_layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = small_config(family)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * num_layers
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def one_step(
    layout: Layout, family: str, variants: list[str], distributed: bool, num_layers: int
) -> dict[str, Any]:
    """Score and update once with each variant, from the same weights."""
    model = hf_model(family, num_layers)
    settings = MegatronOptimizer(
        lr=1e-2, weight_decay=0.1, adam_eps=1e-4, clip_grad=0.05, use_distributed_optimizer=distributed
    )
    sequences, rewards = step(rows=8)
    found: dict[str, Any] = {}
    for variant in variants:
        policy = MegatronPolicy(model.config, settings, layout=layout)
        policy.load_weights(dict(model.state_dict()), keep_reference=True)
        prev, entropies = policy.score(sequences, micro_batch_size=3, temperature=0.9)
        with policy.reference_weights():
            reference, _ = policy.score(sequences, micro_batch_size=3, temperature=0.9)
        scores = torch.stack([prev, entropies, reference])
        # The step-level part must see the same numbers: clip_cov draws by their bits, erpo amplifies them.
        prev, entropies, reference = ((1000 * x).round() / 1000 for x in scores)
        reference = reference - 0.1 * entropies
        batch = token_batch(
            sequences, rewards, prev, entropies=entropies, reference_policy_logprobs=reference
        )
        objective = build_objective(variant, **EXTRA.get(variant, {}))
        prepared = objective.prepare(batch)
        result = policy.update(objective, prepared, sequences, micro_batch_size=2, temperature=0.9)
        found[variant] = {
            "scores": scores,
            "loss": result.metrics["loss/total"],
            "grad_norm": result.grad_norm,
            "weights": {name: tensor.clone() for name, tensor in policy.named_tensors()},
        }
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for variant, want in expected.items():
        have = found[variant]
        torch.testing.assert_close(have["scores"], want["scores"], rtol=1e-5, atol=1e-5, msg=variant)
        assert have["loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-6), variant
        assert have["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5), variant
        assert have["weights"].keys() == want["weights"].keys()
        for name, tensor in want["weights"].items():
            torch.testing.assert_close(
                have["weights"][name], tensor, rtol=1e-5, atol=5e-6, msg=f"{variant} {name}"
            )


@pytest.fixture(scope="module")
def alone():
    """What one process computes; made once per set of arguments."""
    made: dict[tuple, dict] = {}

    def compute(*arguments) -> dict:
        key = repr(arguments)
        if key not in made:
            made[key] = run_ranks(1, one_step, Layout(), *arguments)[0]
        return made[key]

    return compute


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "tp2-pp2"))
def test_every_variant_computes_the_same_at_every_layout(alone, name):
    world_size, layout = LAYOUTS[name]
    arguments = ("qwen2-tied", list(OBJECTIVES), True, 3 if "uneven" in name else 2)
    for found in run_ranks(world_size, one_step, layout, *arguments):  # every rank holds the whole result
        assert_same(found, alone(*arguments))


@pytest.mark.parametrize("family", slow_but(TRAINED, "qwen3"))
def test_every_family_computes_the_same_in_parallel(alone, family):
    arguments = (family, ["grpo"], False, 2)
    expected = alone(*arguments)
    assert_same(run_ranks(4, one_step, Layout(tensor=2, pipeline=2), *arguments)[0], expected)
    assert_same(run_ranks(2, one_step, Layout(context=2), *arguments)[0], expected)
