"""NeMo-RL's own `grpo_train` on a CPU with our loss, estimator, sampling and checkpoints."""

import json
import os
import signal
from unittest.mock import MagicMock, patch

import pytest
import torch
from nemo_rl.models.policy import lm_policy
from toy_training import GENERATIONS, GRPO, PROMPTS, Loader, Run, rollouts, toy_run

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.added_metrics import ValidationSets
from nemo_grpo.nemorl.callbacks import calling_back
from nemo_grpo.nemorl.checkpoints import SideFiles
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.exit_status import finished_steps, stop_after_step
from nemo_grpo.nemorl.policy import policy_factory
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants import VARIANTS

pytestmark = pytest.mark.usefixtures("private_ray", "names_are_restored")  # the trainers ask Ray for nodes

SETTINGS = {name: {"variant": name} for name in VARIANTS} | {
    "clip_cov": {"variant": "clip_cov", "covariance_min": 0.01},
    "tr_grpo_random": {"variant": "tr_grpo", "weighting": "random"},
    "group_token_mean": {"variant": "tr_grpo", "aggregation": "group_token_mean"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_grpo_train_runs_with_every_variant(setting, tmp_path):
    run = Run(tmp_path, SETTINGS[setting], "checkpointing.enabled=false")
    start = run.policy.model.detach().clone()
    draws = run.train()
    assert len(draws) == 2
    assert not torch.equal(run.policy.model, start)
    step = run.policy.trained[0]
    mask = (step["token_mask"] * step["sample_mask"][:, None]).bool()
    advantages = step["advantages"]
    assert advantages[~mask].abs().sum() == 0
    assert advantages[0][mask[0]].sum() > 0, "the only right response of its group"
    assert advantages[GENERATIONS:].abs().sum() == 0, "a group without spread, though its prompt is the same"
    assert advantages[1][mask[1]].sum() < 0
    assert ("token_weights" in step) == (setting == "tr_grpo_random")
    metrics = run.logged()
    assert metrics["loss"] == pytest.approx(run.policy.losses[-1], rel=1e-5)
    ratio = 1.0  # one update per step
    if setting == "dppo":  # to the sampler, whose logprobs are not the policy's here
        last = run.policy.trained[-1]
        mask = (last["token_mask"] * last["sample_mask"][:, None]).bool()
        ratio = (last["prev_logprobs"] - last["generation_logprobs"]).exp()[mask].mean().item()
        assert abs(ratio - 1) > 0.01
    assert metrics["probs_ratio"] == pytest.approx(ratio, abs=1e-5)
    assert {"gen_kl_error", "token_mult_prob_error", "approx_entropy"} <= set(metrics)
    assert metrics.get("gpg/alpha") == (2.0 if setting == "gpg" else None)


OTHERS = [
    {"variant": "dr_grpo", "ratio_clip_c": 3.0},
    {"variant": "grpo", **dict.fromkeys(("ratio_clip_min", "ratio_clip_max"))},
    {"variant": "grpo", "use_importance_sampling_correction": True,
     "truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 1.002,
     "truncated_importance_sampling_ratio_min": 0.999},
    {"variant": "gspo", "use_importance_sampling_correction": True},
    {"variant": "dapo", "force_on_policy_ratio": True},
    {"variant": "cw_grpo", "aggregation": "group_token_mean"},
]  # fmt: skip


@pytest.mark.parametrize("section", [*SETTINGS.values(), *OTHERS], ids=str)
def test_nemo_rls_setup_makes_its_own_loss_of_every_section(section, tmp_path):
    """It does so before ours takes its place."""
    from nemo_rl.algorithms.loss import ClippedPGLossFn

    ClippedPGLossFn(toy_run(tmp_path, section).master_config.loss_fn)


NO_REWARD = [1.0, float("nan"), 0.0, 1.0, 1.0, 1.0]


def test_a_response_without_a_reward_is_left_out_of_the_step(tmp_path):
    def rolled_out(draw=0):
        batch = rollouts(draw)
        batch["total_reward"] = torch.tensor(NO_REWARD)
        return batch

    run = Run(tmp_path, {"variant": "grpo"}, "checkpointing.enabled=false")
    with patch("toy_training.rollouts", rolled_out):
        run.train()
    step = run.policy.trained[0]
    assert step["sample_mask"].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    # the mean of (1, 0) is 0.5 and their deviation 0.7071
    for row, advantage in enumerate((0.5**0.5, 0.0, -(0.5**0.5), 0.0, 0.0, 0.0)):
        tokens = step["advantages"][row][step["token_mask"][row].bool()]
        assert tokens.tolist() == pytest.approx([advantage] * len(tokens), rel=1e-4)
    assert run.logged()["reward/mean"] == pytest.approx(0.8)
    assert torch.tensor(run.policy.losses).isfinite().all()


def test_step_without_signal_updates_if_it_is_the_first_or_nemo_rl_adds_a_loss(tmp_path, monkeypatch):
    class Stock:
        def __init__(self, optimizer_path=None):
            pass

        def train(self, _data, _loss_fn, eval_mode=False):
            return eval_mode

    monkeypatch.setattr(lm_policy, "Policy", Stock)
    recipe = load_recipe(
        "cw_grpo/grpo-r1-distill-qwen-1.5b-1n8g", ["loss_fn.reference_policy_kl_penalty=0.0"]
    )

    def evaluated(draft=False, **arguments):
        run = ClusterRun(recipe, {"policy": {"draft": {"enabled": draft}}})
        policy = policy_factory(run, StepContext())(**arguments)
        data = {"advantages": torch.zeros(2, 3), "sample_mask": torch.ones(2)}
        return [policy.train(dict(data), None) for _ in range(2)]

    assert evaluated() == [False, True], "the first update gives Adam its moments"
    assert evaluated(optimizer_path="step_1/policy/optimizer") == [True, True]
    assert evaluated(draft=True) == [False, False]


def test_gpg_draws_until_its_threshold(tmp_path):
    run = Run(
        tmp_path,
        {"variant": "gpg", "valid_fraction_threshold": 1.0},
        "grpo.use_dynamic_sampling=true",
        "grpo.max_num_steps=1",
        "checkpointing.enabled=false",
    )
    assert len(run.train()) == 2, "one group of each draw carries signal"
    advantages = run.policy.trained[0]["advantages"]
    assert len(advantages) == PROMPTS * GENERATIONS
    assert (advantages.abs().sum(1) > 0).all()
    assert run.logged()["gpg/alpha"] == 1.0
    logged = run.logged()
    assert logged["dynamic_sampling_num_gen_batches"] == 2
    assert logged["reward/mean"] == pytest.approx(logged["reward"]), "of both draws"
    assert logged["kept/reward/mean"] == pytest.approx(logged["filtered_reward"])
    assert logged["kept/reward/mean"] != pytest.approx(logged["reward/mean"])


def test_data_that_ends_early_ends_the_run_and_says_so(tmp_path, caplog):
    run = Run(
        tmp_path,
        {"variant": "gpg", "valid_fraction_threshold": 1.0},
        *("grpo.use_dynamic_sampling=true", "grpo.max_num_steps=10", "grpo.max_num_epochs=1"),
        "checkpointing.enabled=false",
    )
    with stop_after_step(run.run.recipe.grpo) as stop, calling_back([stop], run.logger):
        assert len(run.train()) == 10, "two draws a step"
    assert stop.last_step == 5
    assert run.exit_code(stop) == 0
    assert "the data ended after step 5 of 10" in caplog.text
    assert "grpo.max_num_epochs=1 are over; raise it" in caplog.text


def test_a_signal_saves_and_asks_for_another_start(tmp_path):
    settings = ("grpo.max_num_steps=5", "checkpointing.save_period=100", "checkpointing.metric_name=null")
    run = Run(tmp_path, {"variant": "tr_grpo", "weighting": "random"}, *settings)
    train = run.policy.train

    def train_and_be_asked_to_stop(*args, **kwargs):
        if len(run.policy.trained) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return train(*args, **kwargs)

    run.policy.train = train_and_be_asked_to_stop
    with stop_after_step(run.run.recipe.grpo) as stop:
        run.train()
    assert stop.happened
    assert len(run.policy.trained) == 2
    assert run.exit_code(stop) == 75
    info = json.loads((run.run.recipe.checkpoint_dir / "step_2" / "training_info.json").read_text())
    assert info["total_steps"] == 2

    again = Run(tmp_path, {"variant": "tr_grpo", "weighting": "random"}, *settings)
    assert finished_steps(again.parts) == 2
    with stop_after_step(again.run.recipe.grpo) as stop:
        again.train()
    assert len(again.policy.trained) == 3, "steps 3 to 5"
    assert again.exit_code(stop) == 0
    first, resumed = run.policy.trained, again.policy.trained
    assert not torch.equal(first[0]["token_weights"][0, 3:5], resumed[0]["token_weights"][0, 3:5])


def test_moving_statistics_go_on_where_nemo_rls_checkpoint_left_them(tmp_path):
    loss_fn = {"variant": "erpo", "entropy_statistics": "moving"}
    settings = ("checkpointing.save_period=2", "checkpointing.metric_name=null")
    run = Run(tmp_path, loss_fn, *settings)
    files = SideFiles(MagicMock(), MagicMock())
    install = run.install

    def install_and_note():
        files.estimator = install()
        return files.estimator

    run.install = install_and_note
    with calling_back([files], checkpointer=run.checkpointer):
        run.train()
    assert run.estimator.carried["mean"] > 0
    again = Run(tmp_path, loss_fn, "grpo.max_num_steps=4", *settings)
    assert finished_steps(again.parts) == 2
    assert again.install().carried == run.estimator.carried


def test_a_run_that_reached_its_goal_is_known(tmp_path):
    stop_at = "grpo.stop_at_validation"
    overrides = (
        f"{stop_at}_metric=validation/accuracy",
        f"{stop_at}_threshold=0.5",
        "grpo.val_at_start=true",
    )
    if compat.version() == compat.V0_7_0:
        with pytest.raises(UserError, match='stop_at_validation_metric="validation/accuracy"'):
            Run(tmp_path, {"variant": "grpo"}, *overrides)
        return
    for accuracy, steps in ((0.4, 2), (0.5, 0)):
        run = Run(tmp_path, {"variant": "grpo"}, "checkpointing.enabled=false", *overrides)
        run.parts = run.parts._replace(val_dataloader=Loader())
        found = ({"accuracy": accuracy}, {})
        with (
            patch(f"{GRPO}.validate", return_value=found),
            stop_after_step(run.run.recipe.grpo) as stop,
            calling_back([stop], run.logger),
        ):
            run.train()
        assert (stop.reached_threshold, len(run.policy.trained)) == (steps == 0, steps)


def test_checkpoints_are_ranked_by_the_accuracy_of_one_validation_set(tmp_path):
    """b is best after step 2, the mean of a and b after step 3."""
    accuracies = {1: (0.0, 0.25), 2: (0.0, 0.75), 3: (1.0, 0.5), 4: (0.0, 0.0)}
    run = Run(
        *(tmp_path, {"variant": "grpo"}, "grpo.val_period=1", "grpo.max_num_steps=4"),
        *("checkpointing.keep_top_k=1", "checkpointing.metric_name=val:b/accuracy"),
        "nemo_grpo.task={_override_: true, name: math, validation_files: {a: a.jsonl, b: b.jsonl}}",
    )
    run.parts = run.parts._replace(val_dataloader=Loader())

    def validate(*_, step, **__):
        lines = (json.dumps({"rewards": [reward]}) + "\n" for reward in accuracies[step])
        (tmp_path / f"val_data_step{step}.jsonl").write_text("".join(lines))
        return {"accuracy": sum(accuracies[step]) / 2}, {}

    sets = ValidationSets(["a", "b"], tmp_path, 1)
    with patch(f"{GRPO}.validate", side_effect=validate), calling_back([sets], run.logger):
        run.train()
    kept = {path.name: path for path in run.run.recipe.checkpoint_dir.glob("step_*")}
    assert set(kept) == {"step_2", "step_4"}
    info = json.loads((kept["step_2"] / "training_info.json").read_text())
    assert info["val:b/accuracy"] == 0.75
    assert info["val_reward"] == 0.375


def asynchronous(tmp_path, loss_fn):
    """Two steps of asynchronous training without checkpoints, on a buffer that always gives one group."""
    from tests.unit.algorithms.test_grpo import mock_async_grpo_infrastructure

    apart = "{enabled: false, resources: {gpus_per_node: 1, num_nodes: 1}}"
    run = Run(
        tmp_path,
        {"use_importance_sampling_correction": True, **loss_fn},
        "grpo.async_grpo.enabled=true",
        "policy.generation.vllm_cfg.async_engine=true",
        f"policy.generation.colocated={apart}",
        "checkpointing.enabled=false",
    )
    group = rollouts().select_indices(list(range(GENERATIONS)))  # the buffer gives it twice
    return run, mock_async_grpo_infrastructure(group, {"mean_gen_tokens_per_sample": 3.0})


def train_asynchronously(run, infrastructure):
    with infrastructure, stop_after_step(run.run.recipe.grpo) as stop, calling_back([stop], run.logger):
        run.run_trainer()
    return stop


def test_asynchronous_training_error_without_checkpoints_is_a_failure(tmp_path):
    run, infrastructure = asynchronous(tmp_path, {"variant": "grpo"})
    train = run.policy.train

    def fail_in_the_second_step(*args, **kwargs):
        if run.policy.trained:
            raise RuntimeError("a worker has died")
        return train(*args, **kwargs)

    run.policy.train = fail_in_the_second_step
    if compat.version() == compat.HEAD:  # it raises, 0.7.0 prints
        with pytest.raises(RuntimeError, match="a worker has died"):
            train_asynchronously(run, infrastructure)
        return
    stop = train_asynchronously(run, infrastructure)
    assert stop.last_step == 1
    assert run.exit_code(stop) == 1


def test_asynchronous_training_takes_estimator_and_loss(tmp_path):
    run, infrastructure = asynchronous(tmp_path, {"variant": "erpo", "num_buckets": 2})
    stop = train_asynchronously(run, infrastructure)
    assert run.exit_code(stop) == 0
    assert len(run.policy.trained) == 2
    advantages, mask = run.policy.trained[0]["advantages"], run.policy.trained[0]["token_mask"].bool()
    torch.testing.assert_close(advantages[:GENERATIONS], advantages[GENERATIONS:])
    tokens = advantages[:GENERATIONS][mask[:GENERATIONS]]
    assert tokens.mean() == pytest.approx(0, abs=1e-5)
    assert tokens.var(unbiased=False) == pytest.approx(1, abs=1e-3)  # ERPO Eq. 16
    assert "erpo/gate_mean" in run.logged()


def test_asynchronous_training_takes_dppo_whose_ratio_corrects_by_itself(tmp_path):
    run, infrastructure = asynchronous(tmp_path, {"variant": "dppo"})
    stop = train_asynchronously(run, infrastructure)
    assert run.exit_code(stop) == 0
    last = run.policy.trained[-1]
    mask = (last["token_mask"] * last["sample_mask"][:, None]).bool()
    to_the_sampler = (last["prev_logprobs"] - last["generation_logprobs"]).exp()[mask].mean().item()
    assert run.logged()["probs_ratio"] == pytest.approx(to_the_sampler, abs=1e-5)
