"""Diagnostics of a step's tokens, against numbers worked out by hand."""

import json
import math
from dataclasses import replace

import pytest
import torch

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.engine.step_metrics import mean_scores, signal_shares
from nemo_grpo.report import tokens
from nemo_grpo.report.tokens import (
    CURVE_SHARES,
    covariance_table,
    loss_gradients,
    probability_bins,
    token_diagnostics,
    token_tables,
    top_shares,
)
from nemo_grpo.run.groups import Group, Scored, assemble
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.tasks import Problem
from nemo_grpo.variants import VARIANTS, build_objective

PROBABILITY = torch.tensor([[0.5, 0.25, 0.9], [0.5, 0.8, 0.3]])
MASK = torch.tensor([[True, True, False], [True, True, True]])
IDS = torch.tensor([[4, 7, 9], [4, 7, 7]])


def batch(probability=PROBABILITY):
    """Two responses of one group, of 2 and 3 tokens, rewards 1 and 0: advantages +-1 / sqrt 2."""
    return TokenBatch(
        prev_logprobs=probability.log(),
        token_mask=MASK,
        sample_mask=torch.tensor([True, True]),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        reference_policy_logprobs=probability.log(),
        entropies=torch.tensor([[0.1, 0.2, 9.0], [0.3, 0.4, 1.0]]),
    )


def test_gradient_of_a_sequence_mean_is_by_each_responses_length():
    objective = build_objective("grpo", aggregation="sequence_mean")
    gradient = loss_gradients(objective, objective.prepare(batch()))
    advantage = 0.5 / (math.sqrt(0.5) + 1e-6)
    # N = 5 tokens, 2 sequences: 5 A / (2 x 2 tokens) and 5 A / (2 x 3 tokens)
    torch.testing.assert_close(gradient[0, 0].item(), 5 * advantage / 4)
    torch.testing.assert_close(gradient[1, 0].item(), 5 * advantage / 6)


def test_a_large_step_is_measured_on_its_first_whole_groups(monkeypatch):
    one, both = batch(), torch.tensor([0, 1, 2, 3])
    two = TokenBatch(
        prev_logprobs=torch.cat([one.prev_logprobs, one.prev_logprobs.flip(0) * 2]),
        token_mask=MASK.repeat(2, 1),
        sample_mask=torch.ones(4, dtype=torch.bool),
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        group_ids=torch.tensor([5, 5, 3, 3]),
    )
    objective = build_objective("grpo")
    ids = IDS.repeat(2, 1)
    measured = {}
    for limit in (10, 9, 4):  # both groups have 5 tokens; a single one is never cut
        monkeypatch.setattr(tokens, "MAX_MEASURED", limit)
        measured[limit] = token_diagnostics(objective, objective.prepare(two), ids, str)[1]
    assert [row["num_tokens"] for row in measured.values()] == [10, 5, 5]
    alone = token_diagnostics(objective, objective.prepare(two.select(both[2:])), ids[2:], str)[1]
    assert measured[9] == measured[4] == alone  # group 3, the lowest number


def test_top_shares_are_sums_of_the_largest():
    values = torch.tensor([1.0, 5.0, 0.0, 2.0, 2.0])  # sorted 5 2 2 1 0 of 10
    assert top_shares(values, (0.2, 0.4, 1.0, 0.0001)) == [0.5, 0.7, 1.0, 0.5]  # at least one counts
    assert top_shares(torch.zeros(3), (0.5,)) == [0.0]


def test_covariance_table_is_per_sign_from_the_extreme_inwards():
    covariance = torch.tensor([3.0, -8.0, 1.0, 0.0, 2.0, -4.0, 5.0, 4.0])  # positive: 5 4 3 2 1
    table = covariance_table(covariance)
    assert table["share"] == [0.0001, 0.01, 0.2, 0.4, 1.0]
    assert table["positive"] == [5, 5, 5, 4, 1]  # one, one, one, two, all five
    assert table["negative"] == [-8, -8, -8, -8, -4]  # 0.4 of two is one
    assert covariance_table(torch.zeros(4))["positive"] == [0.0] * 5


def test_bins_are_by_probability():
    bins = probability_bins(
        torch.tensor([0.05, 0.05, 0.95, 1.0]),
        torch.tensor([1.0, 3.0, 4.0, 6.0]),
        torch.tensor([1.0, 2.0, 1.0, 0.0]),
    )
    assert bins["tokens"] == [0.5, *[0.0] * 8, 0.5]  # a probability of 1 belongs to the last bin
    assert bins["coefficient"] == [2.0, *[0.0] * 8, 5.0]
    assert bins["gradient"] == [0.75, *[0.0] * 8, 0.25]


