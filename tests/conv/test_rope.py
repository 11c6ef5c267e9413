"""Rotary parameters: every form of config.json means what it means to transformers."""

import copy

import pytest
import transformers
from small_models import FAMILIES, LLAMA3_ROPE, MROPE, SIZES, YARN, small_config

from nemo_grpo import UserError
from nemo_grpo.models import family_for, read_spec

MAKERS = {name: lambda name=name: small_config(name) for name in FAMILIES if name != "gemma3"} | {
    "qwen2-vl": lambda: transformers.Qwen2VLConfig(text_config=SIZES, vision_config={"depth": 1}),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**SIZES),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(**SIZES),
}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 4.0}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FORMS = {
    "nothing": {},
    "theta": {"rope_theta": 12.5},
    "null": {"rope_scaling": None, "rope_theta": 7.0},
    "empty": {"rope_scaling": {}, "rope_parameters": PLAIN},
    "new": {"rope_parameters": YARN},
    "old": {"rope_scaling": OLD_YARN, "rope_theta": 5e5},
    "old_without_theta": {"rope_scaling": LINEAR},
    "beside_with_theta": {"rope_parameters": PLAIN, "rope_scaling": OLD_YARN, "rope_theta": 3e4},
    "beside_scaled": {"rope_parameters": LLAMA3_ROPE, "rope_scaling": {**LINEAR, "rope_theta": 9.0}},
    "default_beside": {"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}},
    "two_kinds": {"rope_scaling": {**LINEAR, "type": "yarn"}},
    "no_length": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 48},
    "share_within": {
        "partial_rotary_factor": 0.25,
        "rope_scaling": {**LINEAR, "partial_rotary_factor": 0.75},
    },
}
SECTIONS = {
    "sections": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    "sections_beside": {"rope_parameters": MROPE, "rope_scaling": OLD_YARN | {"mrope_section": [2, 1, 1]}},
}
NESTED = {"full_attention": PLAIN, "sliding_attention": {"rope_type": "default", "rope_theta": 9e3}}
OF_GEMMA = {name: form for name, form in FORMS.items() if "rope_parameters" not in form} | {
    "new": {"rope_parameters": NESTED},
    "beside": {"rope_parameters": NESTED, "rope_scaling": LINEAR},
    "beside_with_theta": {"rope_parameters": NESTED, "rope_scaling": OLD_YARN | {"rope_theta": 8.0}},
    "one_kind": {"rope_parameters": {"full_attention": {"factor": 2.0}}, "rope_scaling": {"type": "linear"}},
    "local_theta": {"rope_theta": 5e5, "rope_local_base_freq": 5e3},
    "flat": {"rope_parameters": PLAIN},
}
CASES = [(name, form) for name in MAKERS for form in FORMS.values()]
CASES += [(name, {"partial_rotary_factor": 0.25}) for name in ("llama3-rope", "glm-4.5", "qwen3")]
CASES += [
    (name, form) for name in ("qwen2-vl", "qwen2.5-vl", "qwen2.5-vl-tied") for form in SECTIONS.values()
]


def config_json(config, form):
    """A model's config.json with rotary parameters in one form, without nulls of its own."""
    given = {key: value for key, value in config.to_dict().items() if value is not None}
    text = given.get("text_config", given)
    del text["rope_parameters"]
    text.update(copy.deepcopy(form))
    return given


def of_transformers(given):
    return transformers.AutoConfig.for_model(**copy.deepcopy(given)).get_text_config().rope_parameters


@pytest.mark.parametrize(("name", "form"), CASES)
def test_rotary_parameters_are_transformers(name, form):
    given = config_json(MAKERS[name](), form)
    assert read_spec(given).rope == of_transformers(given)


@pytest.mark.parametrize("form", OF_GEMMA.values(), ids=OF_GEMMA)
def test_gemmas_two_kinds_of_layers_are_transformers(form):
    given = config_json(small_config("gemma3", num_hidden_layers=6), form)
    theirs, family = of_transformers(given), family_for(given)
    everywhere, nearby = theirs["full_attention"], theirs["sliding_attention"]
    assert family.spec.rope == everywhere
    assert family.settings["rotary_base"] == [nearby["rope_theta"], everywhere["rope_theta"]]
    factor = everywhere["factor"] if everywhere["rope_type"] == "linear" else 1.0
    assert family.settings["rope_scaling_factor"] == factor


def test_gpt_oss_is_recognised_by_the_scaling_that_transformers_computes():
    stated = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    given = config_json(small_config("gpt-oss"), {"rope_scaling": stated | {"truncate": False}})
    assert family_for(given).settings["yarn_beta_fast"] == 32.0
    with pytest.raises(UserError, match="truncate=True is not gpt-oss's False"):
        family_for(config_json(small_config("gpt-oss"), {"rope_scaling": stated}))


@pytest.mark.parametrize("beside", [{}, {"rope_parameters": {**YARN, "factor": 40.0}}])
def test_settings_for_megatron_have_the_scaling_that_transformers_computes(beside):
    given = config_json(small_config("deepseek-v3"), {**beside, "rope_scaling": {**YARN, "factor": 3.0}})
    assert family_for(given).settings["rotary_scaling_factor"] == 3.0
    given = config_json(small_config("qwen2.5-vl"), {**SECTIONS["sections_beside"]})
    assert family_for(given).settings["mrope_section"] == [2, 1, 1]
    share = {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}, "rope_scaling": LINEAR}
    assert family_for(config_json(small_config("glm-4.5"), share)).settings["rotary_percent"] == 0.5
