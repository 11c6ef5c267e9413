"""``python -m nemo_grpo.nemorl.run_grpo --config RECIPE [key=value ...]``: train a cluster recipe on NeMo-RL.

The driver of a Ray cluster. NeMo-RL's trainer runs unchanged with the variant's loss, estimator and sampling
in place of its own.
"""

import argparse
import importlib
import inspect
import logging
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from nemo_grpo.nemorl import compat, sft, single_controller
from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.callbacks import (
    Callback,
    DrawnRollouts,
    RewardMetrics,
    RolloutCheck,
    RunRecord,
    ValidationSets,
    alone,
    calling_back,
)
from nemo_grpo.nemorl.checkpoints import SideFiles, resume_carried, resume_with_optimizer
from nemo_grpo.nemorl.compat import Parts
from nemo_grpo.nemorl.config import ClusterRun, load_run
from nemo_grpo.nemorl.exit_status import exit_code, finished_steps, last_step, stop_after_step
from nemo_grpo.nemorl.host_api import GRPO, GRPO_SYNC
from nemo_grpo.nemorl.loss import loss_of
from nemo_grpo.nemorl.nemo_rl_batches import gym_environments, set_names, set_up_data
from nemo_grpo.nemorl.policy import policy_factory
from nemo_grpo.nemorl.pretrained import load_tokenizer, model_config, remove_remains
from nemo_grpo.nemorl.sampling import dynamic_sampling_for
from nemo_grpo.nemorl.stall import StallDump
from nemo_grpo.nemorl.start_checks import check_async_save, check_data_plane, check_ray_address
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.run.diagnostics import StepDiagnostics
from nemo_grpo.run.folder import RunFolder
from nemo_grpo.run.recipe_checks import check_recipe
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import EXIT_USAGE, UserError
from nemo_grpo.tasks.base import VALIDATION_SET

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the driver.

    Returns: 0 if training finished; 1 if it failed; 2 if the recipe is refused; 75 if
             it was told to stop and saved a checkpoint: start it again to resume.
    """
    parser = argparse.ArgumentParser(prog="python -m nemo_grpo.nemorl.run_grpo", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="recipe with nemo_grpo.target: cluster")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        with ExitStack() as until_the_end:
            try:
                compat.check()
                run = load_run(arguments.config, arguments.overrides)
                until_the_end.enter_context(alone(run.recipe))
                ready = set_up(run)  # refuses a missing file or too few problems
            except UserError as error:
                sys.stderr.write(f"error: {error}\n")
                return EXIT_USAGE
            return train(run, ready)
    except Exception:  # may not recur in the next attempt
        # Handled here, not by the interpreter: the error's frames hold NeMo-RL's workers, and workers that
        # are freed after Ray has shut down hang.
        log.exception("the driver failed")
        return 1


class Ready(NamedTuple):
    """All arguments of NeMo-RL's trainer; ``processor`` is None without images.

    ``is_supervised``: the trainer is NeMo-RL's for supervised training. ``controller``: NeMo-RL's single one,
    if it trains. ``last_step``: the step at which training is complete.
    """

    parts: Parts
    tokenizer: Any
    processor: Any
    environments: list[Any]
    side_files: SideFiles
    last_step: int
    validation_sets: Callback = Callback()
    is_supervised: bool = False
    controller: Any = None
    uses_data_plane: bool = False


def set_up(run: ClusterRun) -> Ready:
    """Read the data, start Ray, set NeMo-RL up, and put our parts into its trainer."""
    recipe = run.recipe
    check_recipe(recipe, continues=True).refuse()
    from nemo_grpo.nemorl.environments import read_problems, setup_data

    share_sources()
    problems = read_problems(run) if recipe.nemo_grpo.task is not None else None
    check_async_save(run.master_config)
    check_data_plane(recipe)
    compat.keep_tensor_pickles_plain()
    hf_config = model_config(run)
    config = run.master_config
    remove_remains(config.policy)
    resume_with_optimizer(recipe)
    config.logger["log_dir"] = compat.import_name("nemo_rl.utils.logger:get_next_experiment_dir")(
        config.logger["log_dir"]
    )
    check_ray_address()
    compat.import_name("nemo_rl.distributed.virtual_cluster:init_ray")()
    processor, tokenizer = load_tokenizer(run)
    if recipe.loss_fn.learns_from_demonstrations:
        assert problems is not None, "recipe.host refuses it"
        parts = sft.set_up(run, problems, tokenizer)
        side_files, last = SideFiles(tokenizer, hf_config), recipe.grpo.max_num_steps
        return Ready(parts, tokenizer, None, [{}, {}], side_files, last, is_supervised=True)
    encoder = processor or tokenizer
    data = set_up_data(run, encoder) if problems is None else setup_data(run, problems, encoder)
    dataset, val_dataset, *environments = data
    context = StepContext()
    controller = None
    if recipe.has_single_controller:
        parts, controller = single_controller.set_up(run, tokenizer, data, context)
    else:
        policy = policy_factory(run, context)
        result = compat.import_name(f"{GRPO}:setup")(
            config, tokenizer, dataset, val_dataset, processor=processor, policy_factory=policy
        )
        parts = compat.unpack_setup(result)
    if recipe.env.should_use_nemo_gym:
        environments = gym_environments(parts)
    last = last_step(run, parts)
    if not recipe.loss_fn.is_stock:
        if controller is None:
            parts = parts._replace(loss_fn=loss_of(run))
            install(run, context, finished_steps(parts), tokenizer)
        resume_carried(recipe.loss_fn, parts.checkpointer, context)
        if recipe.uses_data_plane and recipe.nemo_grpo.engine.diagnostics_period > 0:
            log.info("data_plane.enabled=true: conversations do not reach the driver; no diagnostics.jsonl")
    side_files = SideFiles(encoder, hf_config, context)
    held_out = () if problems is None else problems.held_out
    names = [one.metadata.get(VALIDATION_SET, "") for one in held_out] or set_names(run, val_dataset)
    logs = Path(config.logger["log_dir"])
    sets = ValidationSets(names, logs, recipe.grpo.val_num_generations_per_prompt)
    return Ready(
        parts,
        tokenizer,
        processor,
        environments,
        side_files,
        last,
        sets,
        controller=controller,
        uses_data_plane=recipe.uses_data_plane,
    )


def train(run: ClusterRun, ready: Ready) -> int:
    """Train to the end or to a requested stop; returns the exit code."""
    parts, recipe = ready.parts, run.recipe
    try:
        adding = [
            DrawnRollouts(),
            RolloutCheck(recipe),
            RewardMetrics(ready.environments),
            ready.validation_sets,
        ]
        stalls = StallDump()
        is_watched = ready.controller is not None  # by NeMo-RL and `watched_loop`
        if not is_watched:
            adding.append(stalls)
        with (
            nullcontext() if is_watched else stalls.watching(),
            stop_after_step(recipe.grpo) as ending,
            calling_back(
                [*adding, RunRecord(recipe), ready.side_files, ending], parts.logger, parts.checkpointer
            ),
        ):
            if ready.is_supervised:
                sft.run_trainer(parts, ready.tokenizer)
            else:
                run_trainer(ready)
    finally:
        close(parts, ready.environments)
    return exit_code(run, parts, ready.last_step, ending)


def share_sources() -> None:
    """Let Ray's workers import this package: they inherit the driver's environment, not its `sys.path`."""
    root = Path(__file__).parents[2]
    if root.name in ("site-packages", "dist-packages"):
        raise UserError(
            f"PYTHONPATH: nemo_grpo was imported from {root}, whose other packages would shadow the "
            "workers' own; put the repository, or what `nemo-grpo slurm scripts DIR` writes, on PYTHONPATH, "
            "where every node sees it"
        )
    paths = [str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))


def install(run: ClusterRun, context: StepContext, first_step: int, tokenizer: Any) -> None:
    """Put the variant's estimator and sampling where NeMo-RL's trainers look for theirs."""
    recipe = run.recipe
    folds = recipe.uses_data_plane
    period = recipe.nemo_grpo.engine.diagnostics_period
    diagnostics = StepDiagnostics(RunFolder(recipe.run_dir), period, tokenizer.decode)

    def create_advantage_estimator(_master_config: Any) -> VariantEstimator:
        return VariantEstimator.of(recipe, context, step=first_step, diagnostics=diagnostics, folds=folds)

    sample = dynamic_sampling_for(recipe.loss_fn, context)
    compat.rebind("estimator", lambda _theirs: create_advantage_estimator)
    compat.rebind("sampling", lambda _theirs: sample)


def run_trainer(ready: Ready) -> None:
    """Run NeMo-RL's trainer: synchronous, asynchronous, synchronous on its data plane, or its controller."""
    parts, processor, config = ready.parts, ready.processor, ready.parts.master_config
    if ready.controller is not None:
        single_controller.train(ready.controller, config)
        return
    is_async = bool(value_of(config, "grpo.async_grpo.enabled", False))
    name = f"{GRPO}:{'async_grpo_train' if is_async else 'grpo_train'}"
    if ready.uses_data_plane:
        name = f"{GRPO_SYNC}:grpo_train_sync"
    trainer = compat.import_name(name)
    further: dict[str, Any] = {}
    if processor is not None and "processor" in inspect.signature(trainer).parameters:  # not in 0.7.0
        further["processor"] = processor
    if is_async:
        further |= {
            "max_trajectory_age_steps": value_of(config, "grpo.async_grpo.max_trajectory_age_steps", 1),
            "teacher_worker_groups": parts.teacher_worker_groups,
            "alias_to_group_alias": parts.alias_to_group_alias,
        }
    models = (parts.policy, parts.policy_generation)
    data = (parts.dataloader, parts.val_dataloader, ready.tokenizer)
    records = (parts.logger, parts.checkpointer, parts.grpo_save_state)
    trainer(*models, *data, parts.loss_fn, *ready.environments, *records, config, **further)


def close(parts: Parts, environments: list[Any]) -> None:
    """Wait for the last checkpoint, then end environments and generation, as NeMo-RL's own driver does."""
    if hasattr(parts.checkpointer, "shutdown"):  # 0.7.0 saves synchronously
        parts.checkpointer.shutdown()
    if compat.has_name(f"{GRPO}:shutdown_environments"):
        compat.import_name(f"{GRPO}:shutdown_environments")(*environments)
    try:
        parts.policy_generation.shutdown()
    except Exception:
        log.exception("generation did not shut down")


if __name__ == "__main__":
    # Otherwise an object that NeMo-RL frees after Ray has shut down connects again, and hangs. Ray reads the
    # variable when imported; workers inherit the environment and must connect, as vLLM's engine process does.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    importlib.import_module("ray")
    del os.environ["RAY_ENABLE_AUTO_CONNECT"]
    sys.exit(main())
