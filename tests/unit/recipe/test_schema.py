"""NeMo-RL's types of the keys that have none here."""

import pytest

from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.schema import HEAD, V0_7_0, entries, lacking, recorded, type_errors
from nemo_grpo.support.errors import UserError

WRONG = [
    ("grpo.calculate_advantages_on_gpu=1", "=1 is an integer; it must be true or false"),
    ("grpo.val_start_at=x", '="x" is a text; it must be an integer'),
    ("grpo.val_start_at=null", "=null is null; it must be an integer"),
    ("grpo.val_start_at={a: 1}", '={"a": 1} is a section; it must be an integer'),
    ("grpo.advantage_clip_low=[1]", r"=\[1\] is a list; it must be a number or null"),
    ("policy.quant_cfg=2.5", "=2.5 is a float; it must be null or a text"),
    ("policy.sequence_packing.microbatch_order=x", '="x" must be one of packer, largest_first'),
    ("policy.generation.refit_cfg=7", "=7 is an integer; it must be null or a section of keys"),
    ("policy.generation.refit_cfg={nixl: {device: 7}}", "=7 is an integer; it must be a text"),
    ("reward_penalties.token_ids.unwanted=5", "=5 is an integer; it must be a list or null"),
]


@pytest.mark.parametrize(("override", "message"), WRONG)
@pytest.mark.parametrize("recipe", ["quickstart", "cluster-quickstart"])
def test_wrong_type_is_refused_with_key_value_and_type(recipe, override, message):
    with pytest.raises(UserError, match=message) as raised:
        load_recipe(recipe, [f"++{override}"])
    assert override.partition("=")[0] in str(raised.value)


@pytest.mark.parametrize(
    "override",
    [
        "grpo.val_start_at=3",
        "grpo.advantage_clip_low=-1",
        "policy.sequence_packing.microbatch_order=largest_first",
        "policy.generation.vllm_kwargs={max_num_seqs: 8, anything: [1, {a: x}]}",
        "policy.megatron_cfg.model_overrides={any_field_of_megatron: {a: 1}}",
        "policy.scheduler=[{name: x}]",
        "data.default={anything: 1}",
        "env={mine: {a: 1}}",
    ],
)
def test_value_of_the_type_and_what_is_handed_on_pass(override):
    load_recipe("cluster-quickstart", [f"++{override}"])


def test_type_of_either_version_is_accepted():
    key = next(
        key for key, found in entries().items()
        if len(found) == 2 and all("types" in e for e in found) and found[0]["types"] != found[1]["types"]
    )  # fmt: skip
    values = {"null": None, "str": "x", "int": 1, "float": 0.5, "list": [], "dict": {"a": 1}}
    differ = {*entries()[key][0]["types"]} ^ {*entries()[key][1]["types"]}
    tried = [values[kind] for kind in differ if kind in values]
    assert tried
    assert [error for value in tried for error in type_errors({key: value}, ())] == []


def test_what_an_older_nemo_rl_lacks_is_what_asks_for_something_newer():
    assert "grpo.val_start_at" in recorded(HEAD).keys() - recorded(V0_7_0).keys()
    settings = {
        "grpo": {"val_start_at": 7, "val_num_generations_per_prompt": 1, "num_prompts_per_step": 8},
        "policy": {"is_vlm": False, "megatron_cfg": {"model_overrides": {}, "offload_modules": None}},
    }
    assert list(lacking(V0_7_0, settings)) == [("grpo.val_start_at", 7)]
    settings["policy"]["megatron_cfg"]["model_overrides"] = {"any_field": 1}
    assert ("policy.megatron_cfg.model_overrides.any_field", 1) in lacking(V0_7_0, settings)
    assert list(lacking(HEAD, settings)) == []
