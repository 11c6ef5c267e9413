"""Builds the parts of a run from its recipe."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nemo_grpo.engine import validation
from nemo_grpo.engine.checkpoint_store import WEIGHTS, CheckpointStore, read_info
from nemo_grpo.engine.checks import check_ranks, choose_device, choose_precision
from nemo_grpo.engine.learning import Learner, TrainingState
from nemo_grpo.engine.megatron import options, parallel
from nemo_grpo.engine.megatron.lora import LoRASettings
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.megatron.policy_checkpoint import load_policy
from nemo_grpo.engine.saving import Saver
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.continuation import (
    ANOTHER_RUN,
    check_inputs,
    data_files,
    keep_inputs,
    model_files,
    resume_inputs,
)
from nemo_grpo.run.demonstrations import Demonstrations
from nemo_grpo.run.folder import RunFolder
from nemo_grpo.run.trackers import open_trackers
from nemo_grpo.sampling.generators import DistributedGenerator, build_local
from nemo_grpo.sampling.requests import Generator, SamplingParams
from nemo_grpo.support import distributed, machine
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.hf_folder import end_tokens, load_config, load_tokenizer, load_weights
from nemo_grpo.tasks import Problem, Task
from nemo_grpo.tasks.base import make_ready
from nemo_grpo.tasks.prompts import PROMPTS_CHECKED, encode_prompts
from nemo_grpo.tasks.retriever import RetrieverError
from nemo_grpo.tasks.scoring import RewardsFailed, Scorer

log = logging.getLogger(__name__)

ON_EVERY_RANK = (RewardsFailed, RetrieverError, UserError)
"""Errors raised identically on every rank."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Parts:
    """Parts of a run, and its position.

    Attributes: source: model folder that the policy started from.
                problems: for validation.  demonstrations: of a supervised run.
                validated: metrics of the validation of these weights; empty: there was none.
                pending: row of the last step that metrics.jsonl lacks; a checkpoint keeps it.
    """

    recipe: Recipe
    source: Path
    folder: RunFolder
    task: Task
    scorer: Scorer
    tokenizer: Any
    policy: MegatronPolicy
    learner: Learner
    generator: Generator
    sampling: SamplingParams
    validation_sampling: SamplingParams
    problems: list[Problem]
    saver: Saver
    demonstrations: Demonstrations | None = None
    validated: dict[str, float] = field(default_factory=dict)
    pending: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> TrainingState:
        return self.learner.state

    @property
    def has_ended(self) -> bool:
        """True if no step is left to train."""
        return self.state.step >= self.recipe.grpo.max_num_steps or self.state.reached_goal

    def encode(self, problems: list[Problem]) -> list[list[int]]:
        """Return the token ids of the problems' prompts."""
        return encode_prompts(
            problems,
            self.tokenizer,
            self.recipe.nemo_grpo.prompt,
            limit=self.recipe.policy.max_total_sequence_length,
            max_new_tokens=self.sampling.max_new_tokens,
            vocab_size=self.policy.hf.vocab_size,
        )

    def check_training_data(self) -> None:
        """Encode all training prompts or demonstrations, of an endless stream the first ones."""
        if self.demonstrations is not None:
            self.demonstrations.check(self.problems)
            return
        number, seed = getattr(self.task, "num_train_problems", PROMPTS_CHECKED), self.recipe.grpo.seed
        problems = (self.task.train_problem(index, seed) for index in range(number))

        def encode_all() -> None:
            while some := list(islice(problems, PROMPTS_CHECKED)):
                self.encode(some)

        from_first_rank(encode_all)

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint."""
        info = read_info(checkpoint)
        load_policy(self.policy, checkpoint / WEIGHTS)
        goal = validation.reached_goal(self.recipe.grpo, info["metrics"])  # which may have been raised
        self.learner.state = replace(TrainingState(**info["state"]), reached_goal=goal, skipped_in_a_row=0)
        self.validated, self.pending = info["metrics"], info.get("unlogged", {})
        self.saver.saved = self.state.step
        log.info("resuming from %s", checkpoint)

    def save(self) -> None:
        """Write a checkpoint of the present state; with async_save it is complete some steps later."""
        machine.release_freed_memory()
        info = {"state": asdict(self.state), "metrics": self.validated, "unlogged": self.pending}
        self.saver.save(self.state.step, info)

    @contextmanager
    def saved_before_failure(self) -> Iterator[None]:
        """Save the finished steps if an error within the block ends the run.

        Several ranks must all fail, since a save waits for each. A policy whose logits are not finite is not
        saved.
        """
        position = self.state.next_problem
        try:
            yield
        except Exception as error:
            self.state.next_problem = position
            alike = self.recipe.world_size == 1 or isinstance(error, ON_EVERY_RANK)
            saves = alike and not isinstance(error, FloatingPointError) and self.recipe.checkpointing.enabled
            if saves and self.state.step > self.saver.saved:
                self.save()
                self.saver.finish()
                log.error("step %d is saved, from which --resume continues", self.saver.saved)
            raise


def set_up(recipe: Recipe, source: Path, *, resume: bool = False, began_as: Recipe | None = None) -> Parts:
    """Build model, sampler and optimizer, and open the run's folder.

    Args: recipe: that `check` accepts.  source: model folder to start from.
          resume: continue from the newest checkpoint.  began_as: the recipe that the run began with.
    """
    check_ranks(recipe)
    torch.set_num_threads(recipe.nemo_grpo.engine.num_threads)
    machine.keep_freed_memory()
    device = choose_device(recipe)
    parallel.initialize(recipe.policy.megatron_cfg.layout, device, recipe.grpo.seed)
    leads = distributed.is_rank_zero()
    folder = RunFolder(recipe.run_dir, checkpoints=recipe.checkpoint_dir, leads=leads, resume=resume)
    if resume:
        folder.lock()
    width = load_config(source).get_text_config().hidden_size
    recipe = choose_precision(recipe, device, width, began_as, leads=leads)
    parts = build(recipe, source, folder)
    inputs = from_first_rank(lambda: data_files(recipe) | model_files(source))
    if resume:
        used = resume_inputs(inputs, recipe, has_reference=parts.learner.objective.needs_reference)
        from_first_rank(lambda: check_inputs(folder.path, used, ANOTHER_RUN))
    parts.encode(parts.problems)  # a problem that cannot be used ends the run now, not at its turn
    parts.check_training_data()
    checkpoint = parts.saver.store.newest_whole() if resume else None
    if checkpoint is not None:
        parts.restore(checkpoint)
    from_step = -1 if checkpoint is None else parts.state.step
    # A finished run keeps the recipe that it was trained with.
    kept = began_as if parts.has_ended and not parts.pending else None
    folder.open(
        (kept or recipe).to_yaml(),
        {} if kept else recipe.own_files,
        from_step=from_step,
        trackers=lambda path: open_trackers(recipe, path, from_step),
    )
    if leads:  # not before the folder is ours: another process's save under way looks like a leftover
        keep_inputs(folder.path, inputs, begins=from_step < 0)
        parts.saver.store.remove_leftovers()
    return parts


def build(recipe: Recipe, source: Path, folder: RunFolder) -> Parts:
    """Build the parts of a run; nothing is written."""
    own, objective, task = recipe.nemo_grpo, recipe.loss_fn.build(), recipe.task.build()
    scorer = Scorer(task, own.rewards, own.prompt, own.max_failed_rewards)
    from_first_rank(lambda: make_ready(task))
    tokenizer = load_tokenizer(source)
    ends, learns = end_tokens(source, tokenizer), recipe.loss_fn.learns_from_demonstrations
    policy = build_policy(recipe, source, keep_reference=objective.needs_reference)
    saving = recipe.checkpointing
    store = CheckpointStore(
        recipe.checkpoint_dir,
        saving.keep_top_k,
        saving.metric_key,
        saving.higher_is_better,
        folder.leads,
        distributed.barrier,
    )
    return Parts(
        recipe=recipe,
        source=source,
        folder=folder,
        task=task,
        scorer=scorer,
        tokenizer=tokenizer,
        policy=policy,
        learner=Learner(recipe, objective, policy),
        generator=build_generator(recipe, source),
        sampling=training_sampling(recipe, ends),
        validation_sampling=validation_sampling(recipe, ends),
        problems=task.validation_problems(recipe.grpo.num_val_problems) if recipe.grpo.validates else [],
        saver=Saver(store, policy, source, recipe.policy.megatron_cfg.checkpoint.async_save),
        demonstrations=Demonstrations(recipe, task, tokenizer) if learns else None,
    )


def build_policy(recipe: Recipe, source: Path, *, keep_reference: bool) -> MegatronPolicy:
    """Build the policy with the source's weights."""
    megatron = recipe.policy.megatron_cfg
    if (hint := options.fp8_hint(megatron)) and distributed.is_rank_zero():
        log.warning("%s", hint)
    schedule, peft = megatron.scheduler, megatron.lora_in_use
    if schedule.lr_decay_iters is None:
        num_updates = recipe.grpo.max_num_steps * recipe.num_updates_per_step
        decay = max(num_updates, schedule.lr_warmup_iters + 1)
        schedule = schedule.model_copy(update={"lr_decay_iters": decay})
    policy = MegatronPolicy(
        load_config(source),
        megatron.optimizer,
        schedule,
        layout=megatron.layout,
        dtype=DTYPES[recipe.policy.precision],
        device=choose_device(recipe),
        seed=recipe.grpo.seed,
        lora=LoRASettings(peft.dim, peft.alpha, peft.layers) if peft is not None else None,
        config_fields=options.config_fields(megatron),
    )
    policy.load_weights(load_weights(source), keep_reference=keep_reference)
    return policy


def build_generator(recipe: Recipe, source: Path) -> Generator:
    """Build the sampler, shared between the ranks; its weights come from the policy."""
    kind = recipe.nemo_grpo.engine.generator
    assert kind != "vllm"  # `checks` has refused it
    generator = build_local(
        kind,
        load_config(source),
        DTYPES[recipe.policy.precision],
        choose_device(recipe),
        recipe.policy.generation_batch_size,
    )
    return DistributedGenerator(generator) if recipe.world_size > 1 else generator


def training_sampling(recipe: Recipe, ends: Sequence[int]) -> SamplingParams:
    """Return the rollouts' sampling; ``ends``: the model's `end_tokens`, beside the recipe's own."""
    generation = recipe.policy.generation
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=(*ends, *(generation.stop_token_ids or ())),
    )


def validation_sampling(recipe: Recipe, ends: Sequence[int]) -> SamplingParams:
    """Return validation's sampling; val_temperature 0 is greedy."""
    generation = recipe.policy.generation
    return replace(
        training_sampling(recipe, ends),
        temperature=generation.val_temperature or 1.0,
        top_p=generation.val_top_p,
        top_k=generation.val_top_k,
        greedy=generation.val_temperature == 0,
    )
