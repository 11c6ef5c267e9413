"""NeMo-RL's single controller (``async_rl``): rollouts and training side by side over its data plane.

NeMo-RL runs it in a Ray actor of its own. Here it runs in the driver's process, which has the callbacks on
logger and checkpoints and handles signals; its code and its workers are the same.

A step's groups reach the estimator in chunks (async_rl.min_groups_for_streaming_train); the optimizer's step
follows the last one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.compat import Parts
from nemo_grpo.nemorl.host_api import CONTROLLER, CONTROLLER_ACTOR, CONTROLLER_CONFIG, SINGLE_CONTROLLER
from nemo_grpo.nemorl.loss import loss_of
from nemo_grpo.nemorl.policy import has_gradient, policy_factory
from nemo_grpo.nemorl.stall import dump_after
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.nemorl.nemo_rl_batches import Data
    from nemo_grpo.nemorl.step_context import StepContext

log = logging.getLogger(__name__)

RECORDED = {
    "input_ids": "token_ids",
    "input_lengths": "input_lengths",
    "token_mask": "token_loss_mask",
    "sample_mask": "sample_loss_mask",
    "total_reward": "rewards",
    "advantages": "advantages",
    "generation_logprobs": "generation_logprobs",
    "prev_logprobs": "prev_logprobs",
}
"""Column of the data plane -> its name in ``train_data_stepN.jsonl``, which the other trainers write, too."""

MULTIPLIER = "loss_multiplier"


@dataclass(kw_only=True)
class ChunkEstimator(VariantEstimator):
    """`VariantEstimator` for a step that comes in chunks of whole groups.

    Attributes: has_gradient: a chunk since the last `end_step` can move the policy.
    """

    has_gradient: bool = False
    chunks: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, *further: Any, **named: Any
    ) -> Tensor:
        """Compute a chunk's advantages, see `VariantEstimator.compute_advantage`."""
        if not self.is_scored:  # as NeMo-RL's other trainers give them
            named.setdefault("logprobs_policy", torch.zeros_like(mask))
        step = self.step
        advantages = super().compute_advantage(prompt_ids, rewards, mask, *further, **named)
        self.step = step
        self.chunks.append((len(rewards), self.last_metrics))
        found = {"advantages": advantages, "sample_mask": mask.bool().any(1)}
        self.has_gradient |= has_gradient(found, self.objective)
        return advantages

    def end_step(self) -> dict[str, list[float]]:
        """End the step; returns its metrics, means over its responses."""
        rows = [number for number, _ in self.chunks]
        names = self.chunks[0][1] if self.chunks else ()
        means = {name: [fmean([chunk[name] for _, chunk in self.chunks], rows)] for name in names}
        self.chunks, self.has_gradient = [], False
        self.step += 1
        return means


class StepRecord:
    """The responses of a step and what they were trained with, for ``train_data_stepN.jsonl``.

    Attributes: write: `log_batched_dict_as_jsonl` of NeMo-RL's logger.  step: number of the recorded step.
    """

    def __init__(self, num_generations: int, *, scores: bool) -> None:
        """Args: num_generations: G, adjacent rows of a group.  scores: prev_logprobs are computed."""
        self.num_generations = num_generations
        self.columns = [name for name in RECORDED if scores or name != "prev_logprobs"]
        self.chunks: list[dict[str, Tensor]] = []
        self.step = 1
        self.write: Callable[[dict[str, Any], str], None] | None = None

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Keep a chunk's rows."""
        self.chunks.append({RECORDED[name]: chunk[name] for name in self.columns})

    def end_step(self) -> dict[str, list[float]]:
        """Write the rows and end the step; returns the metrics that the other trainers log."""
        rows = {name: _stacked([chunk[name] for chunk in self.chunks]) for name in self.chunks[0]}
        if self.write is not None:
            file = f"train_data_step{self.step}.jsonl"
            self.write({name: column.tolist() for name, column in rows.items()}, file)
        self.chunks = []
        self.step += 1
        means = rows["rewards"].view(-1, self.num_generations).nanmean(1)
        mixed = (means > 0) & (means < 1)
        return {
            "mean_gen_tokens_per_sample": [float(rows["token_loss_mask"].sum(1).float().mean())],
            "baseline_reward/pct_mixed": [100 * float(mixed.float().mean())],
        }


def _stacked(parts: list[Tensor]) -> Tensor:
    if parts[0].ndim == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def streaming(base: Any, estimator: ChunkEstimator | None, record: StepRecord) -> Any:
    """Make `VariantPolicy` for the single controller, which trains by begin, chunks and finish.

    Args: base: `VariantPolicy`.  estimator: None for NeMo-RL's own loss.
    """

    class StreamingPolicy(base):
        """A step without gradient is dropped; as in `VariantPolicy`, never the first one."""

        def train_microbatches_from_meta(self, meta: Any, *arguments: Any, **named: Any) -> Any:
            record.add(self.read_from_dataplane(meta, select_fields=record.columns))
            return super().train_microbatches_from_meta(meta, *arguments, **named)

        def finish_train_step(self) -> dict[str, Any]:
            if estimator is not None and self.mode(self.learns_always or estimator.has_gradient):
                self.abort_train_step()
                trained: dict[str, Any] = {"loss": 0.0, "grad_norm": 0.0, "all_mb_metrics": {}}
            else:
                trained = super().finish_train_step()
            if estimator is not None:
                trained["all_mb_metrics"] |= estimator.end_step()
            trained["all_mb_metrics"] |= record.end_step()
            return trained

    return StreamingPolicy


