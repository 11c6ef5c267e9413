"""The parts of the memory model against numbers worked out by hand."""

from dataclasses import replace

import pytest
from unit.plan import toys

from nemo_grpo.plan import memory, rollout_memory
from nemo_grpo.plan.inputs import PRESETS
from nemo_grpo.plan.parameters import (
    adapter_counts,
    attention_sizes,
    layer_counts,
    model_parameters,
    stage_counts,
)
from nemo_grpo.plan.training_time import model_flops
from nemo_grpo.recipe.layout import Layout

SMALL = replace(toys.SMALL, tied_embeddings=True, has_qkv_bias=True)
EXPERTS = replace(toys.EXPERTS, has_qk_norm=True)
SETUP = replace(toys.SETUP, gpus_per_node=8, train_tokens=10, max_length=10, vllm_share=0.5)
# one layer of SMALL: qkv 8 x (8 + 2 x 4) + 16 = 144, proj 8 x 8 = 64, gate, up and down 3 x 8 x 16 = 384
LINEAR = 144 + 64 + 384
# the model: of each layer two norms of 8 too; the last norm; the embedding 100 x 8
TOTAL = 4 * LINEAR + 4 * 16 + 8 + 800

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name):
    assert model_parameters(PRESETS[name]) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("openai/gpt-oss-20b", 20.91, 0.005),
        ("zai-org/GLM-4.5-Air", 106.85, 0.005),
        ("Qwen/Qwen3.5-27B", 27, 0.4),
        ("Qwen/Qwen3.5-397B-A17B", 397, 0.4),
    ],
)
def test_preset_has_as_many_parameters_as_its_paper_says(name, billions, tolerance):
    assert model_parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, abs=tolerance)


def test_layer_is_divided_by_tensor_and_expert_parallelism_and_norms_are_not():
    counts = layer_counts(SMALL, Layout(tensor=2))
    assert (counts.linear, counts.replicated, counts.expert) == (LINEAR // 2, 16, 0)
    counts = layer_counts(EXPERTS, Layout(tensor=2, expert=2))
    # no biases: (8 x 16 + 64) / 2; norms 16, of heads 2 x 2, router 4 x 8; 2 of 4 experts of 3 x 8 x 16
    assert (counts.linear, counts.replicated, counts.expert) == (96, 16 + 4 + 32, 768)


def test_stages_hold_their_layers_and_the_ends():
    layout = Layout(pipeline=2, first_stage_layers=1)
    first, last = (stage_counts(SMALL, layout, stage) for stage in (0, 1))
    assert (first.linear, first.embedding) == (LINEAR, 800)
    assert (last.linear, last.embedding) == (3 * LINEAR, 800), "a copy of the tied embedding"
    assert last.replicated == 3 * 16 + 8
    assert stage_counts(SMALL, Layout(), 0).embedding == 800
    assert stage_counts(replace(SMALL, tied_embeddings=False), Layout(), 0).embedding == 1600


def test_adapters_are_low_rank_pairs_of_the_named_matrices():
    # dim 2 x (in + out): qkv 8 + 16, proj 8 + 8, fc1 8 + 32, fc2 16 + 8
    assert adapter_counts(SMALL, Layout(), 0, 2, ()).total == 4 * 2 * (24 + 16 + 40 + 24)
    assert adapter_counts(SMALL, Layout(tensor=2), 0, 2, ("linear_proj",)).total == 4 * 16


LORA = replace(SETUP, lora_dim=2, lora_modules=("linear_proj",))


def test_weights_are_in_bf16_with_fp8_copies():
    assert memory.weight_bytes(SMALL, SETUP, 0) == 2 * TOTAL
    assert memory.weight_bytes(SMALL, replace(SETUP, fp8_training=True), 0) == 2 * TOTAL + 2 * 4 * LINEAR
    assert memory.weight_bytes(SMALL, LORA, 0) == 2 * (TOTAL + 4 * 32)


def test_only_trained_parameters_have_gradients():
    assert memory.gradient_bytes(SMALL, replace(SETUP, grad_bytes=4), 0) == 4 * TOTAL
    assert memory.gradient_bytes(SMALL, LORA, 0) == 2 * 4 * 32


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 10),
        ({"precision_aware": False}, 16),
        ({"precision_aware": False, "grad_bytes": 4}, 12),
        ({"precision_aware": False, "optimizer": "sgd"}, 12),
        ({"precision_aware": False, "distributed_optimizer": False, "grad_bytes": 4}, 16),
    ],
)
def test_optimizer_bytes_per_parameter(changes, each):
    assert memory.optimizer_bytes_per_parameter(replace(SETUP, **changes)) == each


