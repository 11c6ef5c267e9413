"""The replacement of `dynamic_sampling`: NeMo-RL's signature, batches and call, our rule."""

from types import SimpleNamespace

import pytest
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.timer import Timer

from nemo_grpo.nemorl.sampling import dynamic_sampling_for
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.variants import parse_loss_fn

P, G = 3, 2


def draw(*rewards, first=0, **further):
    """One draw of prompts; ``idx`` numbers them from ``first``."""
    flat = torch.tensor(rewards).flatten()
    numbers = [first + i // G for i in range(len(flat))]
    logs = [[{"role": "user", "content": str(n), "token_ids": torch.tensor([n])}] for n in numbers]
    rows = {"loss_multiplier": torch.ones(len(flat)), "truncated": [False] * len(flat), **further}
    return BatchedDataDict(total_reward=flat, idx=numbers, message_log=logs, **rows)


class Trainer:
    """Calls the function as `grpo_train` does, with a dictionary (0.7.0) or an object (HEAD) of settings."""

    def __init__(self, use_dynamic_sampling=True, overlong_filtering=False, **loss_fn):
        settings = {
            **{"use_dynamic_sampling": use_dynamic_sampling, "overlong_filtering": overlong_filtering},
            **{"num_prompts_per_step": P, "num_generations_per_prompt": G},
            "dynamic_sampling_max_gen_batches": 2,
        }
        self.configs = [SimpleNamespace(grpo=settings), SimpleNamespace(grpo=SimpleNamespace(**settings))]
        self.context = StepContext()
        self.function = dynamic_sampling_for(parse_loss_fn(loss_fn), self.context)
        self.cache, self.draws = None, 0

    def __call__(self, batch):
        self.draws += 1
        std = torch.zeros(batch.size)  # of no interest to our rule
        config = self.configs[self.draws % 2]
        step, full, self.cache, metrics = self.function(
            batch, std, std.clone(), self.draws, config, Timer(), self.cache
        )
        assert metrics is self.context.metrics
        step["baseline"], step["std"]  # the trainer reads these before it looks at `full`
        if "filtered_reward" in step:
            assert step["filtered_reward"].ndim == 1
        return step, full


def test_everything_passes_without_dynamic_sampling():
    batch = draw((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))
    step, full = Trainer(use_dynamic_sampling=False, variant="gpg")(batch)
    assert full
    assert step is batch


def test_a_group_has_signal_by_the_responses_that_have_a_reward():
    nan = float("nan")
    batch = draw((nan, 1.0), (1.0, 0.0), (nan, nan))
    step, full = Trainer(variant="gpg", valid_fraction_threshold=0.3)(batch)
    assert full
    assert step["idx"][:G] == [1, 1]  # groups with signal come first


def test_gpg_draws_until_the_share_of_valid_groups_is_reached():
    trainer = Trainer(variant="gpg", valid_fraction_threshold=0.6)  # at least 1.8 of 3 groups
    step, full = trainer(draw((0.0, 0.0), (1.0, 0.0), (1.0, 1.0)))
    assert not full
    assert "filtered_reward" in step
    step, full = trainer(draw((0.0, 0.0), (0.0, 0.0), (0.0, 1.0), first=10))
    assert full
    assert step["idx"] == [1, 1, 12, 12, 10, 10], "valid groups first, then of the last draw, cut at B"
    assert step["filtered_reward"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert step["total_reward"].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    metrics = trainer.context.metrics
    assert metrics["reward/mean"] == [pytest.approx(1 / 3)], "4 of all 12 drawn; of the 6 kept 2 are right"
    assert metrics["reward/group_std"] == [pytest.approx(2 * 0.5**0.5 / 6)], "two of six groups differ"
    assert [log[0]["content"] for log in step["message_log"]] == ["1", "1", "12", "12", "10", "10"]


def test_gpg_stops_after_its_attempts():
    trainer = Trainer(variant="gpg", valid_fraction_threshold=1.0, max_resample_attempts=1)
    assert not trainer(draw((0.0, 0.0), (1.0, 0.0), (1.0, 1.0)))[1]
    step, full = trainer(draw((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), first=10))
    assert full
    assert step["idx"] == [1, 1, 10, 10, 11, 11]


def test_dapo_fills_the_step_with_groups_that_differ():
    trainer = Trainer(variant="dapo")
    assert not trainer(draw((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))[1]
    step, full = trainer(draw((0.0, 1.0), (1.0, 0.0), (0.0, 1.0), first=10))
    assert full
    assert step["idx"] == [1, 1, 2, 2, 10, 10]
    assert trainer.context.metrics["dynamic_sampling_num_discarded_valid_samples"] == [4.0]


LIMITED = {"unshaped_total_reward": torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])}
CUT = {"loss_multiplier": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])}
ENDLESS = {"truncated": [True, True, True, False, True, False]}


@pytest.mark.parametrize(
    ("rewards", "further", "filters", "valid"),
    [
        # NeMo-RL's std keeps some of 16 equal rewards of 0.3; greatest and least are the same
        (((0.3, 0.3), (0.3, 0.3), (0.7, 0.7)), {}, False, []),
        (((1.0, 0.5), (0.0, 1.0), (0.0, 1.0)), LIMITED, False, [1, 2]),  # a length penalty
        (((1.0, 0.0), (1.0, 0.0), (0.0, 0.0)), CUT, False, [1]),  # a prompt that was cut
        (((0.0, 1.0), (0.0, 0.0), (0.0, 1.0)), ENDLESS, False, [0, 2]),
        (((0.0, 1.0), (0.0, 0.0), (0.0, 1.0)), ENDLESS, True, [2]),  # all of a group is left out
    ],
)
def test_a_group_without_signal_is_drawn_again(rewards, further, filters, valid):
    trainer = Trainer(variant="dapo", overlong_filtering=filters)
    assert not trainer(draw(*rewards, **further))[1]
    assert [group["idx"][0] for group in trainer.cache.valid] == valid