def set_up(run: ClusterRun, tokenizer: Any, data: Data, context: StepContext) -> tuple[Parts, Any]:
    """Let NeMo-RL set up its workers, and add our parts to those that it gives to its controller.

    Args:    data: replaces the data that NeMo-RL would read.
    Returns: (its parts by the names of NeMo-RL's `setup`, the controller).
    """
    compat.require(SINGLE_CONTROLLER)
    config, recipe = run.master_config, run.recipe
    check(config)
    if not value_of(config, "loss_fn.reference_policy_kl_penalty", 0):
        # no reference policy is loaded, and NeMo-RL's other trainers then ask for none
        config.grpo.skip_reference_policy_logprobs_calculation = True
    estimator = None if recipe.loss_fn.is_stock else ChunkEstimator.of(recipe, context, folds=True)
    record = StepRecord(recipe.grpo.num_generations_per_prompt, scores=recipe.policy_is_scored)
    extend = partial(streaming, estimator=estimator, record=record)
    policy = policy_factory(run, context, extend)

    def given(*_theirs: Any, **_named: Any) -> Any:
        return data[:2] if recipe.env.should_use_nemo_gym else data

    with (
        compat.rebound("controller policy", lambda _theirs: policy),
        compat.rebound("controller data", lambda _theirs: given),
    ):
        arguments, timing = compat.import_name(f"{CONTROLLER}:setup_single_controller")(config, tokenizer)
    if estimator is not None:
        estimator.step = arguments.save_state.current_step
        arguments = replace(arguments, advantage_estimator=estimator, loss_fn=loss_of(run))
    actor = compat.import_name(CONTROLLER_ACTOR).__ray_metadata__.modified_class  # for use in this process
    controller = actor(config, arguments, timing)
    parts = Parts(
        policy=arguments.trainer_handle,
        policy_generation=arguments.gen_handle,
        nemo_gym=arguments.env_handles.get("nemo_gym"),
        cluster=(arguments.train_cluster, arguments.inference_cluster),
        dataloader=arguments.dataloader,
        loss_fn=arguments.loss_fn,
        logger=controller._logger,
        checkpointer=controller._checkpointer,
        grpo_save_state=arguments.save_state,
        master_config=config,
    )
    record.write = parts.logger.log_batched_dict_as_jsonl
    record.step = arguments.save_state.current_step + 1
    return parts, controller


def check(config: Any) -> None:
    """Let NeMo-RL check its configuration before anything is started."""
    validate = compat.import_name(f"{CONTROLLER_CONFIG}:validate_single_controller_config")
    try:
        validate(config)
    except ValueError as error:
        raise UserError(f"NeMo-RL's single controller refuses the configuration: {error}") from None


def train(controller: Any, config: Any) -> None:
    """Run the controller to its end."""

    async def watched(watchdog: Any) -> None:
        async with watched_loop(watchdog.interval_s, watchdog.stall_timeout_s):
            log.info("the single controller has ended: %s", await controller.run())

    with cut_prompts_left_out(controller._rollout_manager):
        asyncio.run(watched(config.async_rl.stall_watchdog))


@contextmanager
def cut_prompts_left_out(manager: Any) -> Iterator[None]:
    """Exclude responses to a cut prompt, and those without a reward, from training within the block.

    NeMo-RL's data mark a prompt cut at its longest length by a loss_multiplier of 0, which its other trainers
    read; a response has no reward where a function of the recipe abstains.

    Args: manager: NeMo-RL's `RolloutManager`.
    """

    def keeping(theirs: Callable[..., Any]) -> Callable[..., Any]:
        async def run_rollout(input_sample: Any) -> Any:
            record = await theirs(input_sample)
            record.metadata[MULTIPLIER] = float(input_sample.get(MULTIPLIER, 1.0))
            return record

        return run_rollout

    def masking(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def record_to_train_batch(record: Any, *arguments: Any, **named: Any) -> Any:
            batch = theirs(record, *arguments, **named)
            batch["sample_mask"] = batch["sample_mask"] * record.metadata.get(MULTIPLIER, 1.0)
            batch["sample_mask"] *= batch["total_reward"].isfinite()
            return batch

        return record_to_train_batch

    with compat.rebound("controller rollout", keeping, manager), compat.rebound("controller rows", masking):
        yield


@asynccontextmanager
async def watched_loop(interval_s: float, stall_timeout_s: float) -> AsyncIterator[None]:
    """End the process with its tracebacks if its event loop is blocked for too long within the block.

    NeMo-RL's own watchdog is a task of that loop, so it cannot see that a call blocks the loop. NeMo-RL's
    driver could, but here it is this process.

    Args: stall_timeout_s: async_rl.stall_watchdog.stall_timeout_s.
    """
    log.info(
        "the driver ends if the single controller's event loop does not answer for %g s "
        "(async_rl.stall_watchdog.stall_timeout_s)",
        stall_timeout_s,
    )

    async def answer() -> None:
        while True:
            dump_after(stall_timeout_s, ends=True)
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(answer())
    try:
        yield
    finally:
        task.cancel()
        faulthandler.cancel_dump_traceback_later()
