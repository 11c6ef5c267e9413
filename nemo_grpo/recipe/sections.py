"""NeMo-RL's sections of a recipe: every key that this package reads, with type, range and default.

NeMo-RL has many more keys. They pass here; `keys` has already checked their names. A default applies if
neither the recipe nor its bases set the key. If only NeMo-RL reads the key, the default is that of NeMo-RL's
base. A range has the values that NeMo-RL can work with. The docstring of each key explains 0 and null.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemo_grpo.recipe.megatron_sections import Section

# Keys that rules and the planner refer to.
MEGATRON = "policy.megatron_cfg"
GENERATION = "policy.generation"
VLLM = "policy.generation.vllm_cfg"
PACKING = "policy.sequence_packing"
OVERLAP = f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather"


class RewardShaping(Section):
    """Penalty for responses close to the length limit (DAPO)."""

    enabled: bool = False
    """Subtract the penalty from the reward."""
    overlong_buffer_length: int = Field(default=128, gt=0)
    """L_b, tokens before the limit over which the penalty grows."""
    overlong_buffer_penalty: float = Field(default=1.0, ge=0)
    """Penalty of a response at the limit; 0: none."""
    max_response_length: int = Field(gt=0)
    """L_max, tokens; not given: policy.generation.max_new_tokens."""
    stop_properly_penalty_coef: float | None = Field(default=None, ge=0, le=1)
    """NeMo-RL's factor of the rewards of truncated responses; 0: no reward; null: none."""

    @property
    def penalises_length(self) -> bool:
        """True if long responses are penalised."""
        return self.enabled and self.stop_properly_penalty_coef is None


class AsyncGRPO(Section):
    """NeMo-RL's asynchronous training."""

    enabled: bool = False
    """Sample the next steps' responses while training."""
    max_trajectory_age_steps: int = Field(default=1, gt=0)
    """Steps by which a response's policy may be older than the one that it trains."""
    in_flight_weight_updates: bool = False
    """Give vLLM's asynchronous engines new weights while they decode; false: after their responses."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Forget after each refit what the old weights cached of prompts and responses."""


class StalenessSampler(Section):
    """Selection of the groups that the single controller trains on."""

    name: Literal["in_order", "windowed", "weight_fifo", "ready_first", "custom"] = "in_order"
    """in_order: each step trains on its own prompts; windowed, weight_fifo, ready_first: on groups that are
    ready and not too old; custom: an own class."""
    max_lookahead_versions: int = Field(default=1, ge=0)
    """in_order: steps by which rollouts may run ahead; 0: none."""
    max_staleness_versions: int = Field(default=1, ge=0)
    """The others: steps by which a response's policy may be older; 0: none."""

    @property
    def ahead_key(self) -> str:
        """Name of the key that limits the number of steps by which rollouts may run ahead."""
        return "max_lookahead_versions" if self.name == "in_order" else "max_staleness_versions"

    @property
    def ahead(self) -> int:
        """Number of steps by which rollouts may run ahead of training."""
        return int(getattr(self, self.ahead_key))


class AsyncRL(Section):
    """NeMo-RL's single controller: rollouts and training side by side, over its data plane."""

    sampler: StalenessSampler = Field(default_factory=StalenessSampler)
    """Limit on the age of a step's rollouts."""
    min_groups_for_streaming_train: int = Field(default=32, gt=0)
    """Groups that are trained on as soon as they are there; a step's chunks add up to one update."""
    max_buffered_rollouts: int = Field(default=64, gt=0)
    """Groups that wait for training at most."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Forget after each refit what the old weights cached of prompts and responses."""

    @property
    def waits_for_room(self) -> bool:
        """True if the sampler waits for all groups in flight, so that the buffer must have room for them."""
        return self.sampler.name not in ("windowed", "custom")


class AdvantageEstimator(Section):
    """NeMo-RL's own advantages; a variant replaces them."""

    name: str = "grpo"
    """Its formula."""
    normalize_rewards: bool | None = None
    """Must agree with the loss; null: as the loss."""
    use_leave_one_out_baseline: bool | None = None
    """Must agree with the loss; null: as the loss."""


