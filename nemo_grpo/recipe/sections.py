"""The sections of a recipe that NeMo-RL defines, typed where the embedded engine reads them.

Other keys pass here, because NeMo-RL has many more; `keys` has already checked their names. Defaults are the
embedded engine's, used if neither the recipe nor its bases set the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nemo_grpo.errors import as_yaml
from nemo_grpo.recipe.megatron_sections import Megatron, Section, section_rule

MEGATRON, GENERATION = "policy.megatron_cfg", "policy.generation"
VLLM, PACKING = "policy.generation.vllm_cfg", "policy.sequence_packing"
"""Sections that rules and the planner refer to."""


class RewardShaping(Section):
    """Penalty for responses close to the length limit (DAPO)."""

    enabled: bool = False
    """Subtract the penalty from the reward."""
    overlong_buffer_length: int = Field(default=128, gt=0)
    """L_b, tokens before the limit over which the penalty grows."""
    overlong_buffer_penalty: float = Field(default=1.0, ge=0)
    """Penalty of a response at the limit."""
    max_response_length: int = Field(gt=0)
    """L_max, tokens; not given: policy.generation.max_new_tokens."""
    stop_properly_penalty_coef: float | None = None
    """NeMo-RL's factor for truncated responses; null: none."""

    @section_rule
    def _overlong_buffer_is_shorter_than_responses(self) -> Iterator[str]:
        if self.enabled and self.overlong_buffer_length >= self.max_response_length:
            yield (
                f"overlong_buffer_length={self.overlong_buffer_length} must be less than max_response_length="
                f"{self.max_response_length}, or every response is penalised; lower it"
            )


class GRPOSection(Section):
    """The loop: batch sizes, validation, end."""

    num_prompts_per_step: int = Field(gt=0)
    """P, prompts per step."""
    num_generations_per_prompt: int = Field(ge=1)
    """G, responses per prompt, at least 2; for sft 1, the demonstration."""
    max_num_steps: int = Field(gt=0)
    """Steps to train."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of data order, sampling and every random choice of a loss."""
    val_period: int = Field(default=10, ge=0)
    """Validate every this many steps; 0: never during training."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    max_val_samples: int = Field(default=256, gt=0)
    """Validation problems; also the default of nemo_grpo.evaluation.num_problems."""
    val_num_generations_per_prompt: int = Field(default=1, gt=0)
    """Samples per validation problem; their mean is validation/accuracy."""
    use_dynamic_sampling: bool = False
    """Drop groups of equal rewards and draw more prompts (gpg: until its threshold of valid groups)."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, gt=0)
    """Maximum draws of prompts; then the step keeps groups of equal rewards."""
    overlong_filtering: bool = False
    """Exclude truncated responses from the loss."""
    normalize_rewards: bool | None = None
    """NeMo-RL's key for loss_fn.normalize_rewards; must agree with it."""
    use_leave_one_out_baseline: bool | None = None
    """NeMo-RL's key for loss_fn.use_leave_one_out_baseline; must agree with it."""
    reward_shaping: RewardShaping
    """Overlong penalty."""
    stop_at_validation_metric: str | None = None
    """Metric that ends the run early, such as validation/accuracy; null: none."""
    stop_at_validation_threshold: float | None = None
    """Value of that metric at which the run ends."""

    @property
    def validates(self) -> bool:
        """True if the run ever validates."""
        return bool(self.val_period or self.val_at_start or self.val_at_end)

    @section_rule
    def _early_stop_has_metric_and_threshold(self) -> Iterator[str]:
        metric, threshold = self.stop_at_validation_metric, self.stop_at_validation_threshold
        if (metric is None) != (threshold is None):
            yield (
                f"stop_at_validation_metric={as_yaml(metric)} and stop_at_validation_threshold="
                f"{as_yaml(threshold)} belong together; set both or neither"
            )


class Tokenizer(Section):
    """The tokenizer."""

    name: str | None = None
    """Folder or Hub name; not given: policy.model_name."""


class SequencePacking(Section):
    """Several sequences in one row of a microbatch."""

    enabled: bool = False
    """Pack microbatches by tokens instead of sequences, without padding."""
    train_mb_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of a training microbatch; null: max_total_sequence_length x train_micro_batch_size."""
    logprob_mb_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of a scoring microbatch; null: max_total_sequence_length x logprob_batch_size."""
    algorithm: str = "first_fit_decreasing"
    """Packing algorithm; the embedded engine has this one, NeMo-RL more."""


class Generation(Section):
    """Sampling of the responses."""

    backend: str = "vllm"
    """NeMo-RL's generation engine; the embedded engine's is nemo_grpo.engine.generator."""
    max_new_tokens: int = Field(gt=0)
    """Longest response, tokens."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature of the rollouts; logprobs use the same one, and vLLM samples at 0.01 or more."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the rollouts; 1: all tokens."""
    top_k: int | None = Field(default=None, gt=0)
    """Number of most likely tokens to sample from; null: all."""
    val_temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of validation; not given: temperature."""
    val_top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of validation; not given: top_p."""
    stop_strings: list[str] | None = None
    """Texts that end a response."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a response, in addition to the tokenizer's end of sequence."""


