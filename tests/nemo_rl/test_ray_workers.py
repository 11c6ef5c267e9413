"""NeMo-RL's `Policy` and `RayWorkerGroup` with real Ray actors that import this package for its loss."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy import lm_policy
from nemo_rl_steps import LENGTH, ROWS, counts, current_logprobs, loss_data

from nemo_grpo.nemorl.loss import build_loss
from nemo_grpo.nemorl.policy import policy_factory
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes/cw_grpo/grpo-r1-distill-qwen-1.5b-1n8g.yaml"
WORKER = "toy_worker.ToyWorker"
CONFIG = yaml.safe_load(f"""
model_name: none
megatron_cfg: {{enabled: true, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1,
               context_parallel_size: 1, env_vars: null}}
dynamic_batching: {{enabled: false}}
sequence_packing: {{enabled: true, fuse_loss: false, algorithm: modified_first_fit_decreasing,
                   train_mb_tokens: 24, logprob_mb_tokens: 24}}
make_sequence_length_divisible_by: 1
train_global_batch_size: {ROWS}
train_micro_batch_size: 1
tokenizer: {{}}
""")


@pytest.fixture(scope="module")
def policy(private_ray):
    """Two worker processes."""

    def no_model(_name):
        raise ValueError("the toy has no configuration on the Hub")

    recipe = load_recipe(RECIPE, ["loss_fn.reference_policy_kl_penalty=0.0"])
    run = SimpleNamespace(recipe=recipe, master_config={"policy": CONFIG})
    cluster = RayVirtualCluster([2], use_gpus=False, num_gpus_per_node=2, name="toy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_policy, "get_default_hf_config", no_model)
        patch.setitem(ACTOR_ENVIRONMENT_REGISTRY, WORKER, sys.executable)
        made = policy_factory(run, StepContext())(
            cluster=cluster,
            config=CONFIG,
            tokenizer=None,
            worker_extension_cls_fqn=WORKER,
            init_reference_model=False,
        )
        yield made
    made.shutdown()
    del made.worker_group  # its end would ask for it again, and start another Ray
    cluster.shutdown()


def with_counts(data):
    """As the toy worker takes it: with the denominators in every row."""
    sizes = counts(data)
    data["global_seqs"] = sizes["global_valid_seqs"].expand(ROWS).clone()
    data["global_toks"] = sizes["global_valid_toks"].expand(ROWS).clone()
    return data, sizes


def test_a_step_without_signal_is_no_update(policy):
    data, _ = with_counts(loss_data())
    loss_fn = build_loss({"variant": "grpo"})
    assert policy.train(data, loss_fn)["all_mb_metrics"]["is_update"] == [True, True]
    data["advantages"] = torch.zeros(ROWS, LENGTH)
    found = policy.train(data, loss_fn)["all_mb_metrics"]
    assert found["is_update"] == [False, False]
    assert sum(found["probs_ratio"]) > 0.5, "its metrics are computed all the same"


def test_step_without_signal_updates_if_it_is_the_first_or_nemo_rl_adds_a_loss(monkeypatch):
    class Stock:
        def __init__(self, optimizer_path=None):
            pass

        def train(self, _data, _loss_fn, eval_mode=False):
            return eval_mode

    monkeypatch.setattr(lm_policy, "Policy", Stock)
    recipe = load_recipe(RECIPE, ["loss_fn.reference_policy_kl_penalty=0.0"])

    def evaluated(draft=False, **arguments):
        run = SimpleNamespace(recipe=recipe, master_config={"policy": {"draft": {"enabled": draft}}})
        policy = policy_factory(run, StepContext())(**arguments)
        return [policy.train({"advantages": torch.zeros(2, 3)}, None) for _ in range(2)]

    assert evaluated() == [False, True], "the first update gives Adam its moments"
    assert evaluated(optimizer_path="step_1/policy/optimizer") == [True, True]
    assert evaluated(draft=True) == [False, False]


def test_workers_import_the_loss_and_their_shares_add_up(policy):
    weights = 0.5 + torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(3))
    data, sizes = with_counts(loss_data(token_weights=weights))
    for settings in ({"variant": "cw_grpo"}, {"variant": "tr_grpo", "weighting": "random"}):
        loss_fn = build_loss(settings)
        expected, metrics = loss_fn(current_logprobs(data), data, **sizes)
        found = policy.train(data, loss_fn)["all_mb_metrics"]
        assert sum(found["loss"]) == pytest.approx(float(expected), abs=1e-5)
        assert sum(found["gen_kl_error"]) == pytest.approx(metrics["gen_kl_error"], abs=1e-6)
        assert len(found["rows"]) == 2
        assert sum(found["rows"]) == ROWS
