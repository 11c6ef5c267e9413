"""``python -m nemo_grpo.nemorl.run_grpo --config RECIPE [key=value ...]``: train a cluster recipe on NeMo-RL.

The driver of a Ray cluster. NeMo-RL's trainer runs unchanged with the variant's loss, estimator and sampling
in place of its own.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from nemo_grpo.dotted import value_of
from nemo_grpo.errors import EXIT_USAGE, UserError, first_line
from nemo_grpo.families import family_for
from nemo_grpo.hf_folder import check_model_folder
from nemo_grpo.launch.settings import folder_of
from nemo_grpo.nemorl import compat, hooks, sft
from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.checkpoints import Exports, resume_carried, save_side_files
from nemo_grpo.nemorl.compat import Setup
from nemo_grpo.nemorl.config import ClusterRun, load_run
from nemo_grpo.nemorl.conversion import remove_remains
from nemo_grpo.nemorl.drawn import log_drawn
from nemo_grpo.nemorl.exchange import StepExchange
from nemo_grpo.nemorl.host_data import set_up_data
from nemo_grpo.nemorl.loss import ObjectiveLoss
from nemo_grpo.nemorl.policy import data_plane_of, policy_factory
from nemo_grpo.nemorl.ray_address import check_ray_address
from nemo_grpo.nemorl.refit import Refits
from nemo_grpo.nemorl.resume import resume_with_optimizer
from nemo_grpo.nemorl.rollout_error import watch_rollouts
from nemo_grpo.nemorl.run_record import alone, record_run
from nemo_grpo.nemorl.sampling import dynamic_sampling_for
from nemo_grpo.nemorl.step_diagnostics import StepDiagnostics
from nemo_grpo.nemorl.stopping import Stop, stop_after_step
from nemo_grpo.nemorl.worker_python import check_async_save, check_data_plane
from nemo_grpo.training.signals import EXIT_INTERRUPTED

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the driver.

    Returns: 0 if training finished, even if exports failed; 1 if it failed; 2 if the recipe is refused; 75 if
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
                ready = set_up(run)  # refuses what only the data can tell: a missing file, too few problems
            except UserError as error:
                sys.stderr.write(f"error: {error}\n")
                return EXIT_USAGE
            return train(run, ready)
    except Exception:  # may not recur in the next attempt
        # Not left to the interpreter's end: the error's frames hold NeMo-RL's workers, and workers that are
        # freed after Ray has gone wait for ever.
        log.exception("the driver failed")
        return 1


class Ready(NamedTuple):
    """All arguments of NeMo-RL's trainer; ``processor`` is None without images.

    ``exports`` is set if the recipe exports every checkpoint. ``is_supervised``: the trainer is NeMo-RL's for
    supervised training. ``last_step``: the step at which training is complete.
    """

    parts: Setup
    loss_fn: Any
    tokenizer: Any
    processor: Any
    environments: list[Any]
    exports: Exports | None
    last_step: int
    is_supervised: bool = False


def set_up(run: ClusterRun) -> Ready:
    """Read the data, start Ray, set NeMo-RL up, and put our parts into its trainer.

    Raises: UserError: missing task files, too few problems, a wrong install location of this package, a
            package missing from the workers' Python, impossible exports, remains of a conversion that cannot
            be removed, too few epochs, or a checkpoint without the variant's statistics.
    """
    from nemo_grpo.nemorl.environments import read_problems, setup_data

    share_sources()
    recipe = run.recipe
    problems = read_problems(run) if recipe.nemo_grpo.task is not None else None
    check_async_save(run.master_config)
    check_data_plane(run.master_config)
    compat.keep_tensor_pickles_plain()
    hf_config = model_config(run)
    exports = exports_of(run, hf_config)
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
        save_side_files(parts.checkpointer, tokenizer, hf_config)
        last = recipe.grpo.max_num_steps
        return Ready(parts, parts.loss_fn, tokenizer, None, [{}, {}], exports, last, is_supervised=True)
    encoder = processor or tokenizer
    data = set_up_data(run, encoder) if problems is None else setup_data(run, problems, encoder)
    dataset, val_dataset, *environments = data
    exchange, refits = StepExchange(), Refits()
    refits.install()
    parts = compat.unpack_setup(
        compat.import_name(f"{compat.GRPO}:setup")(
            config,
            tokenizer,
            dataset,
            val_dataset,
            processor=processor,
            policy_factory=policy_factory(run, exchange, refits),
        )
    )
    last = last_step(run, parts)
    loss_fn = parts.loss_fn
    if not recipe.loss_fn.is_stock:
        loss_fn = ObjectiveLoss(
            recipe.loss_fn,
            use_fused_linear_logprobs=_fused(config),
            folded=data_plane_of(config) is not None,
        )
        install(run, exchange, finished_steps(parts), tokenizer)
        resume_carried(recipe.loss_fn, parts.checkpointer, exchange)
    save_side_files(parts.checkpointer, encoder, hf_config, exchange)
    return Ready(parts, loss_fn, tokenizer, processor, environments, exports, last)


def train(run: ClusterRun, ready: Ready) -> int:
    """Train to the end or to a requested stop; returns the exit code."""
    parts, exports = ready.parts, ready.exports
    code = None
    try:
        try:
            if exports is not None:
                exports.after_every_save(parts.checkpointer)
                exports.begin()
            recipe, logger = run.recipe, parts.logger
            with (
                record_run(recipe, logger),
                watch_rollouts(recipe, logger),
                log_drawn(ready.environments, logger),
                stop_after_step(logger) as stop,
            ):
                if ready.is_supervised:
                    sft.run_trainer(parts, ready.tokenizer)
                else:
                    run_trainer(ready)
        finally:
            close(parts, ready.environments)
        code = exit_code(run, ready, stop)
    finally:
        if exports is not None:  # 0: nothing will restart this run
            exports.wait() if code == 0 else exports.stop()
    return code


def share_sources() -> None:
    """Let Ray's workers import this package: they inherit the driver's environment, not its `sys.path`.

    Raises: UserError: the package is installed beside the driver's other packages, which would shadow the
            workers' own versions.
    """
    root = Path(__file__).parents[2]
    if root.name in ("site-packages", "dist-packages"):
        raise UserError(
            f"PYTHONPATH: nemo_grpo was imported from {root}, whose other packages would shadow the "
            "workers' own; put the repository, or what `nemo-grpo slurm scripts DIR` writes, on PYTHONPATH, "
            "where every node sees it"
        )
    paths = [str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))


def load_tokenizer(run: ClusterRun) -> tuple[Any, Any]:
    """(processor or None, tokenizer); also completes the generation settings that depend on it."""
    policy = run.master_config.policy
    get_tokenizer = compat.import_name("nemo_rl.algorithms.utils:get_tokenizer")
    processor = get_tokenizer(policy["tokenizer"], get_processor=True) if run.has_images else None
    tokenizer = get_tokenizer(policy["tokenizer"]) if processor is None else processor.tokenizer
    if "generation" not in policy:  # supervised training
        return processor, tokenizer
    policy["generation"] = compat.import_name("nemo_rl.models.generation:configure_generation_config")(
        policy["generation"],
        tokenizer,
        has_refit_draft_weights=bool(value_of(policy, "draft.enabled", False)),
        trains_mtp=bool(value_of(policy, "megatron_cfg.mtp_num_layers", 0)),
    )
    return processor, tokenizer


def install(run: ClusterRun, exchange: StepExchange, first_step: int, tokenizer: Any) -> None:
    """Put the variant's estimator and sampling where NeMo-RL's trainers look for theirs."""
    recipe = run.recipe
    folds = data_plane_of(run.master_config) is not None
    period = recipe.nemo_grpo.engine.diagnostics_period
    diagnostics = StepDiagnostics(recipe.run_dir, period, lambda token: str(tokenizer.decode([token])))
    if folds and period > 0:
        log.info("data_plane.enabled=true: conversations do not reach the driver; no diagnostics.jsonl")

    def create_advantage_estimator(_master_config: Any) -> VariantEstimator:
        return VariantEstimator(
            recipe.loss_fn,
            num_generations=recipe.grpo.num_generations_per_prompt,
            seed=recipe.grpo.seed,
            first_step=first_step,
            exchange=exchange,
            diagnostics=diagnostics,
            folds=folds,
        )

    sample = dynamic_sampling_for(recipe.loss_fn, exchange)
    hooks.install("estimator", lambda _theirs: create_advantage_estimator)
    hooks.install("sampling", lambda _theirs: sample)


def finished_steps(parts: Setup) -> int:
    """Steps already done in the checkpoint that NeMo-RL resumes from.

    Synchronous training counts them in total_steps, asynchronous training in current_step alone.
    """
    state = parts.grpo_save_state
    return max(int(value_of(state, name, 0)) for name in ("total_steps", "current_step"))


def last_step(run: ClusterRun, parts: Setup) -> int:
    """The step at which training is complete: max_num_steps, or the end of NeMo-RL's own data.

    Raises: UserError: a task's data end earlier, with max_num_epochs.
    """
    grpo, state, config = run.recipe.grpo, parts.grpo_save_state, parts.master_config
    if value_of(config, "grpo.async_grpo.enabled", False):
        return grpo.max_num_steps
    num_epochs, epoch = value_of(config, "grpo.max_num_epochs", 1), int(value_of(state, "current_epoch", 0))
    left = grpo.max_num_steps - finished_steps(parts)
    possible = (num_epochs - epoch) * len(parts.dataloader) - int(value_of(state, "current_step", 0))
    if possible < left and run.recipe.nemo_grpo.task is None:
        log.info("grpo.max_num_epochs=%s ends training after %d more steps", num_epochs, max(possible, 0))
        return grpo.max_num_steps - left + max(possible, 0)
    if possible < left:
        end = finished_steps(parts) + max(possible, 0)
        raise UserError(
            f"grpo.max_num_epochs={num_epochs}: {left} steps remain until grpo.max_num_steps="
            f"{grpo.max_num_steps}, but the data ends after {max(possible, 0)} ({len(parts.dataloader)} per "
            f"epoch, {epoch} epochs done); raise it, or set the steps to {end}"
        )
    return grpo.max_num_steps


def model_config(run: ClusterRun) -> Any:
    """transformers' configuration of the model.

    Raises: UserError: there is none, or the model has code of its own and the recipe does not trust it.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    name, trusted = run.recipe.policy.model_name, run.recipe.nemo_grpo.trust_remote_code
    tokenizer = run.recipe.policy.tokenizer.name or name
    try:
        declared, _ = PretrainedConfig.get_config_dict(name)
        refused = not trusted and "auto_map" in {*declared, *get_tokenizer_config(tokenizer)}
        config = None if refused else AutoConfig.from_pretrained(name, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        raise UserError(
            f"policy.model_name={name} has no config.json that transformers can read ({first_line(error)}); "
            "give a Hugging Face folder, or a name in this node's cache"
        ) from error
    if config is None:
        raise UserError(
            f"policy.model_name={name} brings Python code (auto_map), and NeMo-RL runs whatever a model "
            "brings; read it and set nemo_grpo.trust_remote_code=true, or take another model"
        )
    return config


def exports_of(run: ClusterRun, hf_config: Any) -> Exports | None:
    """Exports of every checkpoint, if the recipe asks for them.

    Args:   hf_config: transformers' configuration of the model.
    Raises: UserError: the converter does not support the model, LoRA's base is not on this machine, or the
            checkpoint folder supports no hard links.
    """
    recipe, export = run.recipe, run.recipe.nemo_grpo.export
    if not (export.at_every_save and recipe.checkpointing.enabled):
        return None
    try:
        family_for(json.loads(hf_config.to_json_string()))
    except UserError as error:
        raise UserError(
            f"nemo_grpo.export.at_every_save=true: {recipe.policy.model_name} cannot be exported ({error}); "
            "set it to false"
        ) from None
    base = None
    if recipe.policy.megatron_cfg.lora_in_use:
        base = Path(folder_of(recipe.policy.model_name or "")).absolute()
        check_model_folder(base, "nemo_grpo.export.at_every_save=true merges LoRA, and policy.model_name")
    exports = Exports(recipe.checkpoint_dir.absolute(), recipe.run_dir.absolute() / "hf", export.dtype, base)
    exports.check()
    return exports


def run_trainer(ready: Ready) -> None:
    """NeMo-RL's trainer: synchronous, asynchronous, or synchronous on its data plane."""
    parts, processor, config = ready.parts, ready.processor, ready.parts.master_config
    is_async = bool(value_of(config, "grpo.async_grpo.enabled", False))
    name = f"{compat.GRPO}:{'async_grpo_train' if is_async else 'grpo_train'}"
    if data_plane_of(config):
        name = f"{hooks.GRPO_SYNC}:grpo_train_sync"
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
    trainer(
        parts.policy,
        parts.policy_generation,
        parts.dataloader,
        parts.val_dataloader,
        ready.tokenizer,
        ready.loss_fn,
        *ready.environments,
        parts.logger,
        parts.checkpointer,
        parts.grpo_save_state,
        config,
        **further,
    )


def close(parts: Setup, environments: list[Any]) -> None:
    """Wait for the last checkpoint, then end environments and generation, as NeMo-RL's own driver does."""
    if hasattr(parts.checkpointer, "shutdown"):  # 0.7.0 saves synchronously
        parts.checkpointer.shutdown()
    if compat.has_name(f"{compat.GRPO}:shutdown_environments"):
        compat.import_name(f"{compat.GRPO}:shutdown_environments")(*environments)
    try:
        parts.policy_generation.shutdown()
    except Exception:
        log.exception("generation did not shut down")


def exit_code(run: ClusterRun, ready: Ready, stop: Stop) -> int:
    """See `main`. An asynchronous trainer that returns early without a known reason has printed its error."""
    done, wanted = max(finished_steps(ready.parts), stop.last_step), ready.last_step
    if done >= wanted:
        return 0
    if stop.reached_threshold:
        log.info("stopped after step %d: validation reached grpo.stop_at_validation_threshold", done)
        return 0
    grpo = run.recipe.grpo
    if not stop.happened and grpo.use_dynamic_sampling and not grpo.is_async:
        log.warning(
            "the data ended after step %d of %d: with grpo.use_dynamic_sampling a step takes several "
            "batches, and grpo.max_num_epochs=%s are over; raise it to train on. Steps after the newest "
            "checkpoint are lost",
            *(done, wanted, value_of(ready.parts.master_config, "grpo.max_num_epochs", 1)),
        )
        return 0 if done else 1
    if not stop.happened:
        log.error("the trainer returned after step %d of %d; its own messages give the reason", done, wanted)
        return 1
    if not run.recipe.checkpointing.enabled:
        log.error("stopped without a checkpoint: checkpointing.enabled=false")
        return 1
    log.info("stopped after step %d with a checkpoint; start again to resume", done)
    return EXIT_INTERRUPTED


def _fused(master_config: Any) -> bool:
    return bool(value_of(master_config, "policy.megatron_cfg.use_fused_linear_logprobs", False))


if __name__ == "__main__":
    # Otherwise what NeMo-RL frees after Ray has gone connects again, and waits. Ray reads it when it is
    # imported; the workers inherit the environment and must connect: vLLM's engine is a process of its own.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    importlib.import_module("ray")
    del os.environ["RAY_ENABLE_AUTO_CONNECT"]
    sys.exit(main())
