"""A model, a GPU and constants with which a step's time can be worked out by hand."""

from dataclasses import replace

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.hardware import Efficiency, Hardware
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.lengths import Lengths
from nemo_grpo.plan.scenario import Scenario, Workload
from nemo_grpo.recipe.layout import Layout

SMALL = ModelSpec(
    name="small", model_type="llama", hidden_size=8, num_layers=4, num_attention_heads=4, head_dim=2,
    num_key_value_heads=2, ffn_size=16, vocab_size=100, max_position_embeddings=64, tied_embeddings=False,
)  # fmt: skip
# one layer: qkv 8 x (8 + 2 x 4) = 128, proj 64, gate, up and down 3 x 8 x 16 = 384
MATRICES = 128 + 64 + 384
# the model: of each layer two norms of 8 too; the last norm; embedding and output matrix 100 x 8
PARAMETERS = 4 * (MATRICES + 16) + 8 + 2 * 800

EXPERTS = replace(SMALL, num_experts=4, num_experts_per_token=2)
# one layer: attention 192, router 4 x 8 = 32, and of one expert 3 x 8 x 16 = 384

PEAK = 1e6
GPU = Hardware(
    memory_bytes=80e9, bf16_flops=PEAK, fp8_flops=2 * PEAK, memory_bandwidth=1e5,
    nvlink_bandwidth=1e4, network_bandwidth=1e3, host_bandwidth=1e3, nvlink_domain=8,
)  # fmt: skip
ZERO = ("layer", "expert_layer", "decode", "hop", "far_hop", "tensor", "refit", "step", "sample")
FREE = Efficiency(matrix=1.0, grouped=1.0, memory=1.0, link=1.0, routes=1.0, **dict.fromkeys(ZERO, 0.0))
"""Peaks are reached, and nothing has a fixed time."""

SETUP = PlanInput(
    layout=Layout(), num_nodes=1, gpus_per_node=1, num_rollout_gpus=0,
    train_tokens=20, score_tokens=20, num_microbatches=4, max_length=20, recompute=(), logprob_chunk=0,
    grad_bytes=2, optimizer="adam", distributed_optimizer=True, precision_aware=True, offload_fraction=0.0,
    lora_dim=0, lora_modules=(), fp8_training=False, fp8_recipe="",
    vllm_tensor=1, vllm_pipeline=1, vllm_fp8=False, vllm_cache_bytes=2, vllm_share=0.9, has_rollouts=True,
)  # fmt: skip
LENGTHS = Lengths(prompt=4, responses=(6.0, 6.0), limit=6)
WORK = Workload(num_samples=8, group_size=4, num_updates=1, lengths=LENGTHS, scoring_passes=1)
CASE = Scenario(SMALL, SETUP, WORK, GPU, FREE)
