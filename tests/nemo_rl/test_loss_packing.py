"""Every variant's loss through NeMo-RL's sharding, packing and loss wrappers is the unsharded loss."""

import pytest
import torch
import torch.distributed as dist
from losses import build_loss
from nemo_rl.algorithms.loss.utils import prepare_loss_input, prepare_packed_loss_input
from nemo_rl.algorithms.loss.wrapper import SequencePackingFusionLossWrapper, SequencePackingLossWrapper
from nemo_rl_steps import LENGTH, ROWS, counts, current_logprobs, embedding, loss_data, packed

from nemo_grpo.nemorl.loss import EXTREMES
from nemo_grpo.variants import VARIANTS

SETTINGS = {name: {"variant": name} for name in VARIANTS} | {
    "dr_grpo": {"variant": "dr_grpo", "max_response_length": 9},
    "gpg_sequence_mean": {"variant": "gpg", "aggregation": "sequence_mean"},
    "group_token_mean": {"variant": "grpo", "aggregation": "group_token_mean"},
    "tr_grpo_random": {"variant": "tr_grpo", "weighting": "random"},
    "seq_mask_tis": {
        "variant": "grpo",
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.05,
        "truncated_importance_sampling_ratio_min": 0.95,
    },
}
WRAPPERS = {
    False: (SequencePackingLossWrapper, prepare_loss_input),
    True: (SequencePackingFusionLossWrapper, prepare_packed_loss_input),
}
PACKED = {
    "max_tokens_per_microbatch": 24,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "algorithm": "modified_first_fit_decreasing",
    "sequence_length_pad_multiple": 1,
}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def step():
    weights = 0.5 + torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(3))
    factors = 0.5 + torch.rand(ROWS, generator=torch.Generator().manual_seed(4))
    return loss_data(token_weights=weights, row_factors=factors, idx=torch.arange(ROWS))


def unsharded(setting):
    model, data = embedding().requires_grad_(), step()
    loss, metrics = build_loss(SETTINGS[setting])(current_logprobs(data, model), data, **counts(data))
    loss.backward()
    return loss.detach(), model.grad, metrics


@pytest.mark.parametrize("fused", [False, True], ids=["per_sequence", "fused"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_packed_and_sharded_loss_equals_the_unsharded_one(setting, fused, group):
    wrapper, prepare = WRAPPERS[fused]
    model, data = embedding().requires_grad_(), step()
    shards, _ = data.shard_by_batch_size(2, batch_size=ROWS, sequence_packing_args=PACKED)
    total, summed, rows, num_microbatches = torch.zeros(()), {}, [], 0
    for shard in shards:
        rows += shard["idx"].tolist()
        for microbatch in shard.make_microbatch_iterator_for_packable_sequences():
            num_microbatches += 1
            logits, starts = packed(microbatch, model)
            wrapped = wrapper(build_loss(SETTINGS[setting]), prepare, starts, None, 0, group, None)
            loss, metrics = wrapped(logits, microbatch, *counts(data).values())
            total = total + loss
            summed = {name: summed.get(name, 0.0) + number for name, number in metrics.items()}
    total.backward()
    assert sorted(rows) == list(range(ROWS))
    assert rows != sorted(rows), "the packer is meant to tear the step's order apart"
    assert num_microbatches > 2
    loss, gradient, metrics = unsharded(setting)
    torch.testing.assert_close(total.detach(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.grad, gradient, rtol=1e-4, atol=1e-7)
    assert gradient.abs().sum() > 0
    for name in set(metrics) - set(EXTREMES):
        assert summed[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), name
