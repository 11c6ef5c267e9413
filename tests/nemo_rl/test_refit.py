"""A weight update that a rollout worker fails, on NeMo-RL's own refit and real Ray actors."""

import time
from types import SimpleNamespace as Of
from typing import Any

import pytest
import ray
from nemo_rl.algorithms import grpo
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.hooks import HOOKS, places
from nemo_grpo.nemorl.refit import GRACE_S, UPDATES, RefitFailed, Refits

pytestmark = pytest.mark.usefixtures("private_ray")

REASON = "Error in VllmInternalWorkerExtension.update_weights_via_ipc_zmq: 'lm_head.weight'."


@ray.remote(num_cpus=0)
class Worker:
    """A policy's worker that is blocked in its send, or a rollout's that answers."""

    def send(self, seconds):
        time.sleep(seconds)

    def update(self, result, seconds=0.0):
        time.sleep(seconds)
        if isinstance(result, str):
            raise RuntimeError(result)
        return result

    def offload(self):
        """Waits for the send."""


class Policy:
    """What NeMo-RL's refit asks of a policy; its send takes so long."""

    def __init__(self, refits: Refits, seconds: float) -> None:
        self.refits, self.seconds = refits, seconds
        self.worker_group = Of(workers=[Worker.remote()])

    def stream_weights_via_ipc_zmq(self, **_: Any) -> Any:
        return self.refits.sends(self, [w.send.remote(self.seconds) for w in self.worker_group.workers])

    def offload_before_refit(self):
        """Nothing to move."""

    def offload_after_refit(self):
        ray.get([worker.offload.remote() for worker in self.worker_group.workers])

    def get_free_memory_bytes(self):
        return 1 << 30


@pytest.fixture
def refits(monkeypatch):
    """Installed, and NeMo-RL's class as it was afterwards."""
    for key in UPDATES:
        for owner, name in places(HOOKS[key]):
            monkeypatch.setattr(owner, name, getattr(owner, name))
    made = Refits()
    made.install()
    yield made
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    global_worker_stdstream_dispatcher.remove_handler("nemo_grpo.nemorl.refit")


def generation(worker, *answer):
    """NeMo-RL's class with one engine that gives this answer."""
    made = VllmGeneration.__new__(VllmGeneration)
    made.cfg = {"vllm_cfg": {"async_engine": False}}
    made.worker_group = Of(
        workers=[worker],
        run_all_workers_single_data=lambda *_, **__: [worker.update.remote(*answer)],
        shutdown=lambda **_: True,
    )
    made.prepare_for_generation = lambda **_: True
    return made


def refit(policy, engine):
    """As the trainer does it; HEAD through its synchronizer."""
    if compat.version() == compat.HEAD:
        from nemo_rl.weight_sync.ipc_weight_synchronizer import IPCWeightSynchronizer

        engine.weight_synchronizer = IPCWeightSynchronizer(policy, engine)
    grpo.refit_policy_generation(policy, engine, True)


@pytest.mark.parametrize("answer", [(False,), ("the engine has died",)])
def test_failed_update_ends_while_the_policy_is_still_sending(refits, answer, caplog):
    policy, engine = Policy(refits, 100.0), Worker.remote()
    begun = time.monotonic()
    with pytest.raises((RefitFailed, ray.exceptions.RayActorError)):  # HEAD asks the policy once more
        refit(policy, generation(engine, *answer))
    assert time.monotonic() - begun < 30
    assert "weight update of the rollouts failed" in caplog.text
    assert answer == (False,) or answer[0] in caplog.text


def test_engine_waiting_for_other_ranks_fails_with_the_printed_reason(refits, caplog):
    policy, engine = Policy(refits, 100.0), Worker.remote()
    sends = policy.stream_weights_via_ipc_zmq

    def send_and_print(**further):
        futures = sends(**further)
        refits.heard({"pid": 7, "lines": ["loading", REASON, "Traceback: KeyError"]})
        refits.heard({"pid": 8, "lines": ["another worker"]})
        return futures

    policy.stream_weights_via_ipc_zmq = send_and_print
    begun = time.monotonic()
    with pytest.raises((RefitFailed, ray.exceptions.RayActorError)):
        refit(policy, generation(engine, False, 100.0))
    assert GRACE_S < time.monotonic() - begun < 30
    assert f"{REASON}\nTraceback: KeyError" in caplog.text
    assert "another worker" not in caplog.text


def test_failed_send_ends_while_the_engine_still_waits(refits):
    policy, engine = Policy(refits, 100.0), Worker.remote()
    policy.stream_weights_via_ipc_zmq = lambda **_: refits.sends(
        policy, [policy.worker_group.workers[0].update.remote("out of memory")]
    )
    with pytest.raises((RefitFailed, ray.exceptions.RayActorError)) as caught:
        refit(policy, generation(engine, True, 100.0))
    assert "out of memory" in str(caught.value) or "out of memory" in str(caught.value.__context__)


def test_update_that_succeeds_leaves_the_policy_alone(refits):
    policy, engine = Policy(refits, 0.2), Worker.remote()
    refit(policy, generation(engine, True))
    refit(policy, generation(engine, None))  # of an engine's further ranks
    assert ray.get(policy.worker_group.workers[0].update.remote(True))
