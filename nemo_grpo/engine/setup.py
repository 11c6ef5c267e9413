"""Construction of a run from its recipe: rollouts, learner and recorder."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nemo_grpo.engine.checkpoint_store import CheckpointStore
from nemo_grpo.engine.checks import Start
from nemo_grpo.engine.learning import Learner
from nemo_grpo.engine.megatron import options, parallel
from nemo_grpo.engine.megatron.lora import LoRASettings
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.recorder import DTYPES, Recorder
from nemo_grpo.engine.rollout import Rollouts
from nemo_grpo.engine.saving import Saver
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.continuation import keep_inputs, list_and_check_inputs
from nemo_grpo.run.demonstrations import Demonstrations
from nemo_grpo.run.diagnostics import StepDiagnostics
from nemo_grpo.run.folder import RunFolder
from nemo_grpo.run.trackers import open_trackers
from nemo_grpo.sampling.generators import DistributedGenerator, build_local
from nemo_grpo.sampling.requests import Generator, SamplingParams
from nemo_grpo.support import distributed, machine
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.hf_folder import end_tokens, load_config, load_tokenizer, load_weights
from nemo_grpo.tasks.base import make_ready
from nemo_grpo.tasks.scoring import Scorer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The parts of a run: `rollouts` sample, the `learner` trains, the `recorder` writes."""

    recipe: Recipe
    rollouts: Rollouts
    learner: Learner
    recorder: Recorder


def set_up(recipe: Recipe, source: Path, start: Start, *, resume: bool = False) -> Run:
    """Build model, sampler and optimizer, and open the run's folder.

    Args:
        recipe: Recipe that `check` has accepted.
        source: Model folder to start from.
        start: Result of `check`.
        resume: True to continue from the newest checkpoint.
    """
    check_ranks(recipe)
    torch.set_num_threads(recipe.nemo_grpo.engine.num_threads)
    machine.keep_freed_memory()
    # The ranks connect before the policy is built, because the first one locks the folder and decides for
    # all.
    parallel.initialize(recipe.policy.megatron_cfg.layout, start.device, recipe.grpo.seed)
    leads = distributed.is_rank_zero()
    folder = RunFolder(recipe.run_dir, checkpoints=recipe.checkpoint_dir, leads=leads, resume=resume)
    if resume:
        folder.lock()
    config = load_config(source)
    width = config.get_text_config().hidden_size
    recipe = choose_precision(recipe, start.device, width, start.began_as, leads=leads)

    run = build(recipe, source, config, start, folder)
    learner = run.learner
    recorder = run.recorder
    inputs = from_first_rank(
        lambda: list_and_check_inputs(
            recipe,
            source,
            resumed=folder.path if resume else None,
            has_reference=learner.objective.needs_reference,
        )
    )
    run.rollouts.check_problems()

    store = recorder.saver.store
    checkpoint = store.newest_whole() if resume else None
    if checkpoint is not None:
        recorder.restore(checkpoint, learner)
    from_step = -1 if checkpoint is None else learner.state.step
    # The folder of a finished run keeps the recipe that the run was trained with.
    is_over = learner.has_ended and not recorder.unwritten
    settings = start.began_as if is_over and start.began_as is not None else recipe
    folder.open(
        settings.to_yaml(),
        recipe.own_files if settings is recipe else {},
        from_step=from_step,
        trackers=lambda path: open_trackers(recipe, path, from_step),
    )
    # Leftovers are removed only now that the folder is locked: another process's save looks like a leftover.
    if leads:
        keep_inputs(folder.path, inputs, begins=from_step < 0)
        store.remove_leftovers()
    return run


def check_ranks(recipe: Recipe) -> None:
    """Refuse a launch with another number of processes than the recipe asks for."""
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if num_launched != recipe.world_size:
        raise UserError(
            f"cluster.gpus_per_node={recipe.cluster.gpus_per_node} x cluster.num_nodes="
            f"{recipe.cluster.num_nodes} are {recipe.world_size} ranks, but {num_launched} were launched; "
            "make them agree"
        )


def choose_precision(
    recipe: Recipe, device: torch.device, width: int, began_as: Recipe | None, *, leads: bool
) -> Recipe:
    """Replace ``policy.precision=auto`` in the recipe by a precision.

    Args:
        recipe: Recipe of the run.
        device: Device of this rank.
        width: Hidden size of the model.
        began_as: Recipe that a resumed run began with, whose precision is kept.
        leads: True on the rank that logs the choice.
    """
    setting = recipe.policy.precision
    is_auto = setting == "auto"
    on_gpu = device.type == "cuda"
    precision: str
    if is_auto and began_as is not None:
        precision = began_as.policy.precision
    elif is_auto and on_gpu:
        precision = "bfloat16"
    else:
        precision = machine.precision(setting, width)
    if leads and is_auto:
        log.info("policy.precision=auto: %s", precision)
    if leads and precision == "bfloat16" and not (on_gpu or machine.has_bf16()):
        log.warning(
            "policy.precision=bfloat16: this processor has no BF16 instructions; on one like it BF16 "
            "products took 6 to 10 times as long as FP32's: use auto or float32 in a new run"
        )
    return recipe.with_precision(precision)


