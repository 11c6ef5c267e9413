"""What a step leaves behind, number by number, and which rows are computed together."""

import pytest
import torch

from nemo_grpo.core.objective import as_kept
from nemo_grpo.engine.learning import TrainingState
from nemo_grpo.engine.megatron.microbatches import UpdateResult, by_gradient, plan_groups, plan_rows
from nemo_grpo.engine.step_metrics import mean_metrics, mean_scores, note, sampled_metrics, signal_shares
from nemo_grpo.report.runs import validation_note
from nemo_grpo.run.groups import Group, Scored, assemble
from nemo_grpo.run.samples import sample_rows
from nemo_grpo.sampling.episodes import Episode, Response
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.scoring import over_sets


def response(accuracy: float, *, cut: bool = False, num_tokens: int = 1, **further) -> Scored:
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    sampled = Response(tokens, torch.zeros(num_tokens), mask, cut, "text", **further)
    return Scored(sampled, {"accuracy": accuracy, "format": 0.5}, 2 * accuracy + 0.5)


def group(*responses: Scored, name: str = "p") -> Group:
    return Group(Problem(name, "1 + 1?", "2"), [7], list(responses))


def test_scores_are_means_over_all_responses():
    groups = [group(response(1.0), response(0.0, cut=True)), group(response(1.0))]
    assert mean_scores(groups, groups) == {
        "reward/accuracy": pytest.approx(2 / 3),
        "reward/format": 0.5,
        "reward/not_finite": 0.0,
        "reward/abstained": 0.0,
        "rollout/all_right": 0.5,
        "rollout/all_wrong": 0.0,
        "length/truncated": pytest.approx(1 / 3),
    }


def test_metrics_of_all_sampled_groups_stand_beside_those_of_the_trained_groups():
    """Group b is dropped: rewards 2.5 and 0.5 of a, 2.5 twice of b; lengths 1, 3, 5, 5."""
    kept = group(response(1.0), response(0.0, num_tokens=3), name="a")
    dropped = group(response(1.0, num_tokens=5), response(1.0, num_tokens=5), name="b")
    assert sampled_metrics(assemble([kept, dropped])) == {
        "reward/mean": 2.0,
        "reward/std": pytest.approx(1.0),
        "reward/group_std": pytest.approx(2**0.5 / 2),
        "length/mean": 3.5,
        "length/max": 5.0,
    }
    row = as_kept({"reward/mean": 1.5, "length/mean": 2.0, "loss/total": 0.1})
    assert row == {"kept/reward/mean": 1.5, "kept/length/mean": 2.0, "loss/total": 0.1}


def test_turns_are_means_over_the_responses_that_have_some():
    counts = {name: 0 for name in Episode.__dataclass_fields__}
    first = next(iter(counts))
    episodes = [Episode(**counts | {first: number}) for number in (1, 4)]
    groups = [group(*(response(1.0, episode=one) for one in episodes), response(0.0))]
    found = mean_scores(groups, groups)
    assert found[f"episode/{first}"] == 2.5


def test_metrics_of_several_validation_sets_and_their_means():
    """The sets' errors are independent: the mean's is sqrt(0.3^2 + 0.4^2) / 2."""
    one = {"accuracy": 0.2, "accuracy_stderr": 0.3}
    found = over_sets({"a": one, "b": {"accuracy": 0.6, "accuracy_stderr": 0.4}})
    means = {"accuracy": pytest.approx(0.4), "accuracy_stderr": pytest.approx(0.25)}
    of_sets = {"a/accuracy": 0.2, "a/accuracy_stderr": 0.3, "b/accuracy": 0.6, "b/accuracy_stderr": 0.4}
    assert found == means | of_sets
    assert over_sets({"": one}) == one
    row = {f"validation/{name}": value for name, value in found.items()}
    assert validation_note(row) == "accuracy 0.400, a 0.200, b 0.600"
    told = note({"reward/mean": 0.256, "reward/accuracy": 0.5, "tokens_per_second": 10.4, "lr": 1.0} | row)
    assert told == "accuracy 0.400  reward 0.26  right 50%  10 tokens/s"
    assert validation_note({"validation/val_loss": 1.5, "loss/total": 1}) == "held-out loss 1.500"


