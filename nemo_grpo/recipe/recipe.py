"""The recipe as one validated object, and numbers that follow from it. `validation` makes the object."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SerializeAsAny, field_validator

from nemo_grpo.recipe.interpolation import Resolved, Tree
from nemo_grpo.recipe.loader import Written, merge
from nemo_grpo.recipe.megatron_sections import Switch
from nemo_grpo.recipe.own import NemoGRPOSection
from nemo_grpo.recipe.policy_sections import Policy
from nemo_grpo.recipe.sections import AsyncRL, Checkpointing, Cluster, Data, Environments, GRPOSection, Logger
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.extensions import texts_of
from nemo_grpo.tasks import TaskConfig
from nemo_grpo.tasks.jsonl import FileTaskConfig
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.base import VariantConfig

RECIPE_FILE = "recipe.resolved.yaml"
"""File in a run's folder with the recipe that it was trained with."""


class Recipe(BaseModel):
    """All settings of a run: the values of the recipe and its bases, and defaults for the rest."""

    PLACES: ClassVar[tuple[str, ...]] = ("checkpointing", "cluster", "data_plane", "logger")

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, defer_build=True)

    grpo: GRPOSection
    """The loop."""
    loss_fn: SerializeAsAny[VariantConfig]
    """The variant and its parameters; ``loss_fn.build()`` makes the objective."""
    policy: Policy
    """Model, batches, engines."""
    data: Data = Field(default_factory=Data)
    """NeMo-RL's data sets; they are used where nemo_grpo.task is not given."""
    env: Environments = Field(default_factory=Environments)
    """NeMo-RL's environments; they are used where nemo_grpo.task is not given."""
    checkpointing: Checkpointing = Field(default_factory=Checkpointing)
    """Checkpoints."""
    logger: Logger = Field(default_factory=Logger)
    """Logs."""
    cluster: Cluster = Field(default_factory=Cluster)
    """Ranks."""
    data_plane: Switch | None = None
    """NeMo-RL's transport of batches outside the driver; null: none."""
    async_rl: AsyncRL | None = None
    """NeMo-RL's single controller; null: none."""
    nemo_grpo: NemoGRPOSection
    """Settings that NeMo-RL's config lacks."""
    _notes: tuple[str, ...] = PrivateAttr(())
    _source: Written = PrivateAttr()
    _settings: Tree = PrivateAttr(default_factory=dict)
    _references: Tree = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Compare the values of two recipes, wherever these came from."""
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _parse_loss_fn(cls, section: Any) -> Any:
        return parse_loss_fn(section) if isinstance(section, Mapping) else section

    def keep_origin(self, source: Written, settings: Tree, references: Tree, notes: Sequence[str]) -> None:
        """Remember how the recipe was loaded; see the properties of the same names."""
        # Private attributes may be set on a frozen model.
        self._source = source
        self._settings = settings
        self._references = references
        self._notes = tuple(notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on settings of a NeMo-RL recipe that the variant replaces, and on risky settings."""
        return self._notes

    @property
    def source(self) -> Written:
        """The merged files and overrides, with unresolved interpolations."""
        return self._source

    @property
    def settings(self) -> Tree:
        """Settings of the recipe and its bases, resolved and adapted to the variant, without defaults."""
        return self._settings

    @property
    def or_passes(self) -> str:
        """Clause such as " or 2 passes through the data", for a run that may end before max_num_steps.

        It is empty for a task's data, which do not end, and for an asynchronous run.
        """
        if self.nemo_grpo.task is not None or self.grpo.is_async:
            return ""
        num_passes = self.grpo.max_num_epochs
        passes = "1 pass" if num_passes == 1 else f"{num_passes} passes"
        return f" or {passes} through the data"

    @property
    def world_size(self) -> int:
        """Ranks that train, at least one."""
        return max(self.cluster.gpus_per_node * self.cluster.num_nodes - self.num_rollout_gpus, 1)

    @property
    def num_rollout_gpus(self) -> int:
        """GPUs that only sample; 0 if rollouts and training share GPUs."""
        colocated = self.policy.generation.colocated
        if self.nemo_grpo.target == "embedded" or colocated.enabled:
            return 0
        # On a single node NeMo-RL takes a part of its GPUs, on several nodes it takes whole nodes.
        if self.cluster.num_nodes == 1:
            return colocated.resources.gpus_per_node or 0
        return (colocated.resources.num_nodes or 0) * self.cluster.gpus_per_node

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one replica of the model: TP x PP x CP."""
        return math.prod(self.policy.layout.sizes)

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.world_size // self.model_parallel_size

    @property
    def num_sequences_per_step(self) -> int:
        """Number of responses per step, B."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def num_updates_per_step(self) -> int:
        """Number of optimizer updates per step."""
        return self.num_sequences_per_step // self.policy.train_global_batch_size

    @property
    def num_sequences_per_rank(self) -> int:
        """Sequences of a step on a data-parallel rank."""
        return self.num_sequences_per_step // max(self.data_parallel_size, 1)

    @property
    def layout_fits(self) -> bool:
        """True if the ranks hold whole replicas of the model."""
        return self.world_size % self.model_parallel_size == 0

    @property
    def num_sequences_per_microbatch(self) -> int:
        """Smallest number of sequences in one microbatch, summed over the data-parallel ranks."""
        # A microbatch filled by tokens may hold a single long sequence.
        num_per_rank = 1 if self.policy.batches_by_tokens else self.policy.train_micro_batch_size
        return num_per_rank * self.data_parallel_size

    @property
    def num_stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.world_size // self.policy.megatron_cfg.pipeline_model_parallel_size

    @property
    def num_expert_ranks(self) -> int:
        """Ranks that share one replica of the experts: EP x expert TP."""
        layout = self.policy.megatron_cfg.layout
        return layout.expert * layout.expert_tensor

    @property
    def samples_with_vllm(self) -> bool:
        """True if NeMo-RL samples with vLLM. Its other samplers do not read vllm_cfg."""
        return self.policy.generation.backend == "vllm"

    @property
    def uses_fp8(self) -> bool:
        """True if the policy trains in FP8 or samples in it."""
        samples_in_fp8 = self.samples_with_vllm and self.policy.generation.vllm_cfg.precision == "fp8"
        return samples_in_fp8 or self.policy.megatron_cfg.fp8_in_use is not None

    @property
    def validates_by_rollouts(self) -> bool:
        """True if the run validates by sampling, and the recipe sets the number of problems and the batch."""
        # With null NeMo-Gym decides both.
        are_set = self.grpo.max_val_samples is not None and self.grpo.val_batch_size is not None
        return are_set and self.grpo.validates and not self.loss_fn.learns_from_demonstrations

    @property
    def validates_a_whole_batch(self) -> bool:
        """True if validation has enough problems for at least one batch."""
        num_problems = self.grpo.max_val_samples or 0
        batch_size = self.grpo.val_batch_size or 0
        return self.validates_by_rollouts and num_problems >= batch_size

    @property
    def streams_chunks(self) -> bool:
        """True if the single controller trains on chunks of a step as they arrive."""
        prompts = self.grpo.num_prompts_per_step
        return self.async_rl is not None and self.async_rl.min_groups_for_streaming_train < prompts

    @property
    def chunk_unit(self) -> int:
        """Divisor of the number of sequences in a streamed chunk.

        It is the number of data-parallel ranks, times the size of a microbatch if that is a number of rows.
        """
        if self.policy.batches_by_tokens:
            return self.data_parallel_size
        # Scoring and training split the same chunk into microbatches of their own sizes.
        microbatches = math.lcm(self.policy.train_micro_batch_size, self.policy.logprob_batch_size)
        return self.data_parallel_size * microbatches

    @property
    def num_groups_ahead(self) -> int:
        """Largest number of groups in flight: the current step's, and those of the steps sampled ahead."""
        return self.grpo.num_prompts_per_step * (self.rollouts_ahead + 1)

    @property
    def uses_data_plane(self) -> bool:
        """True if NeMo-RL's workers get their batches from its data plane instead of the driver."""
        return self.data_plane is not None and self.data_plane.enabled

    @property
    def has_single_controller(self) -> bool:
        """True if NeMo-RL's single controller trains. It samples and trains at the same time."""
        return self.async_rl is not None

    @property
    def rollouts_ahead(self) -> int:
        """Number of steps by which rollouts may run ahead of training; 0 if the two take turns."""
        if self.async_rl is not None:
            return self.async_rl.sampler.ahead
        if self.grpo.async_grpo is None or not self.grpo.async_grpo.enabled:
            return 0
        return self.grpo.async_grpo.max_trajectory_age_steps

    @property
    def policy_is_scored(self) -> bool:
        """True if NeMo-RL computes the policy's logprobs of a step before its updates."""
        return not self.loss_fn.force_on_policy_ratio or self.grpo.seq_logprob_error_threshold is not None

    @property
    def task(self) -> TaskConfig:
        """The task, for commands that need one.

        Raises: UserError: the recipe has no task, because it keeps NeMo-RL's own data.
        """
        task = self.nemo_grpo.task
        if task is None:
            raise UserError("nemo_grpo.task is missing; this command needs one: data and env are NeMo-RL's")
        if isinstance(task, FileTaskConfig) and value_of(self, "data.shuffle") is False:
            return task.in_file_order()
        return task

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.nemo_grpo.runs_dir) / self.nemo_grpo.run_name

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the run's checkpoints."""
        folder = self.checkpointing.checkpoint_dir
        return Path(folder) if folder else self.run_dir / "checkpoints"

    @property
    def own_files(self) -> dict[str, str]:
        """Texts of the files with the user's own variant, task and rewards, by path."""
        task = self.nemo_grpo.task
        task_name = None if task is None else task.name
        return texts_of([self.loss_fn.variant, task_name, *self.nemo_grpo.rewards])

    def to_dict(self) -> Tree:
        """Return every value as a nested mapping; texts from the environment stay ``${oc.env:NAME}``.

        `load_recipe_dict` turns it back into an equal recipe.
        """
        return merge(*self.resolved)

    @property
    def resolved(self) -> Resolved:
        """All values, and the interpolations of the texts that come from this machine."""
        return Resolved(self.model_dump(), self._references)

    def with_precision(self, precision: str) -> Self:
        """Copy the recipe with ``policy.precision`` set, in place of ``auto``."""
        return self.model_copy(update={"policy": self.policy.model_copy(update={"precision": precision})})

    def to_yaml(self) -> str:
        """Write the resolved recipe as YAML, from which `load_recipe` gives an equal recipe."""
        return as_text(self.resolved)


def as_text(settings: Resolved) -> str:
    """Write settings as YAML, from which the loader reads the same settings."""
    written = merge(escaped(settings.tree), settings.references)
    return yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=110)


def escaped(value: Any) -> Any:
    """Escape ``${`` in texts, so that reading the file again does not interpolate them."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: escaped(below) for key, below in value.items()}
    if isinstance(value, list):
        return [escaped(below) for below in value]
    return value
