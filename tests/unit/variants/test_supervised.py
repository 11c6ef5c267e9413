"""The supervised objective by hand; its invariances are tested with the variants' (`steps.FURTHER`)."""

import pytest
import torch

from nemo_grpo import TokenBatch, UserError, build_objective


def test_loss_is_the_mean_cross_entropy_of_the_tokens_that_count():
    """Two demonstrations of 3 and 1 tokens, -log p of 1, 2, 3 and 6 nats: 12 / 4, whatever rewards say."""
    logprobs = torch.tensor(
        [[-1.0, -2.0, -3.0], [-6.0, -50.0, -50.0]], dtype=torch.float64, requires_grad=True
    )
    mask = torch.tensor([[True, True, True], [True, False, False]])
    objective = build_objective("sft")
    batch = TokenBatch(
        prev_logprobs=torch.zeros_like(logprobs),
        token_mask=mask,
        sample_mask=torch.ones(2, dtype=torch.bool),
        rewards=torch.tensor([0.0, 0.0], dtype=torch.float64),
        group_ids=torch.tensor([0, 1]),
    )
    rows = objective.prepare(batch).select(slice(None), next_token_logprobs=logprobs)
    loss, metrics = objective.loss(rows, global_valid_toks=4.0, global_valid_seqs=2.0)
    assert loss.item() == pytest.approx(3.0)
    assert float(metrics["loss/total"]) == pytest.approx(3.0)
    loss.backward()
    assert torch.equal(logprobs.grad, -mask.double() / 4)


def test_parameters_of_rollout_losses_are_refused():
    with pytest.raises(UserError, match="aggregation=sequence_mean: sft has no parameters; leave it out"):
        build_objective("sft", aggregation="sequence_mean")
    with pytest.raises(UserError, match="ratio_clip_min is not a parameter of sft"):
        build_objective("sft", ratio_clip_min=0.1)
