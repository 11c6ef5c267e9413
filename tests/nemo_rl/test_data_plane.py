"""NeMo-RL's own `grpo_train_sync` on a CPU: every batch passes its data plane, and the loss gets advantages.

The data plane is NeMo-RL's reference of it, in this process: the TransferQueue is a package of its own.
"""

from contextlib import contextmanager
from unittest.mock import MagicMock, patch

import pytest
import ray
import torch
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience import sync_rollout_actor
from nemo_rl.models.policy import tq_policy
from test_training import NO_REWARD, SETTINGS
from toy_training import Generation, Run, ToyPolicy, rollouts

from nemo_grpo.nemorl.host_api import GRPO_SYNC
from nemo_grpo.nemorl.loss import ObjectiveLoss
from nemo_grpo.nemorl.policy import policy_factory
from nemo_grpo.nemorl.trainer import check_data_plane
from nemo_grpo.support.errors import UserError

pytestmark = pytest.mark.usefixtures("private_ray", "names_are_restored")

ON = (
    "data_plane={enabled: true, impl: transfer_queue, backend: simple, storage_capacity: 1000, "
    "num_storage_units: 1, claim_meta_poll_interval_s: 0.1, global_segment_size: 1, local_buffer_size: 1}"
)
PENALIZED = {"reference_policy_kl_penalty": 0.1, "kl_weighting": "none"}
CARRIED = {
    **{name: SETTINGS[name] for name in SETTINGS if SETTINGS[name]["variant"] != "erpo"},
    "group_token_mean": {"variant": "grpo", "aggregation": "group_token_mean"},
    "tr_grpo_random": {"variant": "tr_grpo", "weighting": "random", **PENALIZED},
}
DRAWN = ("tr_grpo_random", "clip_cov")
"""They draw by the responses' tokens, which the data plane keeps from the driver, and then by logprobs."""


class PlanePolicy(ToyPolicy):
    """The toy policy as NeMo-RL's `TQPolicy`: its workers read and write columns."""

    tq_partition_id = "train"

    def __init__(self, plane, **arguments):
        super().__init__()
        self.dp_client, self.dp_cfg = plane, arguments["dp_cfg"]
        self.evaluated = []

    _stamp_pad_seqlen = tq_policy.TQPolicy._stamp_pad_seqlen
    read_from_dataplane = tq_policy.TQPolicy.read_from_dataplane
    write_to_dataplane = tq_policy.TQPolicy.write_to_dataplane
    discard_samples = tq_policy.TQPolicy.discard_samples
    finish_step = tq_policy.TQPolicy.finish_step
    _router_replay_enabled = False
    prepare_step = tq_policy.TQPolicy.prepare_step

    def _packing_args(self, _stage):
        return None, None

    def read(self, meta, fields):
        self._stamp_pad_seqlen(meta)
        return read_columns(self.dp_client, meta, select_fields=list(fields), pad_value_dict={"input_ids": 0})

    def get_logprobs_from_meta(self, meta, timer=None):
        found = ToyPolicy.get_logprobs(self, self.read(meta, LP_SEED_FIELDS))
        write_columns(self.dp_client, meta, fields={"prev_logprobs": found["logprobs"]})

    def get_reference_policy_logprobs_from_meta(self, meta, timer=None):
        found = self.get_reference_policy_logprobs(self.read(meta, LP_SEED_FIELDS))
        write_columns(self.dp_client, meta, fields={"reference_policy_logprobs": found["reference_logprobs"]})

    def train_from_meta(self, meta, loss_fn, timer=None, eval_mode=False, train_fields=()):
        self.evaluated.append(eval_mode)
        before = self.model.detach().clone()
        fields = [name for name in train_fields or DP_TRAIN_FIELDS if name in self.columns(meta)]
        trained = ToyPolicy.train(self, self.read(meta, fields), loss_fn)
        if eval_mode:
            self.model = before.requires_grad_()
        return trained

    def columns(self, meta):
        return set(self.dp_client._partitions[meta.partition_id].rows[meta.sample_ids[0]])


class LocalActor:
    def __init__(self, plane, arguments):
        of_ray = sync_rollout_actor.SyncRolloutActor.__ray_metadata__
        with patch("nemo_rl.data_plane.build_data_plane_client", return_value=plane):
            self.actor = of_ray.modified_class(**arguments)
        self.rollout_to_tq = MagicMock()
        self.rollout_to_tq.remote = lambda *given, **named: ray.put(self.actor.rollout_to_tq(*given, **named))


