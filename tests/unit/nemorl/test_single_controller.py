"""What the single controller calls of ours: a step in chunks is the whole step. NeMo-RL is not needed."""

import subprocess
import sys
from types import SimpleNamespace as Of

import pytest
import torch

from nemo_grpo.nemorl.chunks import ChunkEstimator, StepRecord, StreamingPolicy
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.stall import STALL_S
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.variants import VARIANTS, parse_loss_fn

GROUPS, SIZE, LENGTH = 4, 3, 6
ROWS = GROUPS * SIZE
OTHERS = {
    "clip_cov": {"variant": "clip_cov", "covariance_min": 0.01, "clip_fraction": 0.2},
    "dr_grpo": {"variant": "dr_grpo", "max_response_length": 8},
    "random": {"variant": "tr_grpo", "weighting": "random", "reference_policy_kl_penalty": 0.0},
    "std": {"variant": "gpg", "use_alpha": False, "reward_normalization": "group"},
    "batch std": {"variant": "gpg", "use_alpha": False, "reward_normalization": "batch"},
    "batch scope": {"variant": "cw_grpo", "scope": "batch"},
    "group mean": {"variant": "dapo", "aggregation": "group_token_mean"},
}
SECTIONS = {name: {"variant": name} for name in VARIANTS if name != "erpo"} | OTHERS


def step(seed=0):
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.arange(GROUPS).repeat_interleave(SIZE)[:, None].repeat(1, 2)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=draw)
    mask = (torch.arange(LENGTH) < lengths) & (torch.arange(LENGTH) > 1)
    rewards = torch.rand(ROWS, generator=draw)
    rewards[:SIZE] = 1.0  # a group without signal
    return {
        "prompt_ids": prompts,
        "rewards": rewards,
        "mask": mask.float(),
        "logprobs_policy": -torch.rand(ROWS, LENGTH, generator=draw),
        "logprobs_reference": -torch.rand(ROWS, LENGTH, generator=draw),
    }


def estimator(section, **further):
    config = parse_loss_fn(section)
    return ChunkEstimator(config, num_generations=SIZE, context=StepContext(), folds=True, **further)


def in_chunks(e, whole, *groups):
    sizes = [number * SIZE for number in groups]
    chunks = zip(*(column.split(sizes) for column in whole.values()), strict=True)
    return torch.cat([e.compute_advantage(**dict(zip(whole, chunk, strict=True))) for chunk in chunks])


@pytest.mark.parametrize("name", SECTIONS)
def test_chunks_are_the_step_exactly_where_the_variant_says_so(name):
    whole, by_groups = (in_chunks(estimator(SECTIONS[name]), step(), *groups) for groups in ((4,), (1, 2, 1)))
    is_same = torch.allclose(whole, by_groups, rtol=1e-5, atol=1e-7)
    assert is_same == (not parse_loss_fn(SECTIONS[name]).spans_groups)


def test_metrics_are_means_over_the_responses_of_all_chunks():
    whole, by_groups = estimator({"variant": "grpo"}), estimator({"variant": "grpo"})
    in_chunks(whole, step(), 4)
    in_chunks(by_groups, step(), 1, 3)
    expected, found = whole.end_step(), by_groups.end_step()
    assert expected["groups/valid_fraction"] == [0.75]
    for name in ("groups/valid_fraction", "reward/mean", "length/mean"):
        assert found[name] == pytest.approx(expected[name]), name
    in_chunks(by_groups, step(1), 4)
    assert by_groups.end_step()["reward/mean"] != found["reward/mean"], "the last step's are forgotten"


def test_draws_follow_the_step_and_not_its_chunks():
    unscored = step()
    del unscored["logprobs_policy"]
    assert in_chunks(estimator({"variant": "dapo"}, is_scored=False), unscored, 4).any(), "its own logprobs"
    e = estimator(SECTIONS["random"])
    first = in_chunks(e, step(), 2, 2)
    e.end_step()
    assert not torch.equal(in_chunks(e, step(), 2, 2), first)
    assert e.step == 1


class Worker:
    """Stands for NeMo-RL's policy on the data plane."""

    def __init__(self, optimizer_path):
        self.calls = []

    def read_from_dataplane(self, meta, select_fields):
        return {name: column for name, column in columns(*meta).items() if name in select_fields}

    def train_microbatches_from_meta(self, meta):
        self.calls.append("train")

    def finish_train_step(self):
        self.calls.append("finish")
        return {"loss": 2.0, "all_mb_metrics": {"kl": [1.0]}}

    def abort_train_step(self):
        self.calls.append("abort")


def policy_of(e, record):
    run = ClusterRun(Of(loss_fn=parse_loss_fn({"variant": "grpo"})), {"policy": {}})
    made = type("Policy", (StreamingPolicy, Worker), {})
    return made(optimizer_path="step_1", run=run, context=StepContext(), estimator=e, record=record)