def test_optimizer_is_sharded_over_data_and_context_parallel_ranks():
    assert memory.optimizer_bytes(SMALL, SETUP, 0) == 10 * TOTAL // 8
    assert memory.optimizer_bytes(SMALL, replace(SETUP, offload_fraction=1.0), 0) == 0
    layout = Layout(tensor=2, context=2)  # 8 / 2 = 4 shards
    assert memory.optimizer_bytes(SMALL, replace(SETUP, layout=layout), 0) == pytest.approx(
        10 * stage_counts(SMALL, layout, 0).total / 4, abs=1
    )
    experts = replace(SETUP, layout=Layout(expert=4))  # an expert's state on 8 / 4 = 2 ranks
    counts = stage_counts(EXPERTS, Layout(expert=4), 0)
    assert memory.optimizer_bytes(EXPERTS, experts, 0) == 10 * counts.dense // 8 + 10 * counts.expert // 2


def test_activations_of_a_layer():
    # norms 8 x 8; q, k, v 2 x (8 + 2 x 4); attention 2 x 8 + 4 x 4; gate, up 4 x 16, product 2 x 16
    assert memory.layer_bytes_per_token(SMALL, SETUP) == 64 + 32 + 16 + 16 + 96
    split = replace(SETUP, layout=Layout(tensor=2))
    assert memory.layer_bytes_per_token(SMALL, split) == 64 + 160 / 2
    split = replace(SETUP, layout=Layout(tensor=2, sequence_parallel=True))
    assert memory.layer_bytes_per_token(SMALL, split) == 224 / 2
    assert memory.layer_bytes_per_token(SMALL, SETUP, ("mlp",)) == 128
    # no biases; norms on q and k 2 x (8 + 4); router 4 x 4; 2 chosen x (4 x 8 + 6 x 16)
    assert memory.layer_bytes_per_token(EXPERTS, SETUP) == 64 + 32 + 24 + 32 + 16 + 2 * 128


@pytest.mark.parametrize(("tensor", "expected"), [(1, 147_072), (2, 73_536), (4, 36_768), (8, 18_384)])
def test_tensor_ranks_share_the_activations_of_experts(tensor, expected):
    """Qwen3-30B-A3B: 16,384 norms, 10,240 q, k, v, 9,216 their norms, 8,320 attention, 512 router.

    8 chosen experts, each 4 x 2048 + 6 x 768: 102,400. megatron-core 0.16.1 saves half as much at TP 2 with
    sequence parallelism: of its MoE layer with 8 experts and top 4, 1,130,496 of 2,260,992 bytes.
    """
    split = replace(SETUP, layout=Layout(tensor=tensor, sequence_parallel=tensor > 1))
    found = memory.layer_bytes_per_token(PRESETS["Qwen/Qwen3-30B-A3B"], split)
    assert found == expected == 147_072 / tensor


def test_expert_tensor_parallelism_gathers_tokens_and_divides_the_width():
    """2 chosen: input and output 2 x 4 x 8 of two ranks' tokens, the width's 2 x 6 x 16 of one rank's."""
    layout = Layout(tensor=2, expert_tensor=2, sequence_parallel=True)
    alone = replace(SETUP, layout=replace(layout, expert_tensor=1))
    rest = memory.layer_bytes_per_token(EXPERTS, alone) - 2 * (4 * 8 + 6 * 16) / 2
    found = memory.layer_bytes_per_token(EXPERTS, replace(SETUP, layout=layout))
    assert found == rest + 2 * (4 * 8 * 2 + 6 * 16) / 2


