"""The recipe's section ``nemo_grpo``: settings that NeMo-RL's config lacks. Unknown keys are errors."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.extensions import is_reference
from nemo_grpo.support.sections import EvalOptions, OwnSection
from nemo_grpo.tasks import Prompt, TaskConfig, parse_task
from nemo_grpo.tasks.rewards.own_reward import parameters_of

FOLDER_NAME = r"\w[\w.,=+@-]{0,199}"
"""Pattern of a run's name, which goes into paths and scripts."""
MAX_REWARD = 1e6
"""Largest weight of a reward component."""


class NewModel(OwnSection):
    """Sizes of a Qwen2 with random weights, from which a supervised run starts.

    Its tokenizer is learnt from the task's texts.
    """

    vocab_size: int = Field(default=512, gt=0)
    """Maximum vocabulary of the tokenizer, which is trained on the task's texts."""
    hidden_size: int = Field(default=128, gt=0)
    """Width."""
    num_hidden_layers: int = Field(default=2, gt=0)
    """Layers."""
    num_attention_heads: int = Field(default=4, gt=0)
    """Query heads."""
    num_key_value_heads: int = Field(default=2, gt=0)
    """Key and value heads."""
    intermediate_size: int = Field(default=384, gt=0)
    """Width of the feed-forward layers."""
    max_position_embeddings: int = Field(default=512, gt=0)
    """Longest sequence."""
    seed: int = Field(default=0, ge=0)
    """Seed of the weights and of the problems that the tokenizer is learnt from."""

    @property
    def width_unit(self) -> int:
        """Divisor of the width: the rotary embedding turns pairs of each head."""
        return 2 * self.num_attention_heads


class Engine(OwnSection):
    """The embedded engine."""

    generator: Literal["auto", "decoder", "hf", "vllm"] = "auto"
    """Sampler: the engine's own decoder (qwen2, qwen3, llama, mistral), transformers, or vLLM; auto: the
    decoder if it supports the model, else transformers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: cuda if available."""
    num_threads: int = Field(default=1, gt=0)
    """Threads of each rank on CPU; results differ in the last digits between thread counts."""
    max_consecutive_skipped_steps: int = Field(default=10, gt=0)
    """Abort after this many consecutive steps with a loss or gradient that is not finite."""
    log_samples: int = Field(default=4, ge=0)
    """Responses written to samples.jsonl per step."""
    diagnostics_period: int = Field(default=20, ge=0)
    """Measure the tokens of the first and every n-th step (diagnostics.jsonl); 0: never."""


class Evaluation(EvalOptions):
    """Settings of `nemo-grpo eval`; grpo.val_* sets validation during training."""

    num_problems: int = Field(default=256, gt=0)
    """Held-out problems of the task, the same at every evaluation; of files, all are taken."""
    num_samples: int = Field(default=8, gt=0)
    """Samples per problem: avg@k and pass@k."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus; 1: all tokens."""


class Export(OwnSection):
    """Export of the model at the end of an embedded run."""

    hf: bool = True
    """Write a Hugging Face folder."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Its precision; null: float32, and the base model's with LoRA."""


class NemoGRPOSection(OwnSection):
    """Every setting of a run that is not NeMo-RL's."""

    PLACES: ClassVar[tuple[str, ...]] = (
        "engine",
        "evaluation",
        "export",
        "max_failed_rewards",
        "run_name",
        "runs_dir",
    )

    run_name: str = Field(min_length=1)
    """Name of the run's folder."""
    runs_dir: str = "runs"
    """Folder of all runs."""
    target: Literal["embedded", "cluster"] = "embedded"
    """The engine that the recipe is for; cluster: NeMo-RL, whose rules then apply too."""
    task: SerializeAsAny[TaskConfig] | None
    """Problems and verifier: a name and its parameters; null: NeMo-RL's own sections data and env."""
    prompt: Prompt = Field(default_factory=Prompt)
    """Prompt."""
    rewards: dict[str, float] = Field(default={"accuracy": 1.0})
    """Weight of each reward component that the task declares, or own function (my_rewards.py:length_bonus);
    the reward is their weighted sum."""
    max_failed_rewards: float = Field(default=0.1, ge=0, le=1)
    """Largest share of a step's responses whose reward may fail and count as 0; more than that and than three
    end the run. 1: never."""
    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer brings; on NeMo-RL, which runs it unasked."""
    new_model: NewModel | None = None
    """Sizes of the model that a supervised run makes where policy.model_name is null."""
    engine: Engine = Field(default_factory=Engine)
    """Embedded engine."""
    evaluation: Evaluation = Field(default_factory=Evaluation)
    """Evaluation."""
    export: Export = Field(default_factory=Export)
    """Export."""

    @field_validator("run_name", mode="before")
    @classmethod
    def _run_name_is_a_folder_name(cls, name: Any) -> Any:
        # YAML reads run_name=1 as a number. `isinstance` would also accept run_name=true, which is a mistake.
        if type(name) is int:
            name = str(name)
        # The field's own type check reports an empty name, and a name of another type.
        is_text = isinstance(name, str) and name != ""
        if is_text and not re.fullmatch(FOLDER_NAME, name, re.ASCII):
            raise UserError(
                f"nemo_grpo.run_name={name!r} must be a plain folder name of letters, digits and _.,=+@-, as "
                "it goes into paths and scripts; its parent is nemo_grpo.runs_dir"
            )
        return name

    @field_validator("task", mode="before")
    @classmethod
    def _parse_task(cls, section: Any) -> Any:
        return parse_task(section) if isinstance(section, Mapping) else section

    @field_validator("prompt")
    @classmethod
    def _open_think_tag_is_known_to_the_task(cls, prompt: Prompt, info: ValidationInfo) -> Prompt:
        # Only an open tag after the last closed block leaves the think block open.
        after_the_last_block = prompt.response_prefix.rpartition("</think>")[2]
        if "<think>" in after_the_last_block and not getattr(info.data.get("task"), "think_is_open", True):
            raise UserError(
                f"nemo_grpo.prompt.response_prefix={prompt.response_prefix!r} opens the think block, so "
                "responses lack the tag; set nemo_grpo.task.think_is_open=true"
            )
        return prompt

    @field_validator("rewards")
    @classmethod
    def _reward_components_exist(cls, rewards: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        # The task is None if its own validator has refused it, and with NeMo-RL's data.
        task: TaskConfig | None = info.data.get("task")
        for name, weight in rewards.items():
            if not -MAX_REWARD <= weight <= MAX_REWARD:
                raise UserError(
                    f"nemo_grpo.rewards.{name}={weight}: float32 has 7 digits, so the other components would "
                    f"vanish beside it; use {-MAX_REWARD:g} to {MAX_REWARD:g}"
                )
            if is_reference(name):
                # This loads the function, and refuses parameters that no argument can fill.
                parameters_of(name)
            elif task is not None and name not in task.reward_components:
                raise UserError(
                    f"nemo_grpo.rewards.{name}={weight}: task {task.name!r} has no such reward "
                    f"component{did_you_mean(name, task.reward_components)}"
                )
        if not any(rewards.values()):
            raise UserError(f"nemo_grpo.rewards={rewards}: every reward is 0; give a component a weight")
        return rewards
