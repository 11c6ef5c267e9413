"""The preflight's all-reduce: ranks here are processes with gloo; srun and nccl are not tested."""

import json
import os
import socket
import subprocess
import sys

from nemo_grpo.launch import rank_process
from nemo_grpo.launch.ranks import check_ranks, modules_of_ranks, read_reports
from nemo_grpo.nemorl.host_api import STOCK_WORKER
from nemo_grpo.recipe import load_recipe

RECIPE = load_recipe("quickstart", ["cluster.num_nodes=2", "cluster.gpus_per_node=2"])
NODES = ("n1", "n2")
FINISHED = {"step": "done", "error": "", "versions": {"torch": "2.8"}, "backend": "gloo"}


def reports(*changes):
    """Return the reports of four ranks, changed by rank; None: the rank has written none."""
    made = {}
    for rank, change in enumerate(changes):
        if change is not None:
            made[rank] = {"rank": rank, "node": NODES[rank // 2], **FINISHED, **change}
    return made


def rows(*changes):
    return [(row.check, row.verdict, row.finding) for row in check_ranks(RECIPE, NODES, reports(*changes))]


def refusal(*changes):
    [(check, verdict, finding)] = rows(*changes)
    assert verdict == "refused"
    return check, finding


def test_ranks_that_have_finished_are_accepted():
    assert rows({}, {}, {}, {}) == [
        ("imports", "ok", "torch 2.8"),
        ("all-reduce", "ok", "4 ranks on n1, n2, gloo"),
    ]


def test_rank_that_has_not_started_is_named_with_its_node():
    """The other ranks wait for it in the all-reduce, and are not to blame."""
    waits = {"step": "all-reduce"}
    check, finding = refusal(waits, waits, waits, None)
    assert check == "imports"
    assert finding.startswith("rank 3 on n2 did not answer: ended at start; ")
    assert "rank 0" not in finding


def test_rank_that_hangs_in_an_import_is_named_with_the_module():
    waits = {"step": "all-reduce"}
    _, finding = refusal(waits, waits, {"step": "import torch"}, waits)
    assert finding.startswith("rank 2 on n2 did not answer: ended at import torch; ")


def test_import_error_names_version_and_ranks_and_hides_what_it_ended():
    broken = {
        "step": "import megatron.core",
        "error": "megatron.core (megatron-core 0.16) cannot be imported",
    }
    check, finding = refusal({"step": "all-reduce"}, {}, broken, broken)
    assert check == "imports"
    assert finding.startswith(
        "ranks 2, 3 on n2: megatron.core (megatron-core 0.16) cannot be imported; repair"
    )


def test_all_reduce_that_nobody_finishes_names_the_network():
    waits = {"step": "all-reduce", "backend": "nccl"}
    check, finding = refusal(waits, waits, waits, waits)
    assert check == "all-reduce"
    assert finding.startswith("ranks 0, 1 on n1; ranks 2, 3 on n2 did not finish it by nccl; ")
    assert "NCCL_SOCKET_IFNAME" in finding


def test_ranks_without_a_gpu_beside_ranks_with_one_are_told_apart():
    on_gpu = {"step": "all-reduce", "backend": "nccl"}
    _, finding = refusal(on_gpu, on_gpu, {"step": "all-reduce"}, {"step": "all-reduce"})
    assert "did not finish it by gloo and nccl: torch sees no GPU where it is gloo" in finding


def test_wrong_sum_is_refused():
    check, finding = refusal({}, {"step": "all-reduce", "error": "the sum is 3"}, {}, {})
    assert (check, finding[:27]) == ("all-reduce", "rank 1 on n1: the sum is 3;")


FP8 = "policy.megatron_cfg.fp8_cfg={enabled: true, fp8: hybrid, fp8_recipe: tensorwise}"
CORRECTION = "loss_fn.use_importance_sampling_correction=true"


def test_modules_are_those_of_the_engine():
    assert modules_of_ranks(load_recipe("quickstart")) == ["torch", "megatron.core", "nemo_grpo.engine.run"]
    cluster = load_recipe("cw_grpo/cw_grpo-qwen2.5-math-7b-instruct-1n8g", [FP8, CORRECTION])
    assert modules_of_ranks(cluster) == ["torch", "megatron.core", "transformer_engine", "nemo_rl"]


def start_ranks(folder, modules, num_ranks, **environment):
    """Start the ranks as srun does, all of them with this Python."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_NTASKS": str(num_ranks)}
    return [
        subprocess.Popen(
            [sys.executable, rank_process.__file__, str(folder), *modules],
            env=os.environ
            | shared
            | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURMD_NODENAME": "n1", **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def test_ranks_sum_their_ones(tmp_path):
    ranks = start_ranks(tmp_path, ["torch"], 2)
    ends = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert {report["step"] for report in read_reports(tmp_path).values()} == {"done"}
    recipe = load_recipe("quickstart", ["cluster.gpus_per_node=2"])
    assert [row.verdict for row in check_ranks(recipe, ["n1"], read_reports(tmp_path))] == ["ok", "ok"]


def test_rank_reports_a_module_that_cannot_be_imported(tmp_path):
    (tmp_path / "transformer_engine.py").write_text("raise OSError('libcublas.so.12: no such file')\n")
    [rank] = start_ranks(tmp_path, ["transformer_engine", "torch"], 1, PYTHONPATH=str(tmp_path))
    assert "libcublas" in rank.communicate(timeout=120)[1]
    assert rank.returncode == 1
    report = read_reports(tmp_path)[0]
    assert report["step"] == "import transformer_engine"
    assert report["error"] == (
        "transformer_engine (transformer-engine not installed) cannot be imported: "
        "OSError: libcublas.so.12: no such file"
    )


def worker_of(folder, script):
    """Write a Python of NeMo-RL's Megatron workers, a script of the shell; returns NEMO_RL_VENV_DIR."""
    python = folder / rank_process.WORKER / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/bash\n{script}\n")
    python.chmod(0o755)
    return str(folder)


def test_ranks_run_in_the_environment_of_nemo_rls_workers(tmp_path):
    environments = worker_of(tmp_path / "venvs", 'echo "$NEMO_RL_PY_EXECUTABLES_SYSTEM ${@:2}" >&2')
    [rank] = start_ranks(tmp_path, ["torch", "nemo_rl"], 1, NEMO_RL_VENV_DIR=environments)
    assert rank.communicate(timeout=60)[1] == f"1 {tmp_path} torch nemo_rl\n"
    assert rank_process.WORKER == STOCK_WORKER


def test_modules_of_workers_without_an_environment_yet_are_left_out(tmp_path):
    (tmp_path / "nemo_rl.py").touch()
    modules = ["megatron.core", "transformer_engine", "nemo_rl", "torch"]
    [rank] = start_ranks(tmp_path, modules, 1, NEMO_RL_VENV_DIR=str(tmp_path), PYTHONPATH=str(tmp_path))
    assert rank.communicate(timeout=120)[1] == ""
    assert list(json.loads((tmp_path / "0.json").read_text())["versions"]) == ["nemo_rl", "torch"]
