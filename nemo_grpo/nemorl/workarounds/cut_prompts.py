"""Responses that NeMo-RL's single controller should not train on: to cut prompts, and without a reward.

A prompt that was cut at the maximum length has a loss_multiplier of 0, which NeMo-RL's other trainers obey.
The single controller loses it. It also keeps a response without a reward (a reward function abstained), whose
advantage would be NaN.

Upstream: none known.
Versions: NeMo-RL 7ea279abf; 0.7.0 has no single controller.
Needed while: tests/nemo_rl/test_workarounds.py::test_the_controller_trains_on_cut_prompts
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nemo_grpo.nemorl import compat

MULTIPLIER = "loss_multiplier"
"""NeMo-RL's key of a prompt's weight, 0 or 1."""


@contextmanager
def cut_prompts_left_out(manager: Any) -> Iterator[None]:
    """Exclude responses to a cut prompt, and those without a reward, from training within the block.

    Args:
        manager: NeMo-RL's `RolloutManager`.
    """

    def keep_multiplier(run_as_nemo_rl: Callable[..., Any]) -> Callable[..., Any]:
        async def run_rollout(input_sample: Any) -> Any:
            record = await run_as_nemo_rl(input_sample)
            record.metadata[MULTIPLIER] = float(input_sample.get(MULTIPLIER, 1.0))
            return record

        return run_rollout

    def mask_responses(convert_as_nemo_rl: Callable[..., Any]) -> Callable[..., Any]:
        def record_to_train_batch(record: Any, *arguments: Any, **named: Any) -> Any:
            batch = convert_as_nemo_rl(record, *arguments, **named)
            batch["sample_mask"] = batch["sample_mask"] * record.metadata.get(MULTIPLIER, 1.0)
            batch["sample_mask"] *= batch["total_reward"].isfinite()
            return batch

        return record_to_train_batch

    with (
        compat.rebound("controller rollout", keep_multiplier, manager),
        compat.rebound("controller rows", mask_responses),
    ):
        yield