@contextmanager
def on_the_plane(plane, rewards=None):
    draws = []

    def rollout(**_):
        draws.append(len(draws))
        batch = rollouts(draws[-1])
        if rewards is not None:
            batch["total_reward"] = torch.tensor(rewards)
        return batch, {"mean_gen_tokens_per_sample": 3.0}

    def write_tensors(batch, **named):  # the reference takes no texts
        tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        return kv_first_write(BatchedDataDict(tensors), **named)

    actor = MagicMock()
    actor.options.return_value.remote = lambda **arguments: LocalActor(plane, arguments)
    turns = dict.fromkeys(("run_multi_turn_rollout", "run_async_multi_turn_rollout"), rollout)
    nothing = ("make_actor_runtime_env", "refit_policy_generation", "print_performance_metrics")
    with (
        patch.multiple(sync_rollout_actor, kv_first_write=write_tensors, **turns),
        patch.multiple(GRPO_SYNC, SyncRolloutActor=actor, **dict.fromkeys(nothing, lambda *_, **__: {})),
    ):
        yield


class PlaneRun(Run):
    def __init__(self, folder, loss_fn, *overrides):
        super().__init__(folder, loss_fn, *overrides)
        self.plane = NoOpDataPlaneClient()
        toy = patch.object(tq_policy, "TQPolicy", type("Toy", (PlanePolicy,), {}))
        with toy, patch("nemo_grpo.nemorl.policy.worker_class", return_value=None):
            make = policy_factory(self.run, self.context)
        self.policy = make(plane=self.plane)
        loss = ObjectiveLoss(self.run.recipe.loss_fn, folded=True)
        self.parts = self.parts._replace(policy=self.policy, policy_generation=Generation(), loss_fn=loss)

    def train(self, rewards=None):
        with on_the_plane(self.plane, rewards):
            self.run_trainer()


def started(folder, loss_fn, *overrides):
    folder.mkdir(exist_ok=True)
    return PlaneRun(folder, loss_fn, ON, "checkpointing.enabled=false", *overrides)


@pytest.mark.parametrize("setting", CARRIED)
def test_the_data_plane_gives_the_steps_of_the_driver(setting, tmp_path):
    section = {"reference_policy_kl_penalty": 0.0} if "token_mean" in setting else {}
    section = {**CARRIED[setting], **section}
    plain = Run(tmp_path, section, "checkpointing.enabled=false")
    plain.train()
    run = started(tmp_path / "plane", section)
    run.train()
    assert set(run.policy.trained[0]) <= {*DP_TRAIN_FIELDS}, "no column of ours"
    assert len(run.policy.losses) == len(plain.policy.losses) == 2
    if setting in DRAWN:
        return
    assert run.policy.losses == pytest.approx(plain.policy.losses, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(run.policy.model, plain.policy.model, rtol=1e-5, atol=1e-6)


def test_a_response_without_a_reward_is_left_out_of_the_step(tmp_path):
    run = started(tmp_path, {"variant": "grpo"})
    run.train(NO_REWARD)
    assert run.policy.trained[0]["sample_mask"].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert run.logged()["reward/mean"] == pytest.approx(0.8)


def test_a_driver_without_the_transfer_queue_is_told_before_anything_starts(tmp_path):
    recipe = started(tmp_path, {"variant": "grpo"}).run.recipe
    with (
        patch("importlib.util.find_spec", return_value=None),
        pytest.raises(UserError, match="no transfer_queue; install TransferQueue"),
    ):
        check_data_plane(recipe)


def test_a_step_without_signal_is_no_update(tmp_path):
    run = started(tmp_path, {"variant": "grpo"})
    run.policy.has_moments = True
    start = run.policy.model.detach().clone()
    run.train([1.0] * 6)
    assert run.policy.evaluated == [True, True]
    assert torch.equal(run.policy.model, start)
    run = started(tmp_path / "first", {"variant": "grpo"})
    run.train([1.0] * 6)
    assert run.policy.evaluated == [False, True], "the first update gives Adam its moments"
    run = started(tmp_path / "penalty", {"variant": "grpo", "reference_policy_kl_penalty": 0.1})
    run.train([1.0] * 6)
    assert run.policy.evaluated == [False, False]
