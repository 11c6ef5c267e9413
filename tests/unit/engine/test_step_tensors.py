"""A step's tensors and seeds, number by number: what layouts and resumes share and so cannot show."""

from types import SimpleNamespace

import pytest
import torch

from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.statistics import Groups
from nemo_grpo.engine.demonstrations import demonstrated
from nemo_grpo.engine.learning import Learner, TrainingState
from nemo_grpo.engine.megatron.microbatches import Scores
from nemo_grpo.engine.rollout import Group, Scored, assemble
from nemo_grpo.engine.steps import shape
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.tasks.base import stream
from nemo_grpo.variants.erpo import ERPO
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
    first = Group(None, [10, 11, 12], [response([20, 21], reward=1.0), response([22], truncated=True)])  # type: ignore[arg-type]
    second = Group(None, [13], [response([23, 24, 25], [True, False, True], reward=2.0)])  # type: ignore[arg-type]
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
    return shape(step(), SimpleNamespace(grpo=SimpleNamespace(**grpo)))  # type: ignore[arg-type]


def test_truncated_responses_are_left_out_where_the_recipe_says_so():
    assert shaped().sample_mask.tolist() == [True] * 3
    assert shaped(overlong_filtering=True).sample_mask.tolist() == [True, False, True]


def test_a_response_without_a_reward_is_left_out_of_group_and_loss():
    abstained = response([22], reward=float("nan"))
    group = Group(None, [10], [response([20, 21], reward=1.0), abstained, response([23], truncated=True)])  # type: ignore[arg-type]
    made = assemble([group])
    assert made.sample_mask.tolist() == [True, False, True]
    batch = made.token_batch(made.generation_logprobs)
    assert batch.rewarded.tolist() == [True, False, True]
    # mean 0.5, std of (1, 0) with ddof 1 is 0.7071
    prepared = GRPO(variant="grpo", advantage_eps=0.0).build().prepare(batch)
    a = 0.5**0.5
    torch.testing.assert_close(prepared.advantages, torch.tensor([[a, a], [0, 0], [-a, 0]]))
    assert prepared.metrics["reward/mean"] == 0.5
    recipe = SimpleNamespace(
        grpo=SimpleNamespace(overlong_filtering=True, reward_shaping=SimpleNamespace(enabled=False))
    )
    assert shape(made, recipe).sample_mask.tolist() == [True, False, False]  # type: ignore[arg-type]


def test_a_group_has_signal_by_the_responses_that_have_a_reward():
    abstained = response([22], reward=float("nan"))
    right, wrong = response([20], reward=1.0), response([21])
    assert Group(None, [1], [abstained, right, wrong]).has_signal()  # type: ignore[arg-type]
    assert not Group(None, [1], [abstained, right, right]).has_signal()  # type: ignore[arg-type]
    assert not Group(None, [1], [abstained, abstained]).has_signal()  # type: ignore[arg-type]
    cut = [response([20], reward=1.0, truncated=True), response([21], truncated=True)]
    assert not Group(None, [1], [abstained, *cut]).has_signal(drop_truncated=True)  # type: ignore[arg-type]


def test_overlong_penalty_is_of_the_response_alone():
    assert shaped().rewards.tolist() == [1, 0, 2]
    # Lengths 2, 1 and 3 are 1, 0 and 2 tokens into a buffer of 2 before the limit of 3.
    assert shaped(reward_shaping={"enabled": True}).rewards.tolist() == [1 - 0.25, 0, 2 - 0.5]


class Characters:
    """A tokenizer whose tokens are characters' codes."""

    eos_token_id = 0

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


