"""NeMo-RL's own single controller on a CPU, in the driver's process, with our loss and estimator.

Real: `setup_single_controller`, the controller's pumps, its replay buffer and samplers, its rollout manager
up to a rollout. Stand-ins: rollouts, the workers (a table of logits that is trained in chunks as they are),
the data plane (NeMo-RL's reference of it), the transfer of weights.
"""

import asyncio
import json
import math
import os
import signal
from collections import defaultdict
from contextlib import contextmanager
from unittest.mock import MagicMock, patch

import pytest
import torch
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS
from nemo_rl.models.policy import tq_policy
from test_data_plane import CARRIED, DRAWN, ON, PlanePolicy
from test_training import NO_REWARD
from toy_training import GENERATIONS, PROMPTS, Generation, Run, rollouts, toy_run

from nemo_grpo.nemorl import compat, single_controller
from nemo_grpo.nemorl.callbacks import calling_back
from nemo_grpo.nemorl.exit_status import exit_code, last_step, stop_after_step
from nemo_grpo.nemorl.host_api import CONTROLLER
from nemo_grpo.nemorl.trainer import Started
from nemo_grpo.support.errors import UserError

if not compat.has_name(single_controller.CONTROLLER_ACTOR):
    pytest.skip("this NeMo-RL has no single controller", allow_module_level=True)

from nemo_rl.experience.interfaces import Completion, PromptGroupRecord
from nemo_rl.experience.rollout_manager import RolloutManager

pytestmark = pytest.mark.usefixtures("private_ray")

APART = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1, num_nodes: 1}}"
SETTINGS = (
    *(ON, APART, "policy.generation.vllm_cfg.async_engine=true"),
    "data.num_workers=0",
)


def controlled(groups, lookahead=0):
    return (
        f"async_rl={{min_groups_for_streaming_train: {groups}, max_inflight_prompts: {PROMPTS}, "
        f"sampler: {{name: in_order, max_lookahead_versions: {lookahead}}}}}"
    )


class ChunkPolicy(PlanePolicy):
    """The toy policy trained as NeMo-RL's Megatron worker trains: sums by chunks, divided at the end."""

    def begin_train_step(self, loss_fn):
        self.loss_fn, self.counts, self.total = loss_fn, dict.fromkeys(("seqs", "toks"), 0.0), 0.0
        self.metrics = defaultdict(list)

    def train_microbatches_from_meta(self, meta):
        data = self.read(meta, [name for name in DP_TRAIN_FIELDS if name in self.columns(meta)])
        self.trained.append(dict(data.items()))
        self.counts["seqs"] += float(data["sample_mask"].sum())
        self.counts["toks"] += float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
        one = torch.ones(())
        for microbatch in data.make_microbatch_iterator(1):
            logprobs = self.logprobs(microbatch["input_ids"])[0][:, 1:]
            loss, numbers = self.loss_fn(logprobs, microbatch, global_valid_seqs=one, global_valid_toks=one)
            loss.backward()
            self.total += float(loss)
            for name, number in numbers.items():
                self.metrics[name].append(number)

    def finish_train_step(self):
        n = self.counts["toks" if self.loss_fn.loss_type.name == "TOKEN_LEVEL" else "seqs"]
        gradient = self.model.grad / n
        with torch.no_grad():
            self.model -= 0.5 * gradient
        self.abort_train_step()
        self.losses.append(self.total / n)
        by = {"TOKENS": self.counts["toks"], "SEQUENCES": self.counts["seqs"], "NONE": 1.0}
        kinds = self.loss_fn.metric_normalizations
        metrics = {name: [x / by[kinds[name].name] for x in xs] for name, xs in self.metrics.items()}
        return {"loss": self.losses[-1], "grad_norm": gradient.norm(), "all_mb_metrics": metrics}

    def abort_train_step(self):
        self.model.grad = None


class Rollouts(RolloutManager):
    rewards: torch.Tensor | None = None

    async def run_rollout(self, input_sample):
        draw, group = divmod(int(input_sample["idx"]), PROMPTS)
        batch = rollouts(draw)
        rows = range(group * GENERATIONS, (group + 1) * GENERATIONS)
        rewards = batch["total_reward"] if self.rewards is None else self.rewards
        said = [Completion(batch["message_log"][i], None, False, float(rewards[i])) for i in rows]
        return PromptGroupRecord(draw, batch["message_log"][rows[0]][:1], None, {}, said, {})