class GRPOSection(Section):
    """The loop: batch sizes, validation, end."""

    EXTENDS: ClassVar[tuple[str, ...]] = (
        "max_num_epochs",
        "max_num_steps",
        "max_val_samples",
        "stop_at_validation_metric",
        "stop_at_validation_threshold",
        "val_at_end",
        "val_at_start",
        "val_batch_size",
        "val_num_generations_per_prompt",
        "val_period",
        "val_start_at",
    )

    num_prompts_per_step: int = Field(gt=0)
    """P, prompts per step."""
    num_generations_per_prompt: int = Field(ge=1)
    """G, responses per prompt, at least 2; for sft 1, the demonstration."""
    max_num_steps: int = Field(gt=0)
    """Steps to train."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of data order, sampling and every random choice of a loss."""
    max_num_epochs: int = Field(default=1, gt=0)
    """Passes through NeMo-RL's data set; one of a task's data lasts for max_num_steps."""
    max_rollout_turns: int = Field(default=1, gt=0)
    """Turns of a response with tools."""
    val_period: int = Field(default=10, ge=-1)
    """Validate every this many steps; 0 or -1: never during training."""
    val_at_start: bool = False
    """Validate before the first step; null: if val_period is above 0."""
    val_at_end: bool = False
    """Validate after the last step; null: if val_period is above 0."""
    max_val_samples: int | None = Field(default=256, gt=0)
    """Validation problems; also the default of nemo_grpo.evaluation.num_problems; null: all, only in
    NeMo-Gym's environments."""
    val_batch_size: int | None = Field(default=256, gt=0)
    """Validation problems that NeMo-RL samples at once; null: all, only in NeMo-Gym's environments."""
    val_num_generations_per_prompt: int = Field(default=1, gt=0)
    """Samples per validation problem; their mean is validation/accuracy."""
    use_dynamic_sampling: bool = False
    """Drop groups of equal rewards and draw more prompts (gpg: until its threshold of valid groups)."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, gt=0)
    """Maximum draws of prompts (gpg: 1 + loss_fn.max_resample_attempts); then the step keeps groups of equal
    rewards."""
    async_grpo: AsyncGRPO | None = None
    """Asynchronous training; null: off."""
    adv_estimator: AdvantageEstimator | None = None
    """NeMo-RL's own advantages; null: the loss's."""
    seq_logprob_error_threshold: float | None = Field(default=None, ge=1)
    """Mask sequences whose ratio of sampling and scoring probabilities is above this; null: none."""
    overlong_filtering: bool = False
    """Exclude truncated responses from the loss; their rewards stay in their group's mean and deviation."""
    normalize_rewards: bool | None = None
    """NeMo-RL's key for loss_fn.normalize_rewards, with which it must agree; null: not given."""
    use_leave_one_out_baseline: bool | None = None
    """NeMo-RL's key for loss_fn.use_leave_one_out_baseline, with which it must agree; null: not given."""
    reward_shaping: RewardShaping
    """Overlong penalty."""
    stop_at_validation_metric: str | None = None
    """Metric that ends the run early, such as validation/accuracy; null: none."""
    stop_at_validation_threshold: float | None = None
    """Value of that metric at which the run ends; null: none."""

    @property
    def validates(self) -> bool:
        """True if the run ever validates."""
        return self.val_period > 0 or self.val_at_start or self.val_at_end

    @property
    def num_val_problems(self) -> int:
        """Number of validation problems, for a run that does not leave it to NeMo-Gym."""
        assert self.max_val_samples is not None
        return self.max_val_samples

    @property
    def is_async(self) -> bool:
        """True if rollouts run ahead of training."""
        return self.async_grpo is not None and self.async_grpo.enabled

    def is_goal(self, row: Mapping[str, Any]) -> bool:
        """True if the metrics of a step reach stop_at_validation_threshold, which ends the run."""
        metric = metric_key(self.stop_at_validation_metric)
        threshold = self.stop_at_validation_threshold
        if metric is None or threshold is None:
            return False
        # A step without validation has no such metric.
        value = row.get(metric)
        return value is not None and value >= threshold


