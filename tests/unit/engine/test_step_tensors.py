"""A step's tensors and seeds, number by number: what layouts and resumes share and so cannot show."""

from types import SimpleNamespace

import pytest
import torch

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.engine.learning import Learner, TrainingState
from nemo_grpo.engine.megatron.microbatches import Scores
from nemo_grpo.engine.steps import shape
from nemo_grpo.run.groups import Group, Scored, Step, assemble
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.variants.grpo import GRPO


def response(
    tokens: list[int], mask: list[bool] | None = None, *, reward: float = 0.0, truncated: bool = False
) -> Scored:
    sampled = Response(
        tokens=torch.tensor(tokens),
        logprobs=-torch.arange(1.0, len(tokens) + 1),
        token_mask=torch.tensor(mask or [True] * len(tokens)),
        text="",
        truncated=truncated,
    )
    return Scored(sampled, reward=reward)


def step():
    """Prompts of 3 and 1 tokens; responses of 2 and 1, and one of 3 whose middle an environment wrote."""
    first = Group(None, [10, 11, 12], [response([20, 21], reward=1.0), response([22], truncated=True)])
    second = Group(None, [13], [response([23, 24, 25], [True, False, True], reward=2.0)])
    return assemble([first, second])


def test_tokens_logprobs_and_mask_are_aligned():
    made = step()
    assert made.sequences.input_ids.tolist() == [
        [10, 11, 12, 20, 21],
        [10, 11, 12, 22, 0],
        [13, 23, 24, 25, 0],
    ]
    assert made.token_mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [1, 0, 1, 0]]
    assert made.generation_logprobs.tolist() == [[0, 0, -1, -2], [0, 0, -1, 0], [-1, -2, -3, 0]]
    assert made.sequences.lengths.tolist() == [5, 4, 4]
    assert made.sequences.prompt_lengths.tolist() == [3, 3, 1]
    assert made.group_ids.tolist() == made.sequences.prompt_ids.tolist() == [0, 0, 1]
    assert made.sample_mask.tolist() == [True] * 3
    assert made.response_lengths.tolist() == [2, 1, 3]


def shaped(**grpo):
    shaping = {"enabled": False, "max_response_length": 3, "overlong_buffer_length": 2}
    shaping |= {"overlong_buffer_penalty": 0.5} | grpo.pop("reward_shaping", {})
    grpo = {"overlong_filtering": False, **grpo, "reward_shaping": SimpleNamespace(**shaping)}
    return shape(step(), SimpleNamespace(grpo=SimpleNamespace(**grpo)))


def test_truncated_responses_are_left_out_where_the_recipe_says_so():
    assert shaped().sample_mask.tolist() == [True] * 3
    assert shaped(overlong_filtering=True).sample_mask.tolist() == [True, False, True]


@pytest.fixture
def with_abstention() -> Step:
    """A group whose second response has no reward, and whose third one is truncated."""
    abstained = response([22], reward=float("nan"))
    group = Group(None, [10], [response([20, 21], reward=1.0), abstained, response([23], truncated=True)])
    return assemble([group])


def test_a_response_without_a_reward_is_left_out_of_the_loss(with_abstention):
    assert with_abstention.sample_mask.tolist() == [True, False, True]
    recipe = SimpleNamespace(
        grpo=SimpleNamespace(overlong_filtering=True, reward_shaping=SimpleNamespace(enabled=False))
    )
    assert shape(with_abstention, recipe).sample_mask.tolist() == [True, False, False]


def test_a_response_without_a_reward_is_left_out_of_its_group(with_abstention):
    batch = with_abstention.token_batch(with_abstention.generation_logprobs)
    assert batch.rewarded.tolist() == [True, False, True]
    prepared = GRPO(advantage_eps=0.0).build().prepare(batch)
    a = 0.5**0.5  # mean 0.5, std of (1, 0) with ddof 1 is 0.7071
    torch.testing.assert_close(prepared.advantages, torch.tensor([[a, a], [0, 0], [-a, 0]]))
    assert prepared.metrics["reward/mean"] == 0.5


def test_a_group_has_signal_by_the_responses_that_have_a_reward():
    abstained = response([22], reward=float("nan"))
    right, wrong = response([20], reward=1.0), response([21])
    assert Group(None, [1], [abstained, right, wrong]).has_signal()
    assert not Group(None, [1], [abstained, right, right]).has_signal()
    assert not Group(None, [1], [abstained, abstained]).has_signal()
    cut = [response([20], reward=1.0, truncated=True), response([21], truncated=True)]
    assert not Group(None, [1], [abstained, *cut]).has_signal(drop_truncated=True)


def test_overlong_penalty_is_of_the_response_alone():
    assert shaped().rewards.tolist() == [1, 0, 2]
    # Lengths 2, 1 and 3 are 1, 0 and 2 tokens into a buffer of 2 before the limit of 3.
    assert shaped(reward_shaping={"enabled": True}).rewards.tolist() == [1 - 0.25, 0, 2 - 0.5]


def test_rows_that_an_update_left_out_keep_the_samplers_logprobs():
    learner = Learner(SimpleNamespace(grpo=SimpleNamespace(seed=0)), GRPO().build(), None)
    entropies = torch.tensor([[2.0], [0.0], [4.0]]).expand(3, 4)
    scores, scored = Scores(torch.full((3, 4), -0.5), entropies), torch.tensor([True, False, True])
    prepared = learner.prepare(step(), scores, None, scored)
    assert prepared.batch.prev_logprobs.tolist() == [[0, 0, -0.5, -0.5], [0, 0, -1, 0], [-0.5, 0, -0.5, 0]]
    metrics = {name: float(value) for name, value in prepared.metrics.items()}
    assert metrics["entropy/mean"] == pytest.approx((2 + 2 + 4 + 4) / 4)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx((0.5 + 1.5 + 0.5 + 2.5) / 4)
    assert metrics["logprob/mean"] == pytest.approx(-(4 * 0.5 + 1) / 5)


def test_draws_are_seeded_by_run_and_step():
    seeds = []

    class Objective:
        def prepare(self, batch: TokenBatch, *, seed: int) -> None:
            seeds.append((seed, dict(batch.carried)))

    learner = Learner(SimpleNamespace(grpo=SimpleNamespace(seed=3)), Objective(), None)
    made = step()
    scores = SimpleNamespace(logprobs=made.generation_logprobs, entropies=None)
    for finished in (0, 5):
        learner.state = TrainingState(step=finished, carried={"mean": 1.0})
        learner.prepare(made, scores, None)
    assert seeds == [(3 * 1_000_003, {"mean": 1.0}), (3 * 1_000_003 + 5, {"mean": 1.0})]
