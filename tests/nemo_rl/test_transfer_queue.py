"""A whole run whose batches pass through the real TransferQueue, beside the same run without a data plane.

Real: NeMo-RL's `grpo_train_sync`, its rollout actor, `TQPolicy` and workers, Ray, TransferQueue with its own
controller and storage actors. As in every rehearsal the sampler, the model, CUDA and NCCL are stand-ins.
"""

import pytest
import torch
from oracle import ROUNDING, STAND_IN
from test_data_plane import ON
from test_end_to_end import GRPO, ONE, proved, rehearsed

from nemo_grpo.rehearsal import stages
from nemo_grpo.rehearsal.export import convert, weights_of
from nemo_grpo.rehearsal.run_output import Recorded

pytest.importorskip("transfer_queue", reason="no TransferQueue here; `make venv-nemo-rl` installs it")

WEIGHTED = (
    "loss_fn={_override_: true, variant: tr_grpo, aggregation: group_token_mean, "
    "reference_policy_kl_penalty: 0.0}"
)
"""Factors of the groups beside the advantages, which travel inside them."""
SAME = ("reward/mean", "length/mean", "loss/total", "grad_norm", "train/approx_entropy")


@pytest.mark.timeout(1800)
def test_steps_through_the_transfer_queue_are_those_without(tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "1")  # vLLM draws other responses in every run
    plain, plane = (
        rehearsed(tmp_path / name, GRPO, ONE, WEIGHTED, *further)
        for name, further in (("plain", ()), ("plane", (ON,)))
    )
    stages.train(plain, stops=False)
    stages.train(plane)
    expected, found = Recorded(plain), proved(plane)
    for name in SAME:
        assert len(found.series(name)) == 3, name
        assert found.series(name) == pytest.approx(expected.series(name), rel=1e-3, abs=1e-6), name
    before, after = (weights_of(convert(run, stages.newest_checkpoint(run))) for run in (plain, plane))
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=ROUNDING, atol=1e-4, msg=name)