class Checkpointing(Section):
    """Checkpoints to save and to keep."""

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: str | None = None
    """Folder; null: checkpoints/ in the run's folder."""
    save_period: int = Field(default=10, gt=0)
    """Save every this many steps, and at the end."""
    ft_save_period: int | None = Field(default=None, gt=0)
    """Steps between NeMo-RL's additional checkpoints for restarts; null: none."""
    checkpoint_must_save_by: str | None = Field(default=None, pattern=r"^\d+:\d+:\d+:\d+$")
    """NeMo-RL saves and ends after this time, DD:HH:MM:SS; null: no limit."""
    keep_top_k: int | None = Field(default=3, gt=0)
    """Checkpoints to keep by metric_name, in addition to the latest; null: all."""
    metric_name: str | None = "val:accuracy"
    """Metric that ranks checkpoints, NeMo-RL's spelling; null: keep the latest ones."""
    higher_is_better: bool = True
    """Direction of that metric."""
    save_optimizer: bool = True
    """Save the optimizer's state; without it a run cannot be resumed exactly."""

    @property
    def ranks_by_validation(self) -> bool:
        """True if a validation's metric decides which checkpoints are kept."""
        return self.enabled and (self.metric_name or "").startswith("val:")

    @property
    def metric_key(self) -> str | None:
        """`metric_name` as metrics.jsonl spells it: ``val:accuracy`` is ``validation/accuracy``."""
        return metric_key(self.metric_name)


class Logger(Section):
    """Destination and content of logs."""

    log_dir: str | None = None
    """Folder of NeMo-RL's loggers; null: the run's folder."""
    tensorboard_enabled: bool = False
    """Write tensorboard events."""
    wandb_enabled: bool = False
    """Log to Weights & Biases."""
    mlflow_enabled: bool = False
    """Log to MLflow."""
    wandb: dict[str, Any] = Field(default_factory=dict)
    """project, name and other arguments of wandb.init."""
    mlflow: dict[str, Any] = Field(default_factory=dict)
    """experiment_name, run_name, tracking_uri."""
    num_val_samples_to_print: int = Field(default=0, ge=0)
    """Validation samples shown in the log; 0: none."""


class Data(Section):
    """NeMo-RL's data sets, which a recipe without nemo_grpo.task trains on."""

    PLACES: ClassVar[tuple[str, ...]] = ("num_workers",)

    train: dict[str, Any] | list[dict[str, Any]] | None = None
    """Data sets to train on: name or path, columns, environment; null: nemo_grpo.task's problems."""
    validation: dict[str, Any] | list[dict[str, Any]] | None = None
    """Data sets to validate on; null: what split_validation_size takes from the training data."""
    default: dict[str, Any] | None = None
    """Settings of every data set that does not give its own; null: none."""
    max_input_seq_length: int | None = Field(default=None, gt=0)
    """Longest prompt, tokens; null: any."""
    shuffle: bool = True
    """Draw the problems of a file in another order in every epoch; false: in the file's."""


class Environments(Section):
    """NeMo-RL's environments, or NeMo-Gym in their place."""

    should_use_nemo_gym: bool = False
    """Rollouts and rewards come from NeMo-Gym."""
    nemo_gym: dict[str, Any] | None = None
    """NeMo-Gym's configuration; null: none."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the environments, by the name of the environment."""
        named = {} if self.nemo_gym is None else {"nemo_gym": self.nemo_gym}
        return {**(self.model_extra or {}), **named}


class Cluster(Section):
    """Processes: one per GPU, or per CPU rank."""

    gpus_per_node: int = Field(default=1, gt=0)
    """Ranks per node."""
    num_nodes: int = Field(default=1, gt=0)
    """Nodes."""
    segment_size: int | None = Field(default=None, gt=0)
    """Nodes that NeMo-RL keeps in one NVLink domain; null: wherever there is room."""


def metric_key(name: str | None) -> str | None:
    """Convert NeMo-RL's spelling of a metric to its name in metrics.jsonl.

    val:accuracy        validation/accuracy
    accuracy            validation/accuracy
    train:reward/mean   reward/mean
    a/b                 a/b, which is a name of metrics.jsonl
    """
    if name is None:
        return None
    if name.startswith("train:"):
        return name.removeprefix("train:")
    if name.startswith("val:"):
        return f"validation/{name.removeprefix('val:')}"
    return name if "/" in name else f"validation/{name}"