def problem(number):
    asked = [{"role": "user", "content": "?", "token_ids": torch.tensor([1, 2, 3])}]
    return {"message_log": asked, "length": 3, "extra_env_info": {}, "loss_multiplier": 1.0, "idx": number}


class Controlled:
    def __init__(self, folder, loss_fn, *overrides):
        self.run = toy_run(folder, loss_fn, *SETTINGS, *overrides)
        self.run.master_config.data["shuffle"] = False  # as with a task's data
        self.plane = NoOpDataPlaneClient()
        self.plane.register_partition("rollout_data", [], 100, ["train"])
        environment = MagicMock()
        data = ([problem(i) for i in range(10 * PROMPTS)], None, {"toy": environment}, {"toy": environment})
        started = Started(None, MagicMock(), None, MagicMock(pad_token_id=0))
        with self.stand_ins(), patch("nemo_grpo.nemorl.single_controller.rollout_data", return_value=data):
            self.training = single_controller.set_up(self.run, started)
        self.parts = self.training.parts
        self.controller = self.training.train.args[0]
        self.policy, self.logger = self.parts.policy, self.parts.logger

    @contextmanager
    def stand_ins(self):
        transfer = MagicMock(sync_weights=MagicMock(return_value=None))
        names = {
            "_build_clusters": lambda _config: (MagicMock(), MagicMock()),
            "_build_generation": lambda *_, **__: (Generation(), 0.0),
            "build_data_plane_client": lambda *_, **__: self.plane,
            "create_weight_synchronizer": lambda **_: transfer,
            "RolloutManager": Rollouts,
        }
        with (
            patch("nemo_grpo.nemorl.single_controller.policy_factory", self.policy_factory),
            patch.multiple(CONTROLLER, **names),
            patch("nemo_rl.algorithms.single_controller.Logger"),
        ):
            yield

    def policy_factory(self, *arguments, **further):
        from nemo_grpo.nemorl.policy import policy_factory

        toy = type("Toy", (ChunkPolicy,), {})
        with (
            patch.object(tq_policy, "TQPolicy", toy),
            patch("nemo_grpo.nemorl.policy.worker_class", return_value=None),
        ):
            make = policy_factory(*arguments, **further)
        return lambda **named: make(plane=self.plane, **named)

    def train(self):
        with (
            stop_after_step(self.run.recipe.grpo) as stop,
            calling_back([self.training.side_files, stop], self.logger, self.parts.checkpointer),
        ):
            self.training.train()
        return stop

    def exit_code(self, stop):
        return exit_code(self.run, self.parts, last_step(self.run, self.parts), stop)

    def logged(self):
        calls = [c for c in self.logger.log_metrics.call_args_list if c.kwargs.get("prefix") == "train"]
        return calls[-1].args[0]


