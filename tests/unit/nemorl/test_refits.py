"""When a weight update counts as failed, with a stand-in for the three calls of Ray that decide it."""

import sys
from types import SimpleNamespace as Of
from typing import Any

import pytest

from nemo_grpo.nemorl import refit
from nemo_grpo.nemorl.refit import RefitFailed, Refits

REASON = "Error in VllmInternalWorkerExtension.update_weights_via_ipc_zmq: 'lm_head.weight'."


class StandIn:
    """Futures are answers that are there, None excepted: `PENDING` is one that never comes."""

    PENDING = object()

    def __init__(self) -> None:
        self.killed: list[Any] = []
        self.now = 0.0

    def wait(self, futures: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        ready = [future for future in futures if future is not self.PENDING][:1]
        if not ready:
            self.now += timeout
            assert self.now < 60, "waits for ever"
        return ready, [future for future in futures if future not in ready]

    def get(self, future: Any) -> Any:
        if isinstance(future, Exception):
            raise future
        return future[0]

    def kill(self, worker: Any) -> None:
        self.killed.append(worker)


@pytest.fixture
def ray(monkeypatch):
    made = StandIn()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(refit.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(refit.time, "sleep", lambda seconds: None)
    return made


def sending(*futures: Any) -> Refits:
    made = Refits()
    made.sends(Of(worker_group=Of(workers=["policy"])), futures)
    return made


def test_update_ends_with_the_last_engine_though_the_policy_still_sends(ray):
    sending(ray.PENDING).wait([(True,), (None,)])  # None: a further rank of an engine
    assert ray.killed == []


@pytest.mark.parametrize(
    ("sent", "received", "said"),
    [
        (StandIn.PENDING, [(True,), (False,)], "the workers' log says why"),
        (StandIn.PENDING, [RuntimeError("the engine has died"), StandIn.PENDING], "the engine has died"),
        (RuntimeError("out of memory"), [StandIn.PENDING], "out of memory"),
    ],
)
def test_failed_update_kills_the_blocked_policy_and_says_why(ray, sent, received, said):
    with pytest.raises(RefitFailed, match=f"the weight update of the rollouts failed: {said}"):
        sending(sent).wait(received)
    assert ray.killed == ["policy"]


def test_printed_error_of_a_waiting_engine_fails_it_once_the_rest_of_the_error_is_there(ray):
    refits = sending(ray.PENDING)
    refits.heard({"pid": 8, "lines": ["before"]})
    refits.heard({"pid": 7, "lines": ["loading", REASON, *map(str, range(100))]})
    refits.heard({"pid": 8, "lines": ["another worker"]})
    with pytest.raises(RefitFailed) as error:
        refits.wait([ray.PENDING])
    assert refit.GRACE_S < ray.now < 2 * refit.GRACE_S
    assert str(error.value).partition("failed: ")[2].splitlines() == [REASON, *map(str, range(39))]


def test_error_of_an_earlier_update_is_not_this_ones(ray):
    refits = sending((True,))
    refits.heard({"pid": 7, "lines": [REASON]})
    refits.sends(refits.policy, [(True,)])
    assert refits.reason() == ""
    update = refits.watched(lambda *futures: futures)
    assert update((True,)) == ((True,),)
    with pytest.raises(RefitFailed):
        update((False,))