def test_demonstration_leaves_out_what_the_environment_says(monkeypatch):
    task = SimpleNamespace(
        demonstration=lambda *_: "aXb", segments=lambda _: [("a", True), ("X", False), ("b", True)]
    )
    monkeypatch.setattr("nemo_grpo.engine.demonstrations.MultiTurnTask", SimpleNamespace)
    monkeypatch.setattr("nemo_grpo.engine.demonstrations.encode_prompt", lambda *_: [1, 2])
    prompt, problem = SimpleNamespace(response_prefix=""), SimpleNamespace(id="p")
    shown = demonstrated(Characters(), task, prompt, problem, stream("x"), limit=6, key="k")  # type: ignore[arg-type]
    (only,) = shown.responses
    assert only.response.tokens.tolist() == [97, 88, 98, 0]
    assert only.response.token_mask.tolist() == [True, False, True, True], (
        "the end of the sequence is the policy's"
    )
    with pytest.raises(ValueError, match="k=5: problem 'p' with its demonstration has 6 tokens"):
        demonstrated(Characters(), task, prompt, problem, stream("x"), limit=5, key="k")  # type: ignore[arg-type]


def test_rows_that_an_update_left_out_keep_the_samplers_logprobs():
    learner = Learner(SimpleNamespace(grpo=SimpleNamespace(seed=0)), GRPO().build(), None)  # type: ignore[arg-type]
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

    learner = Learner(SimpleNamespace(grpo=SimpleNamespace(seed=3)), Objective(), None)  # type: ignore[arg-type]
    made = step()
    scores = SimpleNamespace(logprobs=made.generation_logprobs, entropies=None)
    for finished in (0, 5):
        learner.state = TrainingState(step=finished, carried={"mean": 1.0})
        learner.prepare(made, scores, None)  # type: ignore[arg-type]
    assert seeds == [(3 * 1_000_003, {"mean": 1.0}), (3 * 1_000_003 + 5, {"mean": 1.0})]


def test_selected_rows_keep_all_that_is_theirs():
    """Each tensor of a prepared step, by rows 2 and 0."""
    made = step()
    batch = made.token_batch(made.generation_logprobs)
    number = torch.arange(3.0)
    prepared = PreparedBatch(
        batch=batch,
        advantages=number[:, None].expand(3, 4),
        group_sizes=torch.tensor([2, 2, 1]),
        token_weights=number[:, None].expand(3, 4) + 10,
        row_factors=number + 20,
    )
    part = prepared.select(torch.tensor([2, 0]), length=3)
    assert part.row_factors is not None
    assert part.row_factors.tolist() == [22, 20]
    assert part.group_sizes.tolist() == [1, 2]
    assert part.advantages.tolist() == [[2] * 3, [0] * 3]
    assert part.token_weights is not None
    assert part.token_weights.tolist() == [[12] * 3, [10] * 3]
    assert part.batch.rewards.tolist() == [2, 1]
    assert part.batch.token_mask.int().tolist() == [[1, 0, 1], [0, 0, 1]]
    assert part.batch.response_ids is not None
    assert part.batch.response_ids.tolist() == made.response_ids[[2, 0]].tolist()


def test_progress_is_standardised_over_the_groups_own_bucket():
    """One bucket, two groups: of mean 2 and std 1, of mean 20 and std 10."""
    progress = torch.tensor([[1.0, 3.0], [10.0, 30.0]], dtype=torch.float64)
    batch = TokenBatch(
        prev_logprobs=progress,
        reference_policy_logprobs=torch.zeros_like(progress),
        token_mask=torch.ones(2, 2, dtype=torch.bool),
        sample_mask=torch.ones(2, dtype=torch.bool),
        rewards=torch.zeros(2),
        group_ids=torch.tensor([0, 1]),
    )
    erpo = ERPO(num_buckets=1, beta_progress=1.0, delta=0.5)
    found = erpo.bucketed_progress(batch, Groups.from_ids(batch.group_ids))
    assert found.tolist() == [pytest.approx([-1 / 1.5, 1 / 1.5]), pytest.approx([-10 / 10.5, 10 / 10.5])]
    four = torch.ones(1, 4, dtype=torch.bool)
    assert ERPO(num_buckets=2).buckets(four).tolist() == [[0, 1, 1, 1]], "floor(K t / T), at most K - 1"