@pytest.mark.parametrize("setting", CARRIED)
def test_the_controller_gives_the_steps_of_the_driver(setting, tmp_path):
    section = {"reference_policy_kl_penalty": 0.0} if "token_mean" in setting else {}
    section = {**CARRIED[setting], **section}
    plain = Run(tmp_path, section, "checkpointing.enabled=false")
    plain.train()
    groups = PROMPTS if plain.run.recipe.loss_fn.spans_groups else 1
    run = Controlled(tmp_path, section, "checkpointing.enabled=false", controlled(groups))
    stop = run.train()
    assert run.exit_code(stop) == 0
    assert len(run.policy.losses) == len(plain.policy.losses) == 2
    assert run.logged()["loss"] == pytest.approx(run.policy.losses[-1])
    if setting in DRAWN:
        return
    assert run.policy.losses == pytest.approx(plain.policy.losses, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(run.policy.model, plain.policy.model, rtol=1e-5, atol=1e-6)
    for name in ("gen_kl_error", "approx_entropy", "reward/mean", "length/mean"):
        assert run.logged()[name] == pytest.approx(plain.logged()[name], rel=1e-3, abs=1e-6), name


def grpo(folder, groups=PROMPTS):
    return Controlled(folder, {"variant": "grpo"}, "checkpointing.enabled=false", controlled(groups))


def test_a_step_may_come_in_chunks_and_is_recorded_as_one(tmp_path):
    run = grpo(tmp_path, groups=1)
    manager, chunks = run.controller._rollout_manager, run.policy.trained
    rollout = manager.run_rollout

    async def one_after_the_other(sample):
        while len(chunks) < int(sample["idx"]):
            await asyncio.sleep(0.002)
        return await rollout(sample)

    manager.run_rollout = one_after_the_other
    run.train()
    assert [len(chunk["input_ids"]) for chunk in chunks] == [GENERATIONS] * 4, "two chunks a step"
    rows, file = run.logger.log_batched_dict_as_jsonl.call_args_list[1].args
    assert file == "train_data_step2.jsonl"
    assert len(rows["token_ids"]) == PROMPTS * GENERATIONS
    assert rows["rewards"] == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert run.logged()["groups/valid_fraction"] == 0.5
    assert run.logged()["mean_gen_tokens_per_sample"] == pytest.approx(run.logged()["length/mean"])


def test_a_signal_saves_and_the_next_start_goes_on(tmp_path):
    loss_fn = {"variant": "tr_grpo", "weighting": "random", "reference_policy_kl_penalty": 0.0}
    settings = ("grpo.max_num_steps=5", "checkpointing.save_period=100", controlled(PROMPTS, 1))
    run = Controlled(tmp_path, loss_fn, *settings)
    finish = run.policy.finish_train_step

    def finish_and_be_asked_to_stop():
        if len(run.policy.losses) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return finish()

    run.policy.finish_train_step = finish_and_be_asked_to_stop
    stop = run.train()
    assert (stop.happened, stop.last_step, len(run.policy.losses)) == (True, 2, 2)
    assert run.exit_code(stop) == 75
    folder = run.run.recipe.checkpoint_dir / "step_2"
    assert json.loads((folder / "training_info.json").read_text())["current_step"] == 2
    assert (folder / "replay_buffer.pt").exists()

    again = Controlled(tmp_path, loss_fn, *settings)
    assert again.controller._advantage_estimator.step == 2
    stop = again.train()
    assert len(again.policy.losses) == 3, "steps 3 to 5"
    assert again.exit_code(stop) == 0
    files = [call.args[1] for call in again.logger.log_batched_dict_as_jsonl.call_args_list]
    assert files == [f"train_data_step{step}.jsonl" for step in (3, 4, 5)]


def test_responses_to_a_prompt_that_was_cut_do_not_train(tmp_path):
    run = grpo(tmp_path)
    for cut in run.controller._dataloader.dataset[::PROMPTS]:  # the first of a step, whose rewards differ
        cut["loss_multiplier"] = 0.0
    start = run.policy.model.detach().clone()
    run.train()
    masks = run.policy.trained[0]["sample_mask"]
    assert sorted(masks.tolist()) == [0.0] * GENERATIONS + [1.0] * GENERATIONS
    assert torch.equal(run.policy.model, start), "only the group without signal trains"


def test_responses_without_a_reward_do_not_train(tmp_path, monkeypatch):
    monkeypatch.setattr(Rollouts, "rewards", torch.tensor(NO_REWARD))
    run = grpo(tmp_path)
    run.train()
    rows, _ = run.logger.log_batched_dict_as_jsonl.call_args_list[0].args
    assert [math.isnan(reward) for reward in rows["rewards"]] == [
        not mask for mask in rows["sample_loss_mask"]
    ]
    assert sorted(run.policy.trained[0]["sample_mask"].tolist()) == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert run.logged()["reward/mean"] == pytest.approx(0.8)


def test_an_error_of_a_worker_ends_the_run(tmp_path):
    run = grpo(tmp_path)
    run.policy.finish_train_step = MagicMock(side_effect=RuntimeError("a worker has died"))
    with pytest.raises(RuntimeError, match="a worker has died"):
        run.train()


PENALIZED = {"variant": "grpo", "reference_policy_kl_penalty": 0.1}


def test_what_the_controller_or_nemo_rl_cannot_do_is_an_error_of_the_recipe(tmp_path):
    for override, reason in (
        ("data.use_multiple_dataloader=true", "reads a single data loader"),
        ("grpo.skip_reference_policy_logprobs_calculation=true", "needs these logprobs"),
    ):
        with pytest.raises(UserError, match=reason):
            Controlled(tmp_path, PENALIZED, f"++{override}", controlled(PROMPTS))
    config = Controlled(tmp_path, PENALIZED, controlled(PROMPTS)).run.master_config
    config.grpo.skip_reference_policy_logprobs_calculation = True
    with pytest.raises(UserError, match=r"refuses the configuration: .*requires reference_policy_logprobs"):
        single_controller.check(config)
