"""NeMo-RL's single controller (``async_rl``): rollouts and training side by side over its data plane.

NeMo-RL runs it in a Ray actor of its own. Here it runs in the driver's process, which has the callbacks on
logger and checkpoints and handles signals; its code and its workers are the same.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.checkpoints import SideFiles, carried_statistics
from nemo_grpo.nemorl.chunks import ChunkEstimator, StepRecord, StreamingPolicy
from nemo_grpo.nemorl.compat import Parts
from nemo_grpo.nemorl.exit_status import last_step
from nemo_grpo.nemorl.host_api import CONTROLLER, CONTROLLER_ACTOR, CONTROLLER_CONFIG, SINGLE_CONTROLLER
from nemo_grpo.nemorl.loss import loss_of
from nemo_grpo.nemorl.policy import policy_factory
from nemo_grpo.nemorl.stall import dump_after
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.nemorl.trainer import Training, rollout_data, trained_environments, validation_sets
from nemo_grpo.nemorl.workarounds.cut_prompts import cut_prompts_left_out
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.nemorl.nemo_rl_batches import Data
    from nemo_grpo.nemorl.trainer import Started

log = logging.getLogger(__name__)


def set_up(run: ClusterRun, started: Started) -> Training:
    """Let NeMo-RL set up its workers, and add our parts to those that it gives to its controller."""
    compat.require(SINGLE_CONTROLLER)
    config = run.master_config
    recipe = run.recipe
    check(config)
    if not value_of(config, "loss_fn.reference_policy_kl_penalty", 0):
        # Without the penalty no reference policy is loaded. NeMo-RL's other trainers then do not score with
        # it, but the controller would.
        config.grpo.skip_reference_policy_logprobs_calculation = True
    data = rollout_data(run, started)
    context = StepContext()
    estimator = None if recipe.loss_fn.is_stock else ChunkEstimator.of(recipe, context, folds=True)
    record = StepRecord(recipe.grpo.num_generations_per_prompt, scores=recipe.policy_is_scored)
    policy = policy_factory(run, context, StreamingPolicy, estimator=estimator, record=record)
    arguments, timing = _workers(run, started.tokenizer, data, policy)
    state = arguments.save_state
    if estimator is not None:
        estimator.step = state.current_step
        arguments = replace(arguments, advantage_estimator=estimator, loss_fn=loss_of(run))
    controller = _controller_class()(config, arguments, timing)
    parts = Parts(
        policy=arguments.trainer_handle,
        policy_generation=arguments.gen_handle,
        nemo_gym=arguments.env_handles.get("nemo_gym"),
        cluster=(arguments.train_cluster, arguments.inference_cluster),
        dataloader=arguments.dataloader,
        loss_fn=arguments.loss_fn,
        logger=controller._logger,
        checkpointer=controller._checkpointer,
        grpo_save_state=state,
        master_config=config,
    )
    last = last_step(run, parts)
    if estimator is not None:
        estimator.carried = carried_statistics(recipe.loss_fn, parts.checkpointer)
    record.write = parts.logger.log_batched_dict_as_jsonl
    record.step = state.current_step + 1
    return Training(
        parts=parts,
        train=partial(train, controller, config),
        environments=trained_environments(run, data, parts),
        side_files=SideFiles(started.encoder, started.hf_config, estimator),
        last_step=last,
        validation_sets=validation_sets(run, started, data),
        watches_itself=True,
    )


def _workers(run: ClusterRun, tokenizer: Any, data: Data, policy: Any) -> tuple[Any, Any]:
    """Let NeMo-RL start its workers, with our policy and data in place of those that it would make.

    Returns:
        NeMo-RL's arguments for its controller, and its timing.
    """

    def set_up_response_data(*_arguments: Any, **_named: Any) -> Any:
        # With NeMo-Gym, whose servers are the environments, NeMo-RL expects only the data.
        return data[:2] if run.recipe.env.should_use_nemo_gym else data

    set_up_controller = compat.import_name(f"{CONTROLLER}:setup_single_controller")
    with (
        compat.rebound("controller policy", lambda _original: policy),
        compat.rebound("controller data", lambda _original: set_up_response_data),
    ):
        arguments, timing = set_up_controller(run.master_config, tokenizer)
    return arguments, timing


def _controller_class() -> Any:
    """Return NeMo-RL's controller as a plain class, for use in this process."""
    # NeMo-RL decorates this class with `ray.remote`, without an undecorated `...Impl` like its workers' have.
    # Ray keeps the plain class only in this attribute.
    return compat.import_name(CONTROLLER_ACTOR).__ray_metadata__.modified_class


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


@asynccontextmanager
async def watched_loop(interval_s: float, stall_timeout_s: float) -> AsyncIterator[None]:
    """End the process with its tracebacks if its event loop is blocked for too long within the block.

    NeMo-RL's own watchdog is a task of the same loop, so it does not run while a call blocks the loop.

    Args:
        interval_s: seconds between two signs of life of the loop.
        stall_timeout_s: async_rl.stall_watchdog.stall_timeout_s.
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
