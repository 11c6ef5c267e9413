import json

import pytest
from typer.testing import CliRunner
from unit.launch.shell import write_programs

from nemo_grpo.cli import app
from nemo_grpo.launch import node_facts
from nemo_grpo.launch.preflight import Job, check_job
from nemo_grpo.recipe import load_recipe
from nemo_grpo.run.recipe_checks import missing_files

RECIPE = "cw_grpo/cw_grpo-qwen2.5-math-7b-instruct-1n8g"
"""One node of eight GPUs."""
GIB = 1 << 30


HEALTHY = {
    "gpus": ["NVIDIA H100 80GB HBM3"] * 8,
    "versions": {"ray": "2.55"},
}


def facts(node="n1", **changes):
    return {"node": node, **HEALTHY, **changes}


@pytest.fixture(autouse=True)
def data_are_prepared(tmp_path, monkeypatch):
    """The recipe's files, in the folder of the job."""
    job = tmp_path.parent / f"{tmp_path.name}-job"
    job.mkdir()
    monkeypatch.chdir(job)
    for number, file in enumerate(missing_files(load_recipe(RECIPE))):
        rows = ({"question": f"{number}.{i}", "answer": i} for i in range(500))
        (job / file).parent.mkdir(exist_ok=True)
        (job / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def verdicts(*all_facts, nodes=("n1", "n2"), overrides=("cluster.num_nodes=2",)):
    recipe = load_recipe(RECIPE, [*overrides])
    rows = check_job(recipe, Job(nodes, all_facts))
    return {row.check: (row.verdict, row.finding) for row in rows}


def healthy(*overrides):
    return verdicts(facts("n1"), facts("n2"), overrides=("cluster.num_nodes=2", *overrides))


def refused(found):
    return {check for check, (verdict, _) in found.items() if verdict == "refused"}


def test_healthy_nodes_are_accepted():
    found = healthy("checkpointing.save_optimizer=false")
    assert refused(found) <= {"free space"}  # of the machine that runs this test
    assert found["plan"][0] == "ok"
    assert found["GPUs"] == ("ok", "8 per node, NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("check", "second", "part"),
    [
        ("shared folder", None, "n2 did not write"),
        ("GPUs", facts("n2", gpus=["NVIDIA H100 80GB HBM3"] * 7), "n2 has 7"),
        ("versions", facts("n2", versions={"ray": "2.54"}), "ray: n1 2.55, n2 2.54"),
    ],
)
def test_sick_node_is_refused_by_name(check, second, part):
    found = verdicts(*(f for f in (facts("n1"), second) if f))
    assert check in refused(found)
    assert part in found[check][1]
    assert refused(found) <= {check, "free space"}


def test_other_number_of_nodes_than_the_recipe_is_refused():
    verdict, finding = verdicts(facts("n1"), facts("n2"), overrides=())["nodes"]
    assert verdict == "refused"
    assert finding == "cluster.num_nodes=1, the job has 2; use sbatch --nodes=1 or that override"


def test_plan_that_does_not_fit_is_refused():
    small = "policy.generation.vllm_cfg.gpu_memory_utilization=0.1"  # less than the weights
    assert "plan" in refused(healthy(small))


def test_checkpoint_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: type("Usage", (), {"free": 50 * GIB}))
    found = healthy()
    assert "free space" in refused(found)  # 7.6e9 parameters x 14 bytes = 99 GiB
    assert "50.0 GiB" in found["free space"][1]
    assert "99.3 GiB" in found["free space"][1]
    assert "free space" not in refused(healthy("checkpointing.save_optimizer=false"))
    assert "free space" not in healthy("checkpointing.enabled=false"), "nothing will be saved"
    lora = "policy.megatron_cfg.peft={enabled: true, dim: 32, alpha: 64, target_modules: [linear_qkv]}"
    assert healthy(lora)["free space"][0] == "note", "adapters are smaller than the model"


def test_node_facts_are_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert node_facts.main(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["n7.json"]
    written = json.loads((tmp_path / "n7.json").read_text())
    assert written.keys() == facts().keys()


def test_node_that_does_not_see_the_log_folder_fails_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert node_facts.main(tmp_path / "absent") == 1
    assert "n7" in capsys.readouterr().err


def test_command_exits_with_69_where_a_check_refuses(tmp_path):
    (tmp_path / "n1.json").write_text(json.dumps(facts("n1")))
    options = ["--facts", str(tmp_path), "--nodes", "n1,n2"]
    done = CliRunner().invoke(app, ["preflight", RECIPE, "cluster.num_nodes=2", *options])
    assert done.exit_code == 69
    assert "refused  shared folder" in done.output


@pytest.mark.parametrize(
    ("smi", "expected"),
    [
        ("echo 'NVIDIA H100 80GB HBM3'; echo 'NVIDIA H100 80GB HBM3'", ["NVIDIA H100 80GB HBM3"] * 2),
        ("echo 'Unable to determine the device handle: GPU is lost'; exit 15", []),
        (None, ["gpu"] * 2),  # Slurm's word, where nobody can say more
    ],
)
def test_node_whose_gpus_do_not_answer_has_none(tmp_path, monkeypatch, smi, expected):
    if smi is not None:
        write_programs(tmp_path, **{"nvidia-smi": smi})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert node_facts.find_gpus() == expected