def test_token_tables_rank_entries_that_come_often_enough():
    ids = torch.tensor([1] * 5 + [2] * 5 + [3] * 4)  # the third comes four times only
    probability = torch.tensor([0.2] * 5 + [0.4] * 5 + [0.9] * 4)
    covariance = torch.tensor([-2.0] * 5 + [1.0] * 5 + [0.0] * 4)
    tables = token_tables(ids, probability, covariance, 1 - probability, lambda token: f"t{token}")
    # gradient: 5 x 0.8 + 5 x 0.6 + 4 x 0.1 = 7.4
    one, two = ["t1", 5, 0.2, round(4 / 7.4, 5)], ["t2", 5, 0.4, round(3 / 7.4, 5)]
    assert tables["likely"] == [two, one]
    assert tables["unlikely"] == [one, two]
    assert tables["gradient"] == [one, two]
    assert tables["covariance"] == [["t1", 5, 0.2, round(10 / 15, 5)], ["t2", 5, 0.4, round(5 / 15, 5)]]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_is_summed_up_and_padding_does_not_count(variant):
    objective = build_objective(variant, **({"max_response_length": 10} if variant == "dr_grpo" else {}))
    rows = []
    for garbage in (0.9, 0.01):
        probability = PROBABILITY.clone()
        probability[0, 2] = garbage
        prepared = objective.prepare(batch(probability))
        rows.append(token_diagnostics(objective, prepared, IDS, str))
    assert rows[0] == rows[1]
    numbers, row = rows[0]
    assert row["num_tokens"] == 5
    assert row["cumulative"]["covariance"][-1] == 1
    assert len(row["cumulative"]["gradient"]) == len(CURVE_SHARES)
    assert row["entropy"]["p50"] == pytest.approx(0.3)
    assert numbers["tokens/entropy_top5_share"] == pytest.approx(1.0 / 2.0)  # one of five, 1.0 of 2.0
    json.dumps(row, allow_nan=False)


def test_covariance_is_centred_per_response_and_group():
    objective = build_objective("grpo")
    _, row = token_diagnostics(objective, objective.prepare(batch()), IDS, str)
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    first = [math.log(0.5), math.log(0.25)]
    second = [math.log(p) for p in (0.5, 0.8, 0.3)]
    c = [a * (x - sum(first) / 2) for x in first] + [-a * (x - sum(second) / 3) for x in second]
    assert row["covariance"]["positive"][0] == pytest.approx(max(c), rel=1e-5)
    assert row["covariance"]["negative"][0] == pytest.approx(min(c), rel=1e-5)
    empty = objective.prepare(replace(batch(), token_mask=torch.zeros_like(MASK)))
    assert token_diagnostics(objective, empty, IDS, str) == ({}, {})


def group(*responses):
    """One group; of each response accuracy, reward and, if it is, that it is truncated."""
    zero, made = torch.zeros(1), []
    for accuracy, reward, *truncated in responses:
        sampled = Response(zero, zero, zero == 0, any(truncated), "")
        made.append(Scored(sampled, {"accuracy": accuracy}, reward))
    return Group(Problem("1", "?", "!"), [0], made)


def test_drawn_groups_are_counted_as_too_easy_too_hard_or_useful():
    drawn = [group((1, 1), (1, 1)), group((0, 0), (0, 0)), group((0, 0), (0, 1)), group((0, 0), (1, 1))]
    shares = {"rollout/all_right": 0.25, "rollout/all_wrong": 0.5}
    assert shares.items() <= mean_scores(drawn, drawn).items()
    assert signal_shares(drawn) == {"rollout/with_signal": 0.5}  # a format reward alone gives signal too


@pytest.mark.parametrize(("drop_truncated", "of_use"), [(False, 1.0), (True, 2 / 3)])
def test_a_group_of_which_overlong_filtering_leaves_nothing_is_no_signal(drop_truncated, of_use):
    right, wrong, cut = (1, 1), (0, 0), (0, 0, True)
    drawn = [group(cut, right, right), group(wrong, right, cut), group(cut, cut, (0, 1, True))]
    assert signal_shares(drawn, drop_truncated=drop_truncated)["rollout/with_signal"] == of_use
    step = assemble(drawn)
    if drop_truncated:
        step = replace(step, sample_mask=~step.truncated)
    batch = step.token_batch(step.generation_logprobs, None, None)
    prepared = build_objective("dapo").prepare(batch)
    assert int(prepared.advantages.view(3, 3, -1).any(2).any(1).sum()) == round(3 * of_use)


def test_released_cw_grpo_is_looked_at_group_by_group():
    one = batch()
    names = ("prev_logprobs", "token_mask", "sample_mask", "rewards", "reference_policy_logprobs")
    twice = {name: torch.cat([getattr(one, name)] * 2) for name in names}
    step = TokenBatch(**twice, group_ids=torch.tensor([0, 0, 1, 1]))
    objective = build_objective("cw_grpo", author_compat=True)
    gradient = loss_gradients(objective, objective.prepare(step))
    torch.testing.assert_close(gradient[:2], gradient[2:])
    assert (gradient[~step.token_mask] == 0).all()