def test_shared_experts_and_dense_first_layers_keep_activations():
    """A dense layer of width 40: 6 x 40 instead of router, chosen and shared experts; one of 4 layers."""
    shape = replace(EXPERTS, num_shared_experts=1, num_dense_layers=1, dense_ffn_size=40)
    attention = 64 + 32 + 24 + 32
    sparse = attention + 16 + 2 * 128 + 6 * 16
    dense = attention + 6 * 40
    assert memory.layer_bytes_per_token(shape, SETUP) == sparse
    assert memory.layer_bytes_per_token(shape, SETUP, ("shared_experts",)) == sparse - 6 * 16
    assert memory.layer_bytes_per_token(shape, SETUP, ("moe",)) == attention
    assert memory.layer_bytes_per_token(shape, SETUP, is_dense=True) == dense
    assert memory.activation_bytes(shape, SETUP, 0) == 10 * (dense + 3 * sparse)
    full = replace(SETUP, recompute=("full",))
    assert memory.activation_bytes(shape, full, 0) == 10 * (4 * 16 + sparse)
    first = replace(full, layout=Layout(pipeline=4))  # its one layer is the dense one
    assert memory.activation_bytes(shape, first, 0) == 10 * (4 * 16 + dense)
    halved = replace(SETUP, layout=Layout(tensor=2, sequence_parallel=True))
    assert memory.layer_bytes_per_token(shape, halved) == sparse / 2
    assert memory.layer_bytes_per_token(shape, halved, is_dense=True) == dense / 2


def test_activations_of_a_stage():
    assert memory.activation_bytes(SMALL, SETUP, 0) == 10 * 4 * 224
    assert memory.activation_bytes(SMALL, replace(SETUP, layout=Layout(context=2)), 0) == 5 * 4 * 224
    full = replace(SETUP, recompute=("full",))
    assert memory.activation_bytes(SMALL, full, 0) == 10 * (4 * 16 + 224)
    piped = replace(SETUP, layout=Layout(pipeline=2))
    assert memory.activation_bytes(SMALL, piped, 0) == 2 * 10 * 2 * 224, "two microbatches in flight"
    assert memory.activation_bytes(SMALL, piped, 1) == 10 * 2 * 224
    one = replace(piped, num_microbatches=1)
    assert memory.activation_bytes(SMALL, one, 0) == 10 * 2 * 224


def test_logits_are_on_the_last_stage():
    assert memory.logit_bytes(SMALL, SETUP, 0) == 14 * 10 * 100
    assert memory.logit_bytes(SMALL, SETUP, 0, scoring=True) == 10 * 20 * 100
    piped = replace(SETUP, layout=Layout(tensor=2, pipeline=2, context=2))
    assert memory.logit_bytes(SMALL, piped, 0) == 0
    assert memory.logit_bytes(SMALL, piped, 1) == 14 * 5 * 50
    assert memory.logit_bytes(SMALL, replace(SETUP, logprob_chunk=4), 0) == 100 * (6 * 10 + 12 * 4)


