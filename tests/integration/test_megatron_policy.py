"""The policy on megatron-core against transformers and plain torch: values, one update, checkpoints."""

from __future__ import annotations

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from small_models import TRAINED, small_config
from transformers import AutoModelForCausalLM

from checkpoints_conv.families import COMPUTED, read_spec
from nemo_grpo import TokenBatch, UserError, build_objective, global_counts
from nemo_grpo.engine.megatron.checkpoint import begin_save, load_policy
from nemo_grpo.engine.megatron.layers import CausalAttention
from nemo_grpo.engine.megatron.microbatches import plan_rows
from nemo_grpo.engine.megatron.model import transformer_config
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.rollout import Sequences
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer, MegatronScheduler

# eps well above rounding: with 1e-8 the last bit decides the update of a parameter whose gradient is 1e-8.
SETTINGS = MegatronOptimizer(lr=1e-2, weight_decay=0.1, adam_eps=1e-4, clip_grad=0.05)


@pytest.fixture(params=TRAINED)
def reference(request):
    """A transformers model with weights that no symmetry hides behind."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(request.param), attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def policy_of(model, sections=(SETTINGS,), keep_reference=False):
    policy = MegatronPolicy(model.config, *sections)
    policy.load_weights(dict(model.state_dict()), keep_reference=keep_reference)
    return policy


def step(seed=0, rows=6):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 17, (rows,), generator=generator)
    ids = torch.randint(96, (rows, 16), generator=generator)
    rewards = torch.rand(rows, generator=generator).round()
    rewards[:2] = torch.tensor([1.0, 0.0])
    return Sequences(ids, lengths), rewards


def token_batch(sequences, rewards, prev, **more):
    column = torch.arange(15)
    mask = (column >= 2) & (column < sequences.lengths[:, None] - 1)
    ids = torch.arange(len(rewards)) // 2
    return TokenBatch(
        prev_logprobs=prev,
        token_mask=mask,
        sample_mask=torch.ones(len(rewards)),
        rewards=rewards,
        group_ids=ids,
        **more,
    )


def textbook_logprobs(model, sequences):
    log_p = torch.log_softmax(model(sequences.input_ids).logits[:, :-1], -1)
    return log_p.gather(-1, sequences.input_ids[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def test_scores_equal_transformers(reference):
    sequences, _ = step()
    logprobs, entropies = policy_of(reference).score(sequences, micro_batch_size=4, temperature=1.0)
    with torch.no_grad():
        expected = textbook_logprobs(reference, sequences)
    inside = torch.arange(15) < sequences.lengths[:, None] - 1
    torch.testing.assert_close(logprobs[inside], expected[0][inside], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies[inside], expected[1][inside], rtol=1e-5, atol=1e-5)
    assert (logprobs[~inside] == 0).all()


def test_one_update_equals_torch(reference):
    """Loss, gradient norm, clipping, AdamW with decay on matrices only: as in plain torch."""
    policy, (sequences, rewards) = policy_of(reference), step()
    objective = build_objective("grpo")
    with torch.no_grad():
        prev = textbook_logprobs(reference, sequences)[0]
    prepared = objective.prepare(token_batch(sequences, rewards, prev))
    result = policy.update(objective, prepared, sequences, micro_batch_size=2, temperature=1.0)

    matrices = [p for p in reference.parameters() if p.ndim > 1]
    vectors = [p for p in reference.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        eps=1e-4,
    )
    toks, seqs = global_counts(prepared.batch)
    current = textbook_logprobs(reference, sequences)[0]
    part = prepared.select(slice(None), next_token_logprobs=current)
    loss, _ = objective.loss(part, global_valid_toks=toks, global_valid_seqs=seqs)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    optimizer.step()

    assert norm > 0.05  # clipping acts
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert result.metrics["loss/total"] == pytest.approx(loss.item(), abs=1e-6)
    expected = dict(reference.named_parameters())
    for name, tensor in policy.named_tensors():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-4, atol=2e-5, msg=name)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config()).float()


@pytest.mark.parametrize("name", ["grpo", "cw_grpo", "tr_grpo", "erpo", "gpg"])
def test_update_does_not_depend_on_the_microbatch_size(model, name):
    sequences, rewards = step()
    after = []
    for size in (1, 4, 6):
        policy = policy_of(model, keep_reference=True)
        prev, entropies = policy.score(sequences, micro_batch_size=size, temperature=0.8)
        with policy.reference_weights():
            reference, _ = policy.score(sequences, micro_batch_size=size, temperature=0.8)
        batch = token_batch(
            sequences,
            rewards,
            prev,
            entropies=entropies,
            reference_policy_logprobs=reference - 0.1 * entropies,
        )
        objective = build_objective(name)
        policy.update(objective, objective.prepare(batch), sequences, micro_batch_size=size, temperature=0.8)
        after.append(dict(policy.named_tensors()))
    for other in after[1:]:
        for key, tensor in after[0].items():
            torch.testing.assert_close(other[key], tensor, rtol=1e-4, atol=2e-6, msg=key)


def test_author_compat_trains_with_whole_groups_as_microbatches(model):
    policy, (sequences, rewards) = policy_of(model, keep_reference=True), step()
    prev, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    objective = build_objective("cw_grpo", author_compat=True)
    prepared = objective.prepare(token_batch(sequences, rewards, prev, reference_policy_logprobs=prev))
    result = policy.update(objective, prepared, sequences, micro_batch_size=1, temperature=1.0)
    assert result.grad_norm > 0


def test_reference_weights_come_and_go(model):
    policy, (sequences, rewards) = policy_of(model, keep_reference=True), step()
    before, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    objective = build_objective("gpg")
    prepared = objective.prepare(token_batch(sequences, rewards, before))
    policy.update(objective, prepared, sequences, micro_batch_size=6, temperature=1.0)
    after, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    with policy.reference_weights():
        reference, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    again, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    assert torch.equal(reference, before)
    assert torch.equal(again, after)
    assert not torch.equal(after, before)


def test_a_non_finite_loss_changes_nothing(model):
    policy, (sequences, rewards) = policy_of(model), step()
    prev, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    prev[0, 3] = float("nan")
    before = {name: tensor.clone() for name, tensor in policy.named_tensors()}
    objective = build_objective("grpo")
    prepared = objective.prepare(token_batch(sequences, rewards, prev))
    result = policy.update(objective, prepared, sequences, micro_batch_size=6, temperature=1.0)
    assert result.skipped
    for name, tensor in policy.named_tensors():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("distributed", [True, False])
def test_checkpoint_restores_model_optimizer_and_schedule_exactly(model, tmp_path, distributed):
    sections = (
        MegatronOptimizer(lr=1e-2, min_lr=1e-3, weight_decay=0.0, use_distributed_optimizer=distributed),
        MegatronScheduler(lr_decay_style="linear", lr_decay_iters=5),
    )
    sequences, rewards = step()

    def train(policy, steps):
        objective = build_objective("grpo")
        for _ in range(steps):
            prev, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
            prepared = objective.prepare(token_batch(sequences, rewards, prev))
            last = policy.update(objective, prepared, sequences, micro_batch_size=6, temperature=1.0)
        return last

    unbroken = policy_of(model, sections)
    train(unbroken, 2)
    begin_save(unbroken, tmp_path / "weights", 2).finish()
    expected = train(unbroken, 2)

    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(model.config).float()
    resumed = policy_of(other, sections)
    load_policy(resumed, tmp_path / "weights")
    result = train(resumed, 2)
    assert result == expected  # loss, gradient norm and learning rate to the last bit
    expected_tensors = dict(unbroken.named_tensors())
    for name, tensor in resumed.named_tensors():
        assert torch.equal(tensor, expected_tensors[name]), name


def test_a_checkpoint_of_local_layers_lacks_extra_states_and_nothing_else(
    model, tmp_path, caplog, monkeypatch
):
    policy = policy_of(model)
    begin_save(policy, tmp_path / "weights", 0).finish()
    taken = []
    # as Transformer Engine's attention has
    monkeypatch.setattr(CausalAttention, "get_extra_state", lambda self: None, raising=False)
    monkeypatch.setattr(
        CausalAttention, "set_extra_state", lambda self, state: taken.append(state), raising=False
    )
    torch.manual_seed(1)
    other = policy_of(AutoModelForCausalLM.from_config(model.config).float())
    with caplog.at_level("INFO"):
        load_policy(other, tmp_path / "weights")
    assert "2 FP8 states begin anew" in caplog.text
    assert taken == [None, None]
    expected = dict(policy.named_tensors())
    for name, tensor in other.named_tensors():
        assert torch.equal(tensor, expected[name])
    asked = other.sharded_state_dict
    gate = {"decoder.layers.0.gate": ShardedObject("gate", None, (1,), (0,))}
    other.sharded_state_dict = lambda loading: asked(loading=loading) | {"more": gate}
    with pytest.raises(CheckpointingException, match="gate"):
        load_policy(other, tmp_path / "weights")


def test_microbatches_hold_similar_lengths_and_every_row_once():
    plan = plan_rows(torch.tensor([3, 9, 5, 7, 4]), 2)
    assert [rows.tolist() for rows in plan] == [[1, 3], [2, 4], [0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "model_type=gemma3 is not supported; supported: llama, mistral"),
        ({"model_type": "qwen3_moe"}, "model_type=qwen3_moe is not supported; .* qwen3$"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling"),
        ({"sliding_window": 16, "use_sliding_window": True, "layer_types": None}, "sliding_window=16"),
    ],
)
def test_models_that_the_engine_would_compute_wrongly_are_refused(change, message):
    config = small_config("qwen2").to_dict() | change
    with pytest.raises(UserError, match=message):
        transformer_config(read_spec(config, among=COMPUTED), Layout(), torch.float32)


def test_weights_of_another_model_are_refused(model):
    wider = small_config(intermediate_size=80)
    with pytest.raises(UserError, match=r"gate_proj.weight is \[64, 32\], config.json says \[80, 32\]"):
        MegatronPolicy(wider, SETTINGS).load_weights(dict(model.state_dict()), keep_reference=False)
