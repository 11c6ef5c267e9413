"""The step-level part as NeMo-RL calls it, with plain dictionaries in place of NeMo-RL's batches."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.random import response_ids
from nemo_grpo.nemorl.advantage import VariantEstimator, group_ids, predicted_tokens
from nemo_grpo.nemorl.callbacks import calling_back
from nemo_grpo.nemorl.checkpoints import CARRIED, SideFiles, carried_statistics
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.recipe import load_recipe
from nemo_grpo.report.tokens import token_diagnostics
from nemo_grpo.run.diagnostics import StepDiagnostics
from nemo_grpo.run.folder import RunFolder
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants import parse_loss_fn

PROMPTS = torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4]])
MASK = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).float()


def estimator(context=None, **loss_fn):
    return VariantEstimator(parse_loss_fn(loss_fn), num_generations=2, context=context or StepContext())


def advantages(made, *rewards, mask=MASK, **given):
    """Of a step with these rewards; the policy's logprobs are 0 unless they are given."""
    logprobs = {"logprobs_policy": torch.zeros(4, 4)} | given
    return made.compute_advantage(PROMPTS, torch.tensor(rewards), mask, **logprobs)


def test_advantages_of_grpo_by_hand():
    prompts = torch.tensor([[1, 2]] * 4 + [[5, 0]] * 2 + [[1, 2]] * 2)  # the same prompt twice, and later
    assert group_ids(prompts, 2).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # std of (1, 0) with ddof 1 is 0.7071, so +-0.5 / 0.7071; the second group has no spread.
    found = advantages(estimator(variant="grpo", advantage_eps=0.0), 1.0, 0.0, 1.0, 1.0)
    a = 0.5**0.5
    expected = torch.tensor([[0, 0, a, a], [0, 0, -a, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(found, expected)
    assert found.dtype == torch.float32


def test_a_masked_response_counts_in_its_group_and_nowhere_else():
    """NeMo-RL masks what overlong filtering drops, and compares the others with it all the same."""
    mask = MASK.clone()
    mask[1] = 0  # the only sibling of response 0
    found = advantages(estimator(variant="gpg"), 1.0, 0.0, 1.0, 1.0, mask=mask)
    # three sequences train, one of them in a group with signal: alpha = 3, A = 0.5
    assert found.tolist() == [[0, 0, 1.5, 1.5], [0] * 4, [0] * 4, [0] * 4]
    found = advantages(estimator(variant="gpg"), 1.0, float("nan"), 1.0, 1.0, mask=mask)
    assert not found.any()  # a masked reward that is no number is left out


def test_a_response_without_a_reward_is_left_out_of_group_and_loss():
    context = StepContext()
    prompts = torch.tensor([[1, 2]] * 4)
    loss_fn = parse_loss_fn({"variant": "dr_grpo", "max_response_length": 4})
    made = VariantEstimator(loss_fn, num_generations=4, context=context)
    rewards = torch.tensor([1.0, float("nan"), 0.0, 0.0])
    found = made.compute_advantage(prompts, rewards, MASK, logprobs_policy=torch.zeros(4, 4))
    # the mean of (1, 0, 0) is 1/3
    assert found[:, 2].tolist() == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert context.train_tensors["sample_mask"].tolist() == [1, 0, 1, 1]
    assert made.last_metrics["reward/mean"] == pytest.approx(1 / 3)
    context.take_train_tensors()
    made.compute_advantage(prompts, rewards.nan_to_num(0), MASK, logprobs_policy=torch.zeros(4, 4))
    assert "sample_mask" not in context.train_tensors


def test_estimator_equals_the_objective_on_shifted_tensors():
    generator = torch.Generator().manual_seed(0)
    policy, reference = (-torch.rand(4, 4, generator=generator) for _ in range(2))
    entropies = torch.rand(4, 4, generator=generator)
    rewards, context = (1.0, 0.0, 0.5, 1.0), StepContext(entropies=entropies)
    settings = {"variant": "erpo", "num_buckets": 2}
    logprobs = {"logprobs_policy": policy, "logprobs_reference": reference}
    found = advantages(estimator(context, **settings), *rewards, **logprobs)
    batch = TokenBatch(
        prev_logprobs=policy[:, 1:],
        reference_policy_logprobs=reference[:, 1:],
        entropies=entropies[:, 1:],
        token_mask=MASK[:, 1:],
        sample_mask=torch.ones(4),
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor([0, 0, 1, 1]),
    )
    expected = parse_loss_fn(settings).build().prepare(batch)
    torch.testing.assert_close(found[:, 1:], expected.advantages, rtol=0, atol=0)
    assert found[:, 0].abs().sum() == 0
    assert expected.advantages.abs().sum() > 0
    assert context.entropies is None, "entropies of one step must not be read by the next"


@pytest.mark.parametrize("folds", [False, True], ids=["batch", "data plane"])
def test_an_outlier_is_safe_and_an_implausible_advantage_is_named(folds, caplog):
    settings = {"variant": "grpo", "use_leave_one_out_baseline": True}
    made = VariantEstimator(parse_loss_fn(settings), num_generations=4, folds=folds)
    prompts, mask = torch.ones(4, 2, dtype=torch.int64), torch.tensor([[0.0, 1.0, 1.0]] * 4)

    def found(*rewards):
        return made.compute_advantage(prompts, torch.tensor(rewards), mask, logprobs_policy=torch.zeros(4, 3))

    assert found(0.05, 1.4, 1.4, 1.4)[0].tolist() == pytest.approx([0, -1.35, -1.35])
    assert caplog.text == ""
    assert found(0.05, 1.4, 1.4001, 1.4001)[0, 1] < -1e4
    assert "step 2: group 0 has an advantage of -2" in caplog.text


@pytest.mark.parametrize("threshold", [None, 2.0])
def test_metrics_of_scored_logprobs_stay_where_the_threshold_needs_a_scoring_pass(threshold):
    forced = ["loss_fn.force_on_policy_ratio=true", f"grpo.seq_logprob_error_threshold={threshold or 'null'}"]
    recipe = load_recipe("cluster-quickstart", forced)
    e = VariantEstimator.of(recipe, StepContext())
    advantages(e, 1.0, 0.0, 1.0, 1.0)
    assert not [name for name in e.last_metrics if name.startswith("mismatch/")], "a 0 would say: no mismatch"
    advantages(e, 1.0, 0.0, 1.0, 1.0, generation_logprobs=torch.full((4, 4), -0.5))
    assert e.last_metrics.get("mismatch/logprob_abs_mean") == (threshold and 0.5)


def test_draws_follow_the_step_and_resume_where_they_were():
    def weights(first_step, num_steps):
        context = StepContext()
        config = parse_loss_fn({"variant": "tr_grpo", "weighting": "random"})
        e = VariantEstimator(config, num_generations=2, seed=3, step=first_step, context=context)
        policy = -torch.arange(16.0).view(4, 4)
        for _ in range(num_steps):
            advantages(e, 1.0, 0.0, 1.0, 0.0, logprobs_policy=policy, logprobs_reference=torch.zeros(4, 4))
        return context.take_train_tensors()["token_weights"]

    assert weights(0, 1).shape == MASK.shape
    assert not torch.equal(weights(0, 1), weights(0, 2))
    assert torch.equal(weights(0, 2), weights(1, 1))


def test_missing_tensors_are_named():
    given = {}
    for variant, name, message in (
        ("grpo", "logprobs_policy", "no logprobs of the policy"),
        ("erpo", "logprobs_reference", "reference_policy_kl_penalty"),
        ("erpo", "entropies", "entropies"),
    ):
        with pytest.raises(UserError, match=message):
            estimator(variant=variant).compute_advantage(PROMPTS, torch.ones(4), MASK, **given)
        given[name] = torch.zeros(4, 4)


def test_a_mean_over_groups_is_one_whether_or_not_a_response_is_empty():
    """NeMo-RL divides the weighted sum by all rows, also by those without a token."""
    context, mask = StepContext(), MASK.clone()
    mask[3] = 0
    made = estimator(context, variant="grpo", aggregation="group_token_mean")
    advantages(made, 1.0, 0.0, 1.0, 0.0, mask=mask)
    factors = context.take_train_tensors()["row_factors"]
    # three responses have tokens: 3 / 2 groups / 3 or 2 tokens
    assert factors.tolist() == pytest.approx([0.5, 0.5, 0.75, 0.75])
    factors = factors * context.take_row_scale(torch.ones(4))
    assert (factors[:, None] * mask[:, 1:]).sum() / 4 == pytest.approx(1.0)
    assert context.take_row_scale(torch.ones(4)) == 1.0  # no step before it
    advantages(made, 1.0, 0.0, 1.0, 0.0)
    assert context.take_row_scale(torch.ones(4)) == 1.0


def test_what_a_variant_carries_goes_from_step_to_step_and_through_a_checkpoint(tmp_path):
    loss_fn = {"variant": "erpo", "entropy_statistics": "moving", "entropy_momentum": 0.5}

    def step(e, entropy):
        e.context.entropies = torch.full((4, 4), entropy)
        advantages(e, *range(4), logprobs_reference=torch.zeros(4, 4))

    whole = estimator(**loss_fn)
    step(whole, 1.0)
    manager = SimpleNamespace(init_tmp_checkpoint=lambda: str(tmp_path))
    side = Mock(name_or_path=str(tmp_path))
    with calling_back([SideFiles(side, side, whole)], checkpointer=manager):
        manager.init_tmp_checkpoint()
    step(whole, 3.0)
    assert whole.carried == {"mean": 2.0, "variance": 1.0}

    config, resumed = parse_loss_fn(loss_fn), estimator(**loss_fn)
    begins = SimpleNamespace(get_latest_checkpoint_path=lambda: None)
    assert carried_statistics(config, begins) == {}
    manager.get_latest_checkpoint_path = lambda: str(tmp_path)
    resumed.carried = carried_statistics(config, manager)
    step(resumed, 3.0)
    assert resumed.carried == whole.carried

    (tmp_path / CARRIED).unlink()
    with pytest.raises(UserError, match=r"erpo carries statistics .*nemo_grpo.json has none .*; resume"):
        carried_statistics(config, manager)
    assert carried_statistics(parse_loss_fn({"variant": "erpo"}), manager) == {}  # needs none


def conversation(prompt, *turns):
    """NeMo-RL's: what the environment says stands between the answers, and behind the last one."""
    log = [{"role": "user", "token_ids": torch.tensor(prompt)}]
    for turn in turns:
        log.append({"role": "assistant", "token_ids": torch.tensor(turn)})
        log.append({"role": "environment", "token_ids": torch.tensor([9])})
    return log


def test_random_draws_equal_the_embedded_engines_for_any_logprobs():
    loss_fn = {"variant": "tr_grpo", "weighting": "random", "reference_policy_kl_penalty": 0.0}
    logs = [conversation([1, 2], [7, 8]), conversation([1, 2], [7]), conversation([3, 4], [5, 6])]
    logs.append(conversation([3, 4], [5, 6]))  # twice the same
    ids = response_ids([([1, 2], [7, 8]), ([1, 2], [7]), ([3, 4], [5, 6]), ([3, 4], [5, 6])])
    batch = TokenBatch(
        prev_logprobs=torch.zeros(4, 3),
        token_mask=MASK[:, 1:].bool(),
        sample_mask=torch.ones(4).bool(),
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        group_ids=torch.tensor([0, 0, 1, 1]),
        response_ids=ids,
    )
    expected = parse_loss_fn(loss_fn).build().prepare(batch, seed=0).token_weights
    assert not torch.equal(expected[2], expected[3])
    for logprobs in (-torch.ones(4, 4), -torch.rand(4, 4)):
        context = StepContext()
        estimator(context, **loss_fn).compute_advantage(
            PROMPTS, batch.rewards, MASK, {"message_log": logs}, logprobs_policy=logprobs
        )
        counts = MASK[:, 1:].bool()
        assert torch.equal(context.train_tensors["token_weights"][:, 1:][counts], expected[counts])


ROWS = [[1, 2, 5, 6], [1, 2, 7], [3, 4, 5, 8], [3, 4, 9, 5]]
LOGS = [
    [{"role": "user", "token_ids": row[:2]}, {"role": "assistant", "token_ids": torch.tensor(row[2:])}]
    for row in ROWS
]
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0])
LOGPROBS = -torch.rand(4, 4, generator=torch.Generator().manual_seed(0))


def token_text(ids):
    return str(ids[0])


def test_estimator_measures_the_step_as_the_embedded_engine_does(tmp_path):
    config = parse_loss_fn({"variant": "grpo"})
    folder = RunFolder(tmp_path)
    assert not StepDiagnostics(folder, 0, token_text).is_due(1)
    diagnostics = StepDiagnostics(folder, 2, token_text)
    made = VariantEstimator(config, num_generations=2, diagnostics=diagnostics)
    logged = []
    for _ in range(4):
        prompts = torch.tensor([row[:2] for row in ROWS])
        made.compute_advantage(prompts, REWARDS, MASK, {"message_log": LOGS}, logprobs_policy=LOGPROBS)
        logged.append("tokens/gradient_cv" in made.last_metrics)
    rows = [json.loads(line) for line in (tmp_path / "diagnostics.jsonl").read_text("utf-8").splitlines()]
    assert [row.pop("step") for row in rows] == [1, 2, 4]
    assert logged == [True, True, False, True]
    batch = TokenBatch(
        prev_logprobs=LOGPROBS[:, 1:],
        token_mask=MASK[:, 1:],
        sample_mask=torch.ones(4, dtype=torch.bool),
        rewards=REWARDS,
        group_ids=torch.tensor([0, 0, 1, 1]),
    )
    objective = config.build()
    ids = predicted_tokens(LOGS, 3)
    assert ids.tolist() == [[2, 5, 6], [2, 7, 0], [4, 5, 8], [4, 9, 5]], "those behind each column"
    numbers, details = token_diagnostics(objective, objective.prepare(batch), ids, str)
    assert rows[0] == json.loads(json.dumps(details))
    assert {name: made.last_metrics[name] for name in numbers} == numbers
