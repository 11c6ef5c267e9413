"""A run resumes with the optimizer that its checkpoint holds, or says that there is none."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import checkpoint as dcp

from checkpoints_conv.formats.torch_dist import TorchDistReader
from nemo_grpo.nemorl.workarounds import lost_optimizer
from nemo_grpo.nemorl.workarounds.lost_optimizer import optimizer_of
from nemo_grpo.support.errors import UserError

WEIGHT = "decoder.final_layernorm.weight"
MOMENTS = (
    "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_0"
)


def saved(step, *keys):
    """``step/policy/weights`` with one iteration that has these tensors."""
    weights = step / "policy" / "weights"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(weights / "iter_0000000")
        dcp.save(dict.fromkeys(keys, torch.ones(4)), storage_writer=writer, no_dist=True)
    return weights


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ([WEIGHT, f"{MOMENTS}.exp_avg"], True),
        ([WEIGHT, "optimizer.state.exp_avg.output_layer.weight"], True),
        ([WEIGHT, "chained_1.optimizer.state.exp_avg.output_layer.weight"], True),  # experts
        ([WEIGHT, "optimizer_like.weight"], False),
        ([WEIGHT], False),
    ],
)
def test_an_optimizer_is_found_by_its_tensors(keys, found, tmp_path):
    reader = TorchDistReader(saved(tmp_path, *keys))
    assert reader.has_optimizer is found
    reader.close()


def test_a_run_resumes_with_its_optimizer_or_says_that_there_is_none(tmp_path, caplog):
    assert optimizer_of(None, is_required=True) is None  # it begins
    weights = saved(tmp_path / "whole", WEIGHT, f"{MOMENTS}.exp_avg")
    assert optimizer_of(weights, is_required=True) == tmp_path / "whole" / "policy" / "optimizer"
    weights = saved(tmp_path / "bare", WEIGHT)
    with pytest.raises(UserError, match=r"save_optimizer=true, but .*weights has no optimizer .* set it to"):
        optimizer_of(weights, is_required=True)
    assert optimizer_of(weights, is_required=False) is None
    assert "optimizer and schedule start from zero" in caplog.text


def test_other_backends_keep_nemo_rls_answer_and_its_warning(tmp_path, monkeypatch):
    """Their optimizer is a file of its own, and their weights are no torch_dist checkpoint."""
    installed = {}
    monkeypatch.setattr(lost_optimizer, "rebind", lambda name, wrap: installed.update({name: wrap}))
    megatron_cfg = SimpleNamespace(enabled=False)
    checkpointing = SimpleNamespace(save_optimizer=False)
    lost_optimizer.resume_with_optimizer(
        SimpleNamespace(policy=SimpleNamespace(megatron_cfg=megatron_cfg), checkpointing=checkpointing)
    )

    def theirs(step):
        warnings.warn("Optimizer will be freshly initialized", UserWarning, stacklevel=2)
        return step / "policy/weights", None

    with pytest.warns(UserWarning, match="freshly initialized"):
        assert installed["resume"](theirs).__func__(tmp_path) == (tmp_path / "policy/weights", None)