def test_shares_are_of_all_drawn_groups():
    """Right; wrong; mixed; mixed, but all are cut off."""
    drawn = [
        group(response(1.0), response(1.0)),
        group(response(0.0), response(0.0)),
        group(response(1.0), response(0.0)),
        group(*(response(reward, cut=True) for reward in (1.0, 0.0, 0.0))),
    ]
    shares = {"rollout/all_right": 0.25, "rollout/all_wrong": 0.25}
    assert shares.items() <= mean_scores(drawn[:1], drawn).items()
    assert signal_shares(drawn) == {"rollout/with_signal": 0.5}
    assert signal_shares(drawn, drop_truncated=True) == {"rollout/with_signal": 0.25}


FINITE = UpdateResult({"loss/total": 1.0}, 2.0, 0.1)
SKIPPED = UpdateResult({"loss/total": 3.0}, 6.0, 0.3, skipped=True)


def test_updates_of_a_step_are_averaged():
    assert mean_metrics([FINITE, SKIPPED]) == {"loss/total": 2.0, "grad_norm": 4.0, "lr": pytest.approx(0.2)}
    assert mean_metrics([]) == {}


def test_a_step_is_skipped_if_all_its_updates_are():
    state = TrainingState()
    for updates in ([SKIPPED], [SKIPPED, SKIPPED], [FINITE, SKIPPED], [], [SKIPPED]):
        state.count(updates, num_tokens=3)
    assert (state.step, state.tokens) == (5, 15)
    assert (state.skipped, state.skipped_in_a_row, state.no_signal) == (3, 1, 1)


class Decodes:
    """A tokenizer that hides its mark unless it is asked not to."""

    def decode(self, tokens, skip_special_tokens=True):
        return f"{'' if skip_special_tokens else '<user>'}{tokens}"


def test_samples_are_a_steps_first_responses():
    groups = [group(response(1.0, num_tokens=3)), group(response(0.0, cut=True), response(1.0), name="q")]
    first, second = sample_rows(4, groups, 2, Decodes())
    assert first == {
        **{"step": 4, "problem": "p", "question": "1 + 1?", "answer": "2", "response": "text"},
        "prompt": "<user>[7]",
        **{"reward": 2.5, "scores": {"accuracy": 1.0, "format": 0.5}, "truncated": False, "num_tokens": 3},
    }
    assert (second["problem"], second["reward"], second["truncated"]) == ("q", 0.5, True)


def test_rows_go_round_the_ranks_by_length():
    lengths = torch.tensor([3, 9, 5, 7, 4])
    assert [rows.tolist() for rows in plan_rows(lengths, 2)] == [[1, 3], [2, 4], [0]]
    shares = [[rows.tolist() for rows in plan_rows(lengths, 2, (rank, 2))] for rank in range(2)]
    assert shares == [[[1, 2], [0]], [[3, 4]]]
    ids = torch.tensor([5, 3, 5, 8, 3])
    assert [rows.tolist() for rows in plan_groups(ids, (0, 2))] == [[1, 4], [3]]
    assert [rows.tolist() for rows in plan_groups(ids, (1, 2))] == [[0, 2]]


@pytest.mark.parametrize(
    ("has_gradient", "num_ranks", "computed", "left_out"),
    [
        ([1, 0, 1, 0], 2, [0, 2], [1, 3]),
        ([1, 0, 1, 0], 3, [0, 1, 2, 3], []),  # a rank would have none
        ([0, 0], 1, [0, 1], []),
    ],
)
def test_every_rank_has_a_row_to_compute(has_gradient, num_ranks, computed, left_out):
    rows, rest = by_gradient(torch.tensor(has_gradient).bool(), (0, num_ranks))
    assert (rows.tolist(), rest.tolist()) == (computed, left_out)
