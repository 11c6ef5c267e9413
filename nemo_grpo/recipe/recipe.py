"""The recipe as one validated object; `validation` makes one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SerializeAsAny, field_validator

from nemo_grpo.dotted import value_of
from nemo_grpo.extensions import texts_of
from nemo_grpo.recipe.loader import Tree, merge
from nemo_grpo.recipe.own import NemoGRPOSection
from nemo_grpo.recipe.sections import GENERATION, Checkpointing, Cluster, GRPOSection, Logger, Policy
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.base import VariantConfig


class Recipe(BaseModel):
    """Everything that defines a run, frozen: values given, inherited and default."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    grpo: GRPOSection
    """The loop."""
    loss_fn: SerializeAsAny[VariantConfig]
    """The variant and its parameters; ``loss_fn.build()`` makes the objective."""
    policy: Policy
    """Model, batches, engines."""
    data: dict[str, Any] = {}
    """NeMo-RL's datasets; the embedded engine takes its problems from nemo_grpo.task."""
    env: dict[str, Any] = {}
    """NeMo-RL's environments; the embedded engine takes its rewards from nemo_grpo.task."""
    checkpointing: Checkpointing = Field(default_factory=Checkpointing)
    """Checkpoints."""
    logger: Logger = Field(default_factory=Logger)
    """Logs."""
    cluster: Cluster = Field(default_factory=Cluster)
    """Ranks."""
    nemo_grpo: NemoGRPOSection
    """Settings that NeMo-RL's config lacks."""

    _from_environment: Tree = PrivateAttr(default_factory=dict)

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _parse_loss_fn(cls, section: Any) -> Any:
        return parse_loss_fn(section) if isinstance(section, Mapping) else section

    @property
    def world_size(self) -> int:
        """Ranks that train, at least one."""
        return max(self.cluster.gpus_per_node * self.cluster.num_nodes - self.num_rollout_gpus, 1)

    @property
    def num_rollout_gpus(self) -> int:
        """GPUs that only sample; 0 if rollouts and training share GPUs."""
        colocated = f"{GENERATION}.colocated"
        if self.nemo_grpo.target == "embedded" or value_of(self, f"{colocated}.enabled", True):
            return 0
        if self.cluster.num_nodes == 1:
            return int(value_of(self, f"{colocated}.resources.gpus_per_node", 0))
        return int(value_of(self, f"{colocated}.resources.num_nodes", 0)) * self.cluster.gpus_per_node

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one replica of the model: TP x PP x CP."""
        m = self.policy.megatron_cfg
        return m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size

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
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.nemo_grpo.runs_dir) / self.nemo_grpo.run_name

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the run's checkpoints."""
        given = self.checkpointing.checkpoint_dir
        return Path(given) if given else self.run_dir / "checkpoints"

    @property
    def own_files(self) -> dict[str, str]:
        """Files of the user's own variant, task and rewards -> their texts."""
        own = self.nemo_grpo
        return texts_of([self.loss_fn.variant, own.task.name, *own.rewards])

    def to_dict(self) -> Tree:
        """Plain nested mapping of every value; `load_recipe_dict` turns it back into an equal recipe."""
        return self.model_dump()

    def with_references(self, references: Tree) -> Self:
        """This recipe, of which `written` has these, see `loader.from_environment`."""
        self._from_environment = references
        return self

    def written(self) -> Tree:
        """As `to_dict`, for others to read: texts from the environment stay ``${oc.env:NAME}``."""
        return merge(self.to_dict(), self._from_environment)

    def to_yaml(self) -> str:
        """The resolved recipe; `load_recipe` of such a file gives an equal recipe."""
        return as_text(self.to_dict(), self._from_environment)


def as_text(tree: Tree, references: Tree) -> str:
    """Settings as YAML, which means the same when it is read again.

    Args: references: settings that are written in place of the tree's, see `loader.from_environment`.
    """
    written = merge(_escaped(tree), references)
    return yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=110)


def _escaped(value: Any) -> Any:
    """Escape ``${`` in texts, so that reading the file again does not interpolate them."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    return [_escaped(below) for below in value] if isinstance(value, list) else value