def columns(rows, length):
    by_token = {
        name: torch.ones(rows, length)
        for name in ("input_ids", "advantages", "generation_logprobs", "prev_logprobs")
    }
    mask = torch.arange(length).expand(rows, length) > 1
    by_row = {"input_lengths": torch.full((rows,), length), "sample_mask": torch.ones(rows)}
    return by_token | by_row | {"token_mask": mask, "total_reward": torch.tensor([1.0] * (rows - 1) + [0.0])}


def test_a_step_without_gradient_is_dropped_with_its_metrics_kept():
    e = estimator({"variant": "grpo", "reference_policy_kl_penalty": 0.0})
    policy = policy_of(e, StepRecord(SIZE, scores=True))
    alike, differ = torch.ones(ROWS), step()["rewards"]
    for rewards, done in ((alike, "abort"), (differ, "finish"), (alike, "abort")):
        in_chunks(e, step() | {"rewards": rewards}, 2, 2)
        policy.train_microbatches_from_meta((SIZE, 8))
        found = policy.finish_train_step()
        assert policy.calls[-1] == done
        assert found["all_mb_metrics"]["reward/mean"] == pytest.approx([float(rewards.mean())])
        assert found["all_mb_metrics"]["mean_gen_tokens_per_sample"] == [6.0]
    assert found["loss"] == 0.0, "of the step that was dropped"
    penalized = estimator({"variant": "grpo", "reference_policy_kl_penalty": 0.1})
    in_chunks(penalized, step() | {"rewards": alike}, 4)
    assert penalized.has_gradient
    policy.has_moments = False
    in_chunks(e, step() | {"rewards": torch.ones(ROWS)}, 4)
    policy.train_microbatches_from_meta((SIZE, 8))
    policy.finish_train_step()
    assert policy.calls[-1] == "finish", "the first update gives Adam its moments"


def test_responses_of_all_chunks_are_recorded_for_every_loss():
    written = []
    record = StepRecord(SIZE, scores=False)
    record.write, record.step = lambda rows, file: written.append((rows, file)), 5
    policy = policy_of(None, record)
    for chunk in ((3, 8), (6, 5)):
        policy.train_microbatches_from_meta(chunk)
    record.add(columns(SIZE, 8) | {"total_reward": torch.zeros(SIZE)})
    found = policy.finish_train_step()["all_mb_metrics"]
    assert found["kl"] == [1.0]
    assert found["baseline_reward/pct_mixed"] == [50.0], "of four groups one is all right, one all wrong"
    ((rows, file),) = written
    assert file == "train_data_step5.jsonl"
    assert "prev_logprobs" not in rows, "nothing was scored"
    assert [len(row) for row in rows["token_ids"]] == [8] * 12, "to the longest"
    assert rows["token_ids"][3] == [1.0] * 5 + [0.0] * 3
    assert sum(rows["token_loss_mask"][3]) == 3
    assert rows["rewards"] == [1.0, 1.0, 0.0] + [1.0] * 5 + [0.0] * 4
    policy.train_microbatches_from_meta((3, 4))
    policy.finish_train_step()
    assert [len(rows["rewards"]) for rows, _ in written] == [12, 3]


FROZEN = """
import asyncio, time
from nemo_grpo.nemorl.single_controller import watched_loop

async def run():
    async with watched_loop(0.05, 1):
        await asyncio.sleep(1.5)
        print("alive", flush=True)
        time.sleep(30)

asyncio.run(run())
"""


def test_a_frozen_event_loop_ends_the_process_and_shows_where():
    ended = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "alive\n"), ended.stderr
    assert "line 9 in run" in ended.stderr, "the line that blocks"


SILENT = """
import time
from nemo_grpo.nemorl import stall

def step(seconds):
    time.sleep(seconds)

stall.STALL_S = 0.6
stalls = stall.StallDump()
with stalls.watching():
    for number in range(4):
        step(0.3)
        stalls.added_metrics({}, number, "train")
    print("silent", flush=True)
    step(1.2)
    stalls.added_metrics({}, 4, "train")
time.sleep(1)
print("done", flush=True)
"""


def test_a_trainer_that_logs_nothing_writes_its_stacks_once_and_goes_on():
    ended = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "silent\ndone\n"), ended.stderr
    assert ended.stderr.count("Timeout (") == 1
    assert "line 6 in step" in ended.stderr, "the line that waits"
    assert STALL_S == 600, "as NeMo-RL's single controller"


def test_responses_without_a_reward_mix_no_group():
    record = StepRecord(SIZE, scores=True)
    nan = [float("nan")] * SIZE
    rewards = torch.tensor([nan[0], 1.0, 0.0, *nan, *[1.0] * SIZE, *[0.0] * SIZE])
    record.add(columns(GROUPS * SIZE, 4) | {"total_reward": rewards})
    assert record.end_step()["baseline_reward/pct_mixed"] == [25.0]
