"""Keys of config.json that are missing, null or stated: read as transformers reads them, family by family."""

import dataclasses
from itertools import product

import pytest
import transformers
from conv_models import CONFIGS
from small_models import EXPERTS, GEMMA, GLM, GPT_OSS, LATENT, QWEN3_5, SIZES

from checkpoints_conv.formats.dtypes import DTYPES
from checkpoints_conv.run_config import lost_settings, model_section
from nemo_grpo import UserError
from nemo_grpo.models import family_for, read_spec

MISSING = object()
SIZES_OF = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": EXPERTS,
    "gemma3_text": GEMMA,
    "deepseek_v3": LATENT,
    "glm4_moe": GLM,
    "gpt_oss": {**GPT_OSS, "max_position_embeddings": 64},
    "qwen3_5_text": QWEN3_5,
}
"""Model type -> sizes beside the common ones."""
SLIDING, FULL = "sliding_attention", "full_attention"
FORMS = [
    dict(zip(("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), form, strict=True))
    for form in product(
        (MISSING, None, 8, 64),
        (MISSING, False, True),
        (MISSING, 1, 2),
        (MISSING, [FULL, FULL], [SLIDING, FULL], [SLIDING, SLIDING]),
    )
]
WIDE = {"max_position_embeddings": 8192}
"""Longer than transformers' own default of a window."""


def window_of(config):
    """The window of those layers that have one, by transformers' configuration.

    A key that the class does not declare is kept, and no model reads it: Mistral's ``layer_types``, Llama's
    ``sliding_window``.
    """
    declared = {field.name for field in dataclasses.fields(config)}
    window = config.sliding_window if "sliding_window" in declared else None
    if "layer_types" in declared and SLIDING not in (config.layer_types or ()):
        return None
    return window if window is not None and window < config.max_position_embeddings else None


@pytest.mark.parametrize("model_type", SIZES_OF)
def test_sliding_window_is_read_as_transformers_reads_it(model_type):
    """144 forms; those that transformers refuses are left out."""
    compared = set()
    for form, length in product(FORMS, ({}, WIDE)):
        stated = {key: value for key, value in form.items() if value is not MISSING}
        config = SIZES | SIZES_OF[model_type]
        config.pop("sliding_window", None)
        config |= {"model_type": model_type} | length | stated
        try:
            expected = window_of(transformers.AutoConfig.for_model(**config))
        except Exception:
            continue
        assert read_spec(config).sliding_window == expected, stated
        compared.add(expected)
    with_default = {"qwen3_moe", "qwen2", "qwen3", "mistral", "gemma3_text"}
    if model_type in with_default:
        assert compared == {None, 8, 64, 4096}
    else:
        assert compared == ({None, 8, 64, 128} if model_type == "gpt_oss" else {None})


SEEN_IN_SHAPES = {
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "q_lora_rank",
    "first_k_dense_replace",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
}
"""Sizes: the tensors of a model of other sizes are refused."""


def settings_of(config):
    family = family_for(config)
    return model_section(family, DTYPES["float32"]), lost_settings(family)


def test_a_key_that_config_json_lacks_has_transformers_default(family_name):
    """run_config.yaml is that of transformers' own config, or config.json is refused."""
    full = CONFIGS[family_name]().to_dict()
    compared = set()
    for key in full.keys() - SEEN_IN_SHAPES - {"model_type"}:
        lacking = {name: value for name, value in full.items() if name != key}
        try:
            found = settings_of(lacking)
        except UserError:
            continue
        whole = transformers.AutoConfig.for_model(**lacking).to_dict()
        assert found == settings_of(whole | {"architectures": full["architectures"]}), key
        compared.add(key)
    assert len(compared) > 10


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_soft_capping_of_gemma_3_is_named_as_lost(key):
    config = CONFIGS["gemma3"]().to_dict()
    assert lost_settings(family_for(config)) == []
    assert lost_settings(family_for(config | {key: 30.0})) == [f"{key} 30"]


@pytest.mark.parametrize(
    ("name", "remedy"), [("gemma3", "Gemma 3 needs one"), ("gpt-oss", "gpt-oss needs one")]
)
def test_a_model_of_windows_without_a_window_is_refused(name, remedy):
    config = CONFIGS[name]().to_dict() | {"sliding_window": None}
    with pytest.raises(UserError, match=f"sliding_window=None, and {remedy}; download it again"):
        family_for(config)
    del config["sliding_window"]
    assert family_for(config).settings["window_size"] == {"gemma3": 4096, "gpt-oss": [127, 0]}[name]
