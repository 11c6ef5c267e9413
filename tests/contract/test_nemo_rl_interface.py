"""The NeMo-RL adapter rebinds only names of its table, and shares loss keys with NeMo-RL; without NeMo-RL."""

import ast
from pathlib import Path
from types import SimpleNamespace

from nemo_grpo.nemorl.host_api import REBOUND
from nemo_grpo.support.dotted import value_of
from nemo_grpo.variants.base import RatioConfig
from nemo_grpo.variants.nemo_rl_loss import NeMoRLLoss

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "nemo_grpo" / "nemorl"
OURS_ALONE = {
    *("variant", "aggregation", "max_response_length", "advantage_eps", "normalize_rewards"),
    *("use_leave_one_out_baseline", "kl_score_function_gradient"),
}
"""Keys of every ratio variant that NeMo-RL's loss does not have, or has elsewhere."""


def test_keys_of_our_losses_mean_the_same_to_nemo_rl():
    assert set(RatioConfig.model_fields) - OURS_ALONE <= set(NeMoRLLoss.keys())


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


def test_names_are_rebound_only_where_a_feature_needs_it():
    rebound = {
        ast.literal_eval(node.args[0])
        for path, tree in adapter()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in ("rebind", "rebound")
        and isinstance(node.args[0], ast.Constant)
    }
    assert rebound == set(REBOUND)


def test_values_are_read_from_dictionaries_and_objects():
    configs = {"grpo": {"a": 1}}, SimpleNamespace(grpo={"a": 1}), {"grpo": None}
    assert [value_of(config, "grpo.a", 7) for config in configs] == [1, 1, 7]
