"""The recipe as one validated object; `validation` makes one."""

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
    """Everything that defines a run: values of the recipe, of its bases, and defaults; frozen."""

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
        """Compare values, not their sources."""
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _parse_loss_fn(cls, section: Any) -> Any:
        return parse_loss_fn(section) if isinstance(section, Mapping) else section

    def keep_origin(self, source: Written, settings: Tree, references: Tree, notes: Sequence[str]) -> None:
        """Keep how the recipe was loaded; see the properties of these names."""
        # Private attributes may be set on a frozen model.
        self._source = source
        self._settings = settings
        self._references = references
        self._notes = tuple(notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on settings of NeMo-RL's own recipe that the variant replaces, and on what is lost."""
        return self._notes

    @property
    def source(self) -> Written:
        """Files merged with overrides, interpolations unresolved."""
        return self._source

    @property
    def settings(self) -> Tree:
        """Settings that were given, resolved and with our names; defaults are not among them."""
        return self._settings

    @property
    def or_passes(self) -> str:
        """Clause on the epochs of NeMo-RL's own data, which may end the run earlier; "" for a task's data."""
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
        # NeMo-RL takes a part of the only node, or whole nodes of several.
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
        """B, responses per step."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def num_updates_per_step(self) -> int:
        """Optimizer updates per rollout."""
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
        """Fewest sequences in one microbatch on all data-parallel ranks."""
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
        """True if vllm_cfg has an effect; NeMo-RL's other samplers read a section of their own."""
        return self.policy.generation.backend == "vllm"

    @property
    def uses_fp8(self) -> bool:
        """True if the policy trains in FP8 or samples in it."""
        samples_in_fp8 = self.samples_with_vllm and self.policy.generation.vllm_cfg.precision == "fp8"
        return samples_in_fp8 or self.policy.megatron_cfg.fp8_in_use is not None

    @property
    def validates_by_rollouts(self) -> bool:
        """True if validation samples a number of problems, in batches, that the recipe sets."""
        # Null leaves both to NeMo-Gym.
        are_set = self.grpo.max_val_samples is not None and self.grpo.val_batch_size is not None
        return are_set and self.grpo.validates and not self.loss_fn.learns_from_demonstrations

    @property
    def validates_a_whole_batch(self) -> bool:
        """True if validation has one batch or more."""
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
        """Sequences that a streamed chunk must be a multiple of: ranks, times microbatches unless packed."""
        if self.policy.batches_by_tokens:
            return self.data_parallel_size
        # Both passes split the same chunk, each into its own microbatches.
        microbatches = math.lcm(self.policy.train_micro_batch_size, self.policy.logprob_batch_size)
        return self.data_parallel_size * microbatches

    @property
    def num_groups_ahead(self) -> int:
        """Groups in flight at most: of the current step and of those that rollouts may run ahead."""
        return self.grpo.num_prompts_per_step * (self.rollouts_ahead + 1)

    @property
    def uses_data_plane(self) -> bool:
        """True if batches reach NeMo-RL's workers over its data plane, not through the driver."""
        return self.data_plane is not None and self.data_plane.enabled

    @property
    def has_single_controller(self) -> bool:
        """True if NeMo-RL's single controller trains, sampling at the same time."""
        return self.async_rl is not None

    @property
    def rollouts_ahead(self) -> int:
        """Steps by which rollouts may run ahead of training; 0: they take turns."""
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
        """The task.

        Raises: UserError: the recipe keeps NeMo-RL's own data and has none.
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
        """Files of the user's own variant, task and rewards -> their texts."""
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
        """Every value, and the references to the environment."""
        return Resolved(self.model_dump(), self._references)

    def with_precision(self, precision: str) -> Self:
        """Copy the recipe with ``policy.precision`` set, in place of ``auto``."""
        return self.model_copy(update={"policy": self.policy.model_copy(update={"precision": precision})})

    def to_yaml(self) -> str:
        """Write the resolved recipe; `load_recipe` of such a file gives an equal recipe."""
        return as_text(self.resolved)


def as_text(settings: Resolved) -> str:
    """Write settings as YAML that reads back as the same settings."""
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