class Policy(Section):
    """The model, its batches and its engines."""

    model_name: str | None
    """Hugging Face folder or Hub name; null only with nemo_grpo.warm_start."""
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    """Tokenizer."""
    train_global_batch_size: int = Field(gt=0)
    """Sequences per optimizer update."""
    train_micro_batch_size: int = Field(gt=0)
    """Sequences per forward and backward pass and data-parallel rank."""
    logprob_batch_size: int = Field(gt=0)
    """Sequences per scoring pass and rank; not given: train_micro_batch_size."""
    generation_batch_size: int = Field(gt=0)
    """Responses sampled at once by the embedded engine; not given: train_global_batch_size."""
    max_total_sequence_length: int = Field(gt=0)
    """Longest sequence, prompt and response, in tokens."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the parameters."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Default of megatron_cfg.optimizer.clip_grad, which is the one in effect."""
    sequence_packing: SequencePacking = Field(default_factory=SequencePacking)
    """Packing."""
    megatron_cfg: Megatron
    """Megatron-core."""
    generation: Generation
    """Sampling."""

    @property
    def train_mb_tokens(self) -> int | None:
        """Maximum tokens of a training microbatch; None: sequences are not packed."""
        given = self.sequence_packing.train_mb_tokens
        longest = self.max_total_sequence_length * self.train_micro_batch_size
        return (given or longest) if self.sequence_packing.enabled else None

    @property
    def logprob_mb_tokens(self) -> int | None:
        """Maximum tokens of a scoring microbatch; None: sequences are not packed."""
        given = self.sequence_packing.logprob_mb_tokens
        longest = self.max_total_sequence_length * self.logprob_batch_size
        return (given or longest) if self.sequence_packing.enabled else None

    @section_rule
    def _prompt_has_room(self) -> Iterator[str]:
        response, longest = self.generation.max_new_tokens, self.max_total_sequence_length
        if response >= longest:
            yield (
                f"generation.max_new_tokens={response} leaves no room for the prompt in "
                f"policy.max_total_sequence_length={longest}; lower one or raise the other"
            )

    @section_rule
    def _longest_sequence_splits_over_ranks(self) -> Iterator[str]:
        multiple, longest = self.megatron_cfg.layout.sequence_multiple, self.max_total_sequence_length
        if longest % multiple:
            yield (
                f"max_total_sequence_length={longest} is not a multiple of {multiple} (2 CP, times "
                "TP with sequence_parallel); round it, or change the layout"
            )

    @section_rule
    def _microbatches_hold_the_longest_sequence(self) -> Iterator[str]:
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(self, key)
            if tokens is not None and tokens < self.max_total_sequence_length:
                yield (
                    f"sequence_packing.{key}={tokens} is less than policy.max_total_sequence_length="
                    f"{self.max_total_sequence_length}; raise it"
                )

    @section_rule
    def _fp8_keeps_the_rest_in_bf16(self) -> Iterator[str]:
        if self.megatron_cfg.fp8_in_use and self.precision != "bfloat16":
            yield f"precision={self.precision}: FP8 training keeps the rest in BF16; use bfloat16"


class Checkpointing(Section):
    """When checkpoints are saved, and which are kept."""

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: str | None = None
    """Folder; null: checkpoints/ in the run's folder."""
    save_period: int = Field(default=10, gt=0)
    """Save every this many steps, and at the end."""
    keep_top_k: int | None = Field(default=3, gt=0)
    """Checkpoints to keep by metric_name, in addition to the latest; null: all."""
    metric_name: str | None = "val:accuracy"
    """Metric that ranks checkpoints, NeMo-RL's spelling; null: keep the latest ones."""
    higher_is_better: bool = True
    """Direction of that metric."""
    save_optimizer: bool = True
    """Save the optimizer's state; without it a run cannot be resumed exactly."""

    @property
    def metric_key(self) -> str | None:
        """`metric_name` as metrics.jsonl spells it: ``val:accuracy`` is ``validation/accuracy``."""
        return metric_key(self.metric_name)


class Logger(Section):
    """Where logs go, and what they hold."""

    log_dir: str | None = None
    """Folder of NeMo-RL's loggers; null: the run's folder."""
    tensorboard_enabled: bool = False
    """Write tensorboard events."""
    num_val_samples_to_print: int = Field(default=0, ge=0)
    """Validation samples shown in the log."""


class Cluster(Section):
    """Processes: one per GPU, or per CPU rank."""

    gpus_per_node: int = Field(default=1, gt=0)
    """Ranks per node."""
    num_nodes: int = Field(default=1, gt=0)
    """Nodes."""


def metric_key(name: str | None) -> str | None:
    """A metric's name in metrics.jsonl, from NeMo-RL's spelling.

    Args:    name: ``val:accuracy``, ``accuracy``, ``train:reward/mean``, or a name of metrics.jsonl.
    Returns: ``validation/accuracy``, ``validation/accuracy``, ``reward/mean``, or the name as it is.
    """
    if name is None:
        return None
    if name.startswith("train:"):
        return name.removeprefix("train:")
    if name.startswith("val:"):
        return f"validation/{name.removeprefix('val:')}"
    return name if "/" in name else f"validation/{name}"
