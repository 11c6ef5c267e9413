"""Models with linear attention: counted as transformers builds them, by the kind of each layer."""

import pytest
import torch
import transformers
from unit.plan.toys import SETUP

from nemo_grpo.models import family_for, read_spec
from nemo_grpo.plan.parameters import mixer_sizes, model_parameters, stage_counts
from nemo_grpo.plan.rollout_memory import cache_bytes_per_token
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.support.errors import UserError

TEXT = {
    "vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6, "head_dim": 10,
    "num_attention_heads": 6, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 7,
    "linear_num_value_heads": 4, "linear_value_head_dim": 9, "linear_conv_kernel_dim": 3,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 20, "intermediate_size": 28, "num_heads": 2, "out_hidden_size": 24,
    "patch_size": 4, "num_position_embeddings": 9, "in_channels": 3, "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}  # fmt: skip


def configuration(*, with_experts, with_vision):
    kind = "Moe" if with_experts else ""
    text = TEXT | (EXPERTS if with_experts else {})
    if not with_vision:
        return getattr(transformers, f"Qwen3_5{kind}TextConfig")(**text)
    return getattr(transformers, f"Qwen3_5{kind}Config")(text_config=text, vision_config=VISION)


@pytest.mark.parametrize(("with_experts", "with_vision"), [(False, True), (True, False)])
def test_parameters_are_those_of_transformers(with_experts, with_vision):
    config = configuration(with_experts=with_experts, with_vision=with_vision)
    auto = transformers.AutoModelForImageTextToText if with_vision else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert model_parameters(read_spec(config.to_dict())) == expected


@pytest.fixture
def shape():
    return read_spec(configuration(with_experts=False, with_vision=False).to_dict())


def test_a_stage_has_the_layers_that_are_its_own(shape):
    """Layers 0 1 2 4 5 are linear, 3 is not: a stage of three linear ones, and one of two with attention."""
    assert shape.linear_layers == (0, 1, 2, 4, 5)
    first, second = (stage_counts(shape, Layout(pipeline=2), stage) for stage in (0, 1))
    # h (2 key + 3 value + 2 heads) + (2 key + value) kernel + 2 heads; key 14, value 36
    linear = 24 * (28 + 108 + 8) + (28 + 36) * 3 + 8
    attention = 24 * (60 + 40) + 2 * 60 * 24  # queries, keys, values; gate and output
    mlp = 3 * 24 * 40
    assert first.linear == 3 * (linear + mlp)
    assert second.linear == 2 * (linear + mlp) + attention + mlp
    assert mixer_sizes(shape)[0] == pytest.approx((5 * linear + attention) / 6)
    # only attention caches tokens
    assert cache_bytes_per_token(shape, SETUP) == pytest.approx(1 * 2 * 2 * 10 * SETUP.vllm_cache_bytes)


def test_converters_say_that_they_leave_out_the_vision_tower():
    config = configuration(with_experts=True, with_vision=True).to_dict()
    with pytest.raises(UserError, match="its vision tower is planned, but not converted"):
        family_for(config)
