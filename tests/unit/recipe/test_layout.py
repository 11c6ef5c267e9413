"""What of a model a layout must divide: one set of rules for the planner and the embedded engine."""

from dataclasses import replace

import pytest

from nemo_grpo.models import ModelSpec
from nemo_grpo.recipe.layout import Layout, expert_refusals, stage_refusals, width_refusals

SPEC = ModelSpec("tiny", "qwen2", 32, 6, 8, 2, 36, 98, 64, False, 4)
"""6 layers, 8 heads, 2 key heads, a feed-forward width of 36 and 98 entries of the vocabulary."""


@pytest.mark.parametrize(
    ("size", "embedded", "message"),
    [
        (1, True, None),
        (2, True, None),
        (2, False, None),
        (3, True, "TP=3 does not divide num_attention_heads=8 of tiny; use 2"),
        (3, False, "TP=3 does not divide num_attention_heads=8 of tiny; use 2 or 4"),
        (4, True, "TP=4 does not divide num_key_value_heads=2 of tiny; use 2"),
        (4, False, "TP=4 does not divide vocab_size=98 of tiny; use a divisor"),  # two ranks share a key head
        (8, False, "TP=8 does not divide intermediate_size=36 of tiny; use a divisor"),
    ],
)
def test_tensor_parallel_sizes_divide_the_model(size, embedded, message):
    assert list(width_refusals(SPEC, "TP", size, embedded=embedded)) == ([message] if message else [])


def test_a_tensor_parallel_size_that_is_proposed_divides_a_node():
    twelve_heads = replace(SPEC, num_attention_heads=12)
    (message,) = width_refusals(twelve_heads, "TP", 8, per_node=8)
    assert message == "TP=8 does not divide num_attention_heads=12 of tiny; use 4"  # 6 would not


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(pipeline=3), [2, 2, 2]),
        (Layout(pipeline=4, first_stage_layers=1, last_stage_layers=1), [1, 2, 2, 1]),
        (Layout(pipeline=2, first_stage_layers=5), [5, 1]),
        (Layout(pipeline=4), None),
        (Layout(pipeline=3, first_stage_layers=1), None),
        (Layout(pipeline=2, first_stage_layers=6), None),
    ],
)
def test_stages_share_all_layers(layout, layers):
    refused = list(stage_refusals(SPEC, layout))
    assert bool(refused) == (layers is None)
    if layers is not None:
        assert layout.stage_layers(SPEC.num_layers) == layers


@pytest.mark.parametrize("expert", [1, 2])
def test_experts_under_tensor_parallelism_need_sequence_parallelism(expert):
    experts = replace(SPEC, num_experts=4, num_experts_per_token=2)
    (message,) = expert_refusals(experts, Layout(tensor=2, expert=expert))
    assert message.startswith(
        "policy.megatron_cfg.sequence_parallel=false with tensor_model_parallel_size=2: megatron-core"
    )
    assert message.endswith("set it to true")
    assert not list(expert_refusals(experts, Layout(tensor=2, expert=expert, sequence_parallel=True)))
    assert not list(expert_refusals(experts, Layout(expert=expert)))
    assert not list(expert_refusals(SPEC, Layout(tensor=2)))
