"""The NeMo-RL adapter fits the recorded interfaces of both tested versions; runs without NeMo-RL.

The records are written by scripts/record_nemo_rl.py.
"""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_grpo.nemorl import compat, doctor, host_api
from nemo_grpo.nemorl.config import sft_section
from nemo_grpo.nemorl.host_api import ELSEWHERE, GRPO, HOST_API, LOSS_KEYS, POLICY, SFT, TESTED
from nemo_grpo.nemorl.sft import SETUP_RESULT
from nemo_grpo.nemorl.static_api import Tree, misfit, shape
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.dotted import value_of
from nemo_grpo.variants.base import RatioConfig

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "nemo_grpo" / "nemorl"
OURS_ALONE = {
    *("variant", "aggregation", "max_response_length", "advantage_eps", "normalize_rewards"),
    *("use_leave_one_out_baseline", "kl_score_function_gradient"),
}
"""Keys of every ratio variant that NeMo-RL's loss does not have, or has elsewhere."""
VERSIONS = list(TESTED)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tested_version_is_supported_and_nothing_is_missing_from_its_record(version):
    found = doctor.diagnose(doctor.recorded(version))
    assert found.verdict == "supported", found.differences
    assert found.like == version
    expected = {key for key, name in HOST_API.items() if version in name.versions}
    assert expected <= set(doctor.recorded(version))


@pytest.mark.parametrize("version", VERSIONS)
def test_setup_returns_what_is_unpacked_and_trainers_take_it_in_that_order(version):
    record, ours = doctor.recorded(version), compat.Parts._fields
    returned = record[f"{GRPO}:setup"]["returns"]
    pairs = zip(returned, ours, strict=True)
    assert all(name == "_" or name.removesuffix("_actor") == field for name, field in pairs)
    assert len(record[f"{SFT}:setup"]["returns"]) == len(SETUP_RESULT)
    given = [
        *("policy", "policy_generation", "dataloader", "val_dataloader", "tokenizer", "loss_fn"),
        *("task_to_env", "val_task_to_env", "logger", "checkpointer", "grpo_save_state", "master_config"),
    ]
    for trainer in ("grpo_train", "async_grpo_train"):
        taken = record[f"{GRPO}:{trainer}"]["parameters"]
        assert [name.removeprefix("wrapped_") for name in taken[: len(given)]] == given


def test_keys_of_our_losses_mean_the_same_to_nemo_rl():
    assert set(RatioConfig.model_fields) - OURS_ALONE == set(LOSS_KEYS)


def test_the_supervised_section_is_the_recorded_call():
    recipe = load_recipe(ROOT / "recipes/erpo/sft-qwen2.5-7b-1n8g.yaml")
    call = HOST_API[f"{SFT}:SFTConfig"].call
    assert call == f"({', '.join(f'{name}=_' for name in sft_section(recipe))})"


def adapter():
    return [(path, ast.parse(path.read_text())) for path in sorted(ADAPTER.glob("*.py"))]


def called_name(call):
    """NAME of a call of ``compat.import_name(NAME)(...)``; None for other calls, or if it is no constant."""
    function = getattr(call, "func", None)
    if not isinstance(function, ast.Call) or not ast.unparse(function.func).endswith("import_name"):
        return None
    known = vars(host_api) | {"host_api": host_api, "_ENVIRONMENTS": "nemo_rl.environments"}
    try:
        return str(eval(ast.unparse(function.args[0]), known))
    except NameError:
        return None


THROUGH_VARIABLES = {
    *(f"{GRPO}:{trainer}" for trainer in ("grpo_train", "async_grpo_train")),
    *(f"{SFT}:SFTConfig", POLICY, "nemo_rl.environments.interfaces:EnvironmentReturn"),
    *("nemo_rl.algorithms.utils:get_tokenizer", "nemo_rl.utils.venvs:create_local_venv_on_each_node"),
    *("nemo_rl.data.processors:vlm_hf_data_processor", "nemo_rl.data.utils:setup_response_data"),
    *(name.name for name in HOST_API.values() if name.part in ELSEWHERE),
}
"""Names whose calls in the sources are not of that form."""


def test_every_call_of_a_name_is_recorded_as_it_is_made():
    calls = {name.name: name.call for name in HOST_API.values() if name.call}
    seen = set()
    for path, tree in adapter():
        for node in ast.walk(tree):
            if name := called_name(node):
                seen.add(name)
                assert misfit(as_parameters(calls[name]), shape(node)) == "", (path.name, name)
    assert set(calls) - seen <= THROUGH_VARIABLES


def as_parameters(call):
    """Parameters that take a call of the table and nothing else."""
    words = [word.strip() for word in call.strip("()").split(",") if word.strip()]
    positional = [f"p{place}=" for place, word in enumerate(words) if word == "_"]
    named = [f"{word.partition('=')[0]}=" for word in words if "=" in word]
    return [*positional, *["/"] * bool(positional), *["*"] * bool(named), *named]


def test_nothing_of_nemo_rl_is_rebound_outside_the_table():
    """No ``setattr`` and no assignment to another module's attribute, but in `compat.rebind`."""
    found = set()
    for path, tree in adapter():
        nodes = list(ast.walk(tree))
        imported = [a for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names]
        modules = {alias.asname or alias.name for alias in imported}
        targets = [target for node in nodes for target in getattr(node, "targets", [])]
        names = [ast.unparse(target) for target in targets if isinstance(target, ast.Attribute)]
        found |= {(path.name, name) for name in names if name.partition(".")[0] in modules}
        calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        assert path.name == "compat.py" or "setattr" not in calls
    assert found == {("compat.py", "torch.storage._load_from_bytes")}


def test_all_of_ours_is_there():
    package = Tree(ROOT, "nemo_grpo")
    for key, name in HOST_API.items():
        assert not name.ours or package.find(name.ours) is not None, key


def test_names_are_rebound_only_where_a_feature_needs_it():
    rebound = {
        ast.literal_eval(node.args[0])
        for path, tree in adapter()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in ("rebind", "rebound")
        and isinstance(node.args[0], ast.Constant)
    }
    assert rebound == {key for key, name in HOST_API.items() if name.how in ("replaced", "wrapped")}


def test_values_are_read_from_dictionaries_and_objects():
    configs = {"grpo": {"a": 1}}, SimpleNamespace(grpo={"a": 1}), {"grpo": None}
    assert [value_of(config, "grpo.a", 7) for config in configs] == [1, 1, 7]
