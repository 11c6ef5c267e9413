"""The planner's parameter counts against the tensors that megatron-core builds on each rank.

One process poses as any rank of a world: megatron-core builds its part of the model before it communicates.
"""

from dataclasses import replace
from typing import Any

import pytest
from ranks import run_ranks
from small_models import small_config

from nemo_grpo.models import ModelSpec, read_spec
from nemo_grpo.plan.inputs import PRESETS
from nemo_grpo.plan.parameters import stage_counts
from nemo_grpo.recipe.layout import Layout

CASES = {
    "tied, a copy on the last stage": ("Qwen/Qwen2.5-1.5B", Layout(tensor=2, pipeline=2), 4),
    "fewer key heads than ranks": ("Qwen/Qwen2.5-1.5B", Layout(tensor=4), 4),
    "untied": ("Qwen/Qwen2.5-7B", Layout(tensor=4, pipeline=2), 8),
    "normed heads, uneven stages": (
        "Qwen/Qwen3-4B",
        Layout(tensor=2, pipeline=4, first_stage_layers=1, last_stage_layers=3),
        8,
    ),
    "experts": ("Qwen/Qwen3-30B-A3B", Layout(tensor=2, pipeline=2, expert=8), 16),
    "split experts": ("Qwen/Qwen3-30B-A3B", Layout(tensor=2, expert=4, expert_tensor=2), 8),
}


NUM_LAYERS = 8
"""Instead of the model's, for speed."""


def shortened(name: str) -> ModelSpec:
    return replace(PRESETS[name], num_layers=NUM_LAYERS)


def built_parameters(name: str, layout: Layout, world_size: int) -> list[int]:
    """Parameters of the first rank of each pipeline stage."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nemo_grpo.engine.megatron import cpu
    from nemo_grpo.engine.megatron.optimizer import install_adam

    cpu.install()
    install_adam()
    counts = []
    for stage in range(layout.pipeline):
        rank = stage * (world_size // layout.pipeline)
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        model = _model(shortened(name), layout, stage)
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return counts


def _model(shape: ModelSpec, layout: Layout, stage: int) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from nemo_grpo.engine.megatron.model import transformer_config

    fields = {
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }
    if shape.num_experts:
        fields |= {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": shape.num_experts_per_token,
            "moe_ffn_hidden_size": shape.ffn_size,
        }
    config = transformer_config(shape, layout, torch.bfloat16, **fields)
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=shape.vocab_size,
        max_sequence_length=64,
        pre_process=stage == 0,
        post_process=stage == layout.pipeline - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
    )


@pytest.mark.parametrize(("name", "layout", "world_size"), CASES.values(), ids=CASES)
def test_stage_counts_are_megatrons(name, layout, world_size):
    (built,) = run_ranks(1, built_parameters, name, layout, world_size)
    counted = [stage_counts(shortened(name), layout, stage).total for stage in range(layout.pipeline)]
    assert counted == built


def optimizer_state_bytes() -> int:
    """FP32 parameters and moments on this rank, after a BF16 update by the distributed optimizer."""
    import torch
    from toy_policies import SETTINGS, hf_model, policy_of, train

    assert SETTINGS.use_distributed_optimizer
    policy = policy_of(hf_model("qwen2"), dtype=torch.bfloat16)
    train(policy, variant="gpg")
    tensors = []
    for chained in policy.optimizer.chained_optimizers:
        adam = chained.optimizer
        for main in (parameter for group in adam.param_groups for parameter in group["params"]):
            tensors += [main, adam.state[main]["exp_avg"], adam.state[main]["exp_avg_sq"]]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_optimizer_state_of_two_ranks_is_what_the_planner_counts():
    total = stage_counts(read_spec(small_config("qwen2").to_dict()), Layout(), 0).total
    held = run_ranks(2, optimizer_state_bytes)
    assert sum(held) == 12 * total
    assert max(held) < 0.6 * 12 * total, "sharded, to within a bucket's padding"
