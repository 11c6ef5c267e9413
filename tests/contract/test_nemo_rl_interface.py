"""The NeMo-RL adapter fits the recorded interfaces of both tested versions; runs without NeMo-RL.

The records are written by scripts/record_nemo_rl.py.
"""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_grpo.nemorl import compat, doctor
from nemo_grpo.nemorl.host_api import GRPO, HOST_API, LOSS_KEYS, SFT, TESTED
from nemo_grpo.nemorl.sft import SETUP_RESULT
from nemo_grpo.nemorl.static_api import Tree
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


def adapter():
    return [(path, ast.parse(path.read_text())) for path in sorted(ADAPTER.rglob("*.py"))]


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
    assert found == {("tensor_pickles.py", "torch.storage._load_from_bytes")}


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