def test_rollouts_of_qwen_7b_on_one_gpu():
    shape = PRESETS["Qwen/Qwen2.5-7B"]
    # 28 layers x 2 x 4 key heads x 128 x 2 bytes
    assert rollout_memory.cache_bytes_per_token(shape, SETUP) == 57344
    assert rollout_memory.cache_bytes_per_token(shape, replace(SETUP, vllm_tensor=8)) == 57344 / 4, (
        "heads are copied"
    )
    # all but norms and biases: 28 x (3584 x (2 x 3584 + 2 x 512) + 3 x 3584 x 18944) + 2 x 152064 x 3584
    matrices = 28 * (3584 * 8192 + 3 * 3584 * 18944)
    ends = 2 * 152064 * 3584
    assert rollout_memory.rollout_weight_bytes(shape, SETUP) == 2 * (matrices + ends)
    assert rollout_memory.rollout_weight_bytes(shape, replace(SETUP, vllm_fp8=True)) == matrices + 2 * ends
    layer = matrices // shape.num_layers
    drafts = replace(SETUP, draft_tokens=3, draft_layers=1)
    assert rollout_memory.rollout_weight_bytes(shape, drafts) == 2 * (matrices + layer + ends)
    ngrams = replace(SETUP, draft_tokens=3, draft_layers=0)
    assert rollout_memory.rollout_weight_bytes(shape, ngrams) == rollout_memory.rollout_weight_bytes(
        shape, SETUP
    )
    room = rollout_memory.cache_bytes(shape, SETUP, 80 * memory.GIB)
    assert room == 40 * memory.GIB - 2 * (matrices + ends) - rollout_memory.VLLM_WORKSPACE


def test_latent_attention_by_hand():
    shape = replace(EXPERTS, has_qk_norm=False, query_rank=6, key_value_rank=5, rope_head_dim=1)
    # up: 4 heads x (2 + 1) x 6 and 4 x 2 x 2 x 5, out 4 x 2 x 8; down: 8 x (6 + 5 + 1), norms 6 + 5
    assert attention_sizes(shape) == (72 + 80 + 64, 96 + 11)
    assert rollout_memory.cache_bytes_per_token(shape, replace(SETUP, vllm_tensor=2)) == 4 * (5 + 1) * 2


def test_deepseek_has_671_billion_parameters_and_dense_layers_first():
    shape = PRESETS["deepseek-ai/DeepSeek-V3"]
    assert model_parameters(shape) == pytest.approx(671e9, rel=1e-3)
    # 37 billion are activated, its embedding of 0.93 among them
    assert model_flops(shape, 0) / 2 == pytest.approx(36.6e9, rel=0.01)
    layout = Layout(pipeline=16, expert=16, first_stage_layers=3, last_stage_layers=2)
    first, second = (stage_counts(shape, layout, stage) for stage in (0, 1))
    assert first.expert == 0
    # 4 layers of 16 experts each, 3 x 7168 x 2048
    assert second.expert == 4 * 16 * 3 * 7168 * 2048


def test_embedded_engine_by_hand():
    setup = replace(
        SETUP, embedded=True, precision_bytes=4, keeps_reference=True, distributed_optimizer=False
    )
    parts = memory.training_bytes(SMALL, setup, 0)
    assert parts["weights"] == parts["reference"] == parts["sampler"] == parts["gradients"] == 4 * TOTAL
    assert parts["optimizer"] == 8 * TOTAL
    # 10 tokens, 4 layers, FP32: 4 x 8 + 3 x (8 + 4) + 5 x 16, and the heap's share
    assert parts["activations"] == int(1.6 * 10 * 4 * 4 * (32 + 36 + 80))
    # logits and their gradient of all tokens, and the output matrix's gradient; 8 tokens of a large V
    assert parts["logits"] == 100 * (2 * 4 * 10 + 4 * 8)
    assert memory.scoring_bytes(SMALL, setup, 0) == sum(parts.values()) - parts["activations"]
    wide = replace(SMALL, vocab_size=2**22)
    assert memory.training_bytes(wide, setup, 0)["logits"] == 2**22 * (2 * 4 * 8 + 4 * 8)
    assert memory.training_bytes(SMALL, replace(setup, lora_dim=2), 0)["logits"] == 100 * 2 * 4 * 10
    half = memory.training_bytes(SMALL, replace(setup, precision_bytes=2, keeps_reference=False), 0)
    assert (half["weights"], half["reference"], half["optimizer"]) == (2 * TOTAL, 0, 12 * TOTAL)