def build(recipe: Recipe, source: Path, config: Any, start: Start, folder: RunFolder) -> Run:
    """Build the parts of a run. Nothing is written yet.

    Args:
        recipe: Recipe of the run.
        source: Model folder to start from.
        config: Config object of transformers for that model.
        start: Result of `check`.
        folder: Folder of the run.
    """
    objective = recipe.loss_fn.build()
    tokenizer = load_tokenizer(source)
    policy = build_policy(recipe, source, config, start.device, keep_reference=objective.needs_reference)
    checkpointing = recipe.checkpointing
    store = CheckpointStore(
        recipe.checkpoint_dir,
        checkpointing.keep_top_k,
        checkpointing.metric_key,
        checkpointing.higher_is_better,
        folder.leads,
        distributed.barrier,
    )
    saver = Saver(store, policy, source, recipe.policy.megatron_cfg.checkpoint.async_save)
    diagnostics = StepDiagnostics(folder, recipe.nemo_grpo.engine.diagnostics_period, tokenizer.decode)
    return Run(
        recipe=recipe,
        rollouts=build_rollouts(recipe, source, config, start, tokenizer),
        learner=Learner(recipe, objective, policy),
        recorder=Recorder(recipe, folder, saver, diagnostics),
    )


def build_rollouts(recipe: Recipe, source: Path, config: Any, start: Start, tokenizer: Any) -> Rollouts:
    """Build the rollouts of a run. A supervised run also gets its demonstrations there."""
    section = recipe.nemo_grpo
    task = start.task
    scorer = Scorer(task, section.rewards, section.prompt, section.max_failed_rewards)
    from_first_rank(lambda: make_ready(task))
    end_token_ids = end_tokens(source, tokenizer)
    is_supervised = recipe.loss_fn.learns_from_demonstrations
    return Rollouts(
        recipe=recipe,
        task=task,
        scorer=scorer,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        generator=build_generator(recipe, config, start.device),
        sampling=training_sampling(recipe, end_token_ids),
        validation_sampling=validation_sampling(recipe, end_token_ids),
        problems=task.validation_problems(recipe.grpo.num_val_problems) if recipe.grpo.validates else [],
        demonstrations=Demonstrations(recipe, task, tokenizer) if is_supervised else None,
    )


def build_policy(
    recipe: Recipe, source: Path, config: Any, device: torch.device, *, keep_reference: bool
) -> MegatronPolicy:
    """Build the policy with the source's weights.

    Args:
        recipe: Recipe of the run.
        source: Model folder.
        config: Config object of transformers for that model.
        device: Device of this rank.
        keep_reference: True to keep a copy of the weights as the reference policy.
    """
    megatron = recipe.policy.megatron_cfg
    hint = options.fp8_hint(megatron)
    if hint is not None and distributed.is_rank_zero():
        log.warning("%s", hint)
    schedule = megatron.scheduler
    if schedule.lr_decay_iters is None:
        num_updates = recipe.grpo.max_num_steps * recipe.num_updates_per_step
        # megatron-core requires that the decay ends after the warmup.
        num_decay_updates = max(num_updates, schedule.lr_warmup_iters + 1)
        schedule = schedule.model_copy(update={"lr_decay_iters": num_decay_updates})
    peft = megatron.lora_in_use
    policy = MegatronPolicy(
        config,
        megatron.optimizer,
        schedule,
        layout=megatron.layout,
        dtype=DTYPES[recipe.policy.precision],
        device=device,
        seed=recipe.grpo.seed,
        lora=LoRASettings(peft.dim, peft.alpha, peft.layers) if peft is not None else None,
        config_fields=options.config_fields(megatron),
    )
    policy.load_weights(load_weights(source), keep_reference=keep_reference)
    return policy


def build_generator(recipe: Recipe, config: Any, device: torch.device) -> Generator:
    """Build the sampler. Several ranks share the work of sampling. The policy gives the weights later."""
    generator = build_local(
        recipe.nemo_grpo.engine.generator,
        config,
        DTYPES[recipe.policy.precision],
        device,
        recipe.policy.generation_batch_size,
    )
    return DistributedGenerator(generator) if recipe.world_size > 1 else generator


def training_sampling(recipe: Recipe, end_token_ids: Sequence[int]) -> SamplingParams:
    """Return the sampling parameters of the rollouts.

    Args:
        recipe: Recipe of the run.
        end_token_ids: The model's `end_tokens`. Responses end at these and at the recipe's stop_token_ids.
    """
    generation = recipe.policy.generation
    recipe_token_ids = generation.stop_token_ids or ()
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=(*end_token_ids, *recipe_token_ids),
    )


def validation_sampling(recipe: Recipe, end_token_ids: Sequence[int]) -> SamplingParams:
    """Return the sampling parameters of validations, which are greedy with val_temperature=0."""
    generation = recipe.policy.generation
    return replace(
        training_sampling(recipe, end_token_ids),
        # Greedy sampling ignores the temperature, but 0 would not be valid.
        temperature=generation.val_temperature or 1.0,
        top_p=generation.val_top_p,
        top_k=generation.val_top_k,
        greedy=generation.val_temperature == 0,
    )
