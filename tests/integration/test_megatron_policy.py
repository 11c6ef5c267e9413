"""The policy on megatron-core against transformers and plain torch: values, one update, checkpoints."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from small_models import LLAMA3_ROPE, TRAINED, small_config
from toy_policies import (
    SETTINGS,
    assert_equal,
    hf_model,
    policy_of,
    rollout,
    step,
    token_batch,
    train,
    weights_of,
)
from transformers import AutoModelForCausalLM

from nemo_grpo import UserError, build_objective, global_counts
from nemo_grpo.core.batch import PreparedBatch
from nemo_grpo.core.objective import TokenTerms
from nemo_grpo.engine.megatron.layers import CausalAttention
from nemo_grpo.engine.megatron.model import transformer_config
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.megatron.policy_checkpoint import begin_save, load_policy
from nemo_grpo.models import COMPUTED, read_spec
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer, MegatronScheduler


@pytest.fixture(params=TRAINED)
def reference(request):
    return hf_model(request.param)


@pytest.fixture
def model():
    return hf_model()


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


@pytest.mark.parametrize(
    "change",
    [
        {"original_max_position_embeddings": 16},
        {"original_max_position_embeddings": 64, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
    ],
)
def test_rotations_have_the_models_own_scaling(change):
    """Other numbers than Llama 3.1's."""
    rope = LLAMA3_ROPE | {"rope_theta": 100.0} | change
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(small_config("llama3-rope", rope_parameters=rope)).float()
    policy = policy_of(reference)
    expected = reference.model.rotary_emb.inv_freq
    torch.testing.assert_close(policy.model.rotary_pos_emb.inv_freq.cpu(), expected, rtol=1e-6, atol=0)


def test_packed_sequences_pass_the_model_without_padding(model):
    """Prompts of 5, 3 and 4 tokens once; of the responses all but the last tokens, which predict nothing."""
    policy, (sequences, _) = policy_of(model), rollout()
    passed: list[tuple[int, ...]] = []
    policy.model.embedding.register_forward_pre_hook(
        lambda _module, _args, given: passed.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    policy.score(sequences, micro_batch_size=9, temperature=1.0)
    policy.score(sequences, micro_batch_size=9, temperature=1.0, mb_tokens=1000)
    num_predicting = 8 + 0 + 3 + 5 + 1 + 6 + 2 + 2 + 7
    assert passed == [(9, 13), (1, 5 + 3 + 4 + num_predicting)]


def textbook_update(reference, optimizer, result):
    """An update by GRPO in plain torch; its loss and its gradient norm are the policy's."""
    sequences, rewards = step()
    objective = build_objective("grpo")
    current = textbook_logprobs(reference, sequences)[0]
    prepared = objective.prepare(token_batch(sequences, rewards, current.detach()))
    toks, seqs = global_counts(prepared.batch)
    part = prepared.select(slice(None), next_token_logprobs=current)
    loss, _ = objective.loss(part, global_valid_toks=toks, global_valid_seqs=seqs)
    optimizer.zero_grad()
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.05)
    optimizer.step()
    assert norm > 0.05  # clipping acts
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert result.metrics["loss/total"] == pytest.approx(loss.item(), abs=1e-6)


def test_one_update_equals_torch(reference):
    """Loss, gradient norm, clipping, AdamW with decay on matrices only: as in plain torch."""
    policy = policy_of(reference)
    matrices = [p for p in reference.parameters() if p.ndim > 1]
    vectors = [p for p in reference.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    textbook_update(reference, optimizer, *train(policy))
    expected = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(weights_of(policy), expected, rtol=1e-4, atol=2e-5)


def test_author_compat_trains_with_whole_groups_as_microbatches(model):
    policy, (sequences, rewards) = policy_of(model, keep_reference=True), step()
    prev, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    objective = build_objective("cw_grpo", author_compat=True)
    prepared = objective.prepare(token_batch(sequences, rewards, prev, reference_policy_logprobs=prev))
    result = policy.update(objective, prepared, sequences, micro_batch_size=1, temperature=1.0)
    assert result.grad_norm > 0


def assert_reference_comes_and_goes(policy):
    """Training changes the scores; those of the reference are the first ones, and do not stay."""
    score = partial(policy.score, step()[0], micro_batch_size=6, temperature=1.0)
    before = score()
    train(policy, 2)
    after = score()
    with policy.reference_weights():
        assert_equal(score(), before)
    assert_equal(score(), after)
    assert not torch.equal(after.logprobs, before.logprobs)


def test_reference_weights_come_and_go(model):
    assert_reference_comes_and_goes(policy_of(model, keep_reference=True))


def infinitely_steep(prepared: PreparedBatch) -> TokenTerms:
    """Terms of 0 whose derivative is infinite."""
    current = prepared.batch.next_token_logprobs
    return TokenTerms(torch.sqrt(current - current.detach()))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(model, what):
    policy, (sequences, rewards) = policy_of(model), step()
    prev, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    objective = build_objective("grpo")
    if what == "loss":
        prev[0, 3] = float("nan")
    else:
        objective = replace(objective, terms=infinitely_steep)
    before = weights_of(policy)
    prepared = objective.prepare(token_batch(sequences, rewards, prev))
    result = policy.update(objective, prepared, sequences, micro_batch_size=6, temperature=1.0)
    assert result.skipped
    assert math.isfinite(result.metrics["loss/total"]) == (what == "gradient")
    assert_equal(weights_of(policy), before)


def scheduled(distributed):
    """Sections with a schedule, which a checkpoint must restore too."""
    return (
        MegatronOptimizer(lr=1e-2, min_lr=1e-3, weight_decay=0.0, use_distributed_optimizer=distributed),
        MegatronScheduler(lr_decay_style="linear", lr_decay_iters=5),
    )


def assert_resumes_exactly(unbroken, other, folder):
    """From a checkpoint of ``unbroken`` in the folder, in a policy that began otherwise."""
    train(unbroken, 2)
    begin_save(unbroken, folder, 2).finish()
    load_policy(other, folder)
    resumed = train(other, 2)
    assert resumed == train(unbroken, 2)  # loss, gradient norm and learning rate to the last bit
    assert [update.lr for update in resumed] == pytest.approx([6.4e-3, 4.6e-3])  # 2/5 and 3/5 of the way
    assert_equal(weights_of(other), weights_of(unbroken))


@pytest.mark.parametrize("distributed", [True, False])
def test_checkpoint_restores_model_optimizer_and_schedule_exactly(model, tmp_path, distributed):
    unbroken, other = (policy_of(m, *scheduled(distributed)) for m in (model, other_model()))
    assert_resumes_exactly(unbroken, other, tmp_path / "weights")


def other_model():
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(small_config()).float()


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
    other = policy_of(other_model())
    with caplog.at_level("INFO"):
        load_policy(other, tmp_path / "weights")
    assert "2 FP8 states begin anew" in caplog.text
    assert taken == [None, None]
    assert_equal(weights_of(other), weights_of(policy))
    asked = other.sharded_state_dict
    gate = {"decoder.layers.0.gate": ShardedObject("gate", None, (1,), (0,))}
    other.sharded_state_dict = lambda loading: asked(loading=loading) | {"more": gate}
    with pytest.raises(CheckpointingException, match="gate"):
        load_policy(other, tmp_path / "weights")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "model_type=gemma3 is not supported; supported: llama, mistral"),
        ({"model_type": "qwen3_moe"}, "model_type=qwen3_moe is not supported; .* qwen3$"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling"),
        (
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
            "sliding_window=16",
        ),
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
