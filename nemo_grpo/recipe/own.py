"""The recipe's section ``nemo_grpo``: what NeMo-RL's config has no place for. Unknown keys are errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from nemo_grpo.errors import UserError, did_you_mean
from nemo_grpo.tasks import PROMPTS, TaskConfig, parse_task


class OwnSection(BaseModel):
    """A part of the recipe that this package defines."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Prompt(OwnSection):
    """How a problem becomes the text that the policy continues."""

    preset: str | None = None
    """A paper's prompt, such as cw_grpo or tr_grpo_logic; keys given beside it take precedence."""
    system: str | None = None
    """System message; null: none."""
    template: str = "{question}"
    """User message; {question} stands for the problem's text."""
    use_chat_template: bool = True
    """False: the messages without the tokenizer's chat template, for base models."""
    response_prefix: str = ""
    """The first words of every response, which the model does not write itself, such as <think>."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, section: Any) -> Any:
        name = section.get("preset") if isinstance(section, Mapping) else None
        if not isinstance(name, str):
            return section
        if name not in PROMPTS:
            raise UserError(f"nemo_grpo.prompt.preset={name!r} is unknown{did_you_mean(name, PROMPTS)}")
        return {**asdict(PROMPTS[name]), **section}

    @field_validator("template")
    @classmethod
    def _has_a_slot(cls, template: str) -> str:
        if "{question}" not in template:
            raise UserError(
                f"nemo_grpo.prompt.template={template!r} does not say where the problem goes; put "
                "{question} there"
            )
        return template


class WarmStart(OwnSection):
    """A small model made on the spot: random weights, then supervised training on the task's solutions."""

    vocab_size: int = Field(default=512, gt=0)
    """Most entries of the tokenizer that is trained on the task's texts."""
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
    num_steps: int = Field(default=120, ge=0)
    """Supervised updates; 0: random weights."""
    batch_size: int = Field(default=64, gt=0)
    """Examples per supervised update."""
    lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate of the supervised training."""
    seed: int = Field(default=0, ge=0)
    """Seed of weights and examples; not grpo.seed, so that seeds share one start."""
    cache_dir: str = ".cache/warm_start"
    """Folder of finished models, keyed by all of the above and the task."""


class Engine(OwnSection):
    """The embedded engine."""

    generator: Literal["auto", "decoder", "hf", "vllm"] = "auto"
    """What samples: the engine's own decoder (qwen2, qwen3, llama, mistral), transformers, or vLLM; auto: the
    decoder where it knows the model, else transformers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where; auto: cuda if there is one."""
    num_threads: int = Field(default=1, gt=0)
    """Threads of each rank on CPU; results differ in the last digits between thread counts."""
    max_consecutive_skipped_steps: int = Field(default=10, gt=0)
    """Steps in a row with a loss or gradient that is not finite after which the run aborts."""
    log_samples: int = Field(default=4, ge=0)
    """Responses of each step that are written to samples.jsonl."""
    diagnostics_period: int = Field(default=20, ge=0)
    """Steps between two looks at the step's tokens (diagnostics.jsonl), the first step included; 0: none."""


class Evaluation(OwnSection):
    """What `nemo-grpo eval` does; validation while training goes by grpo.val_*."""

    num_problems: int = Field(default=256, gt=0)
    """Held-out problems, the same at every evaluation."""
    num_samples: int = Field(default=8, gt=0)
    """Samples per problem: avg@k and pass@k."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus; 1: all tokens."""


class Export(OwnSection):
    """The model at the end, and on the way."""

    hf: bool = True
    """Write a Hugging Face folder."""
    at_every_save: bool = False
    """On the cluster: one for every checkpoint, hf/step_N in the run's folder, while training goes on."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Its precision."""


class NemoGRPOSection(OwnSection):
    """Everything of a run that is not NeMo-RL's."""

    run_name: str = Field(min_length=1)
    """Name of the run's folder."""
    runs_dir: str = "runs"
    """Folder of all runs."""
    target: Literal["embedded", "cluster"] = "embedded"
    """What the recipe is written for; cluster: NeMo-RL, whose own rules then hold as well."""
    task: SerializeAsAny[TaskConfig]
    """Problems and verifier: a name and its parameters."""
    prompt: Prompt = Field(default_factory=Prompt)
    """Prompt."""
    rewards: dict[str, float] = {"accuracy": 1.0}
    """Weight of each reward component that the task declares; the reward is their weighted sum."""
    warm_start: WarmStart | None = None
    """A model made on the spot instead of policy.model_name; null: none."""
    engine: Engine = Field(default_factory=Engine)
    """Embedded engine."""
    evaluation: Evaluation = Field(default_factory=Evaluation)
    """Evaluation."""
    export: Export = Field(default_factory=Export)
    """Export."""

    @field_validator("run_name", mode="before")
    @classmethod
    def _names_one_folder(cls, name: Any) -> Any:
        name = str(name) if type(name) is int else name  # YAML reads run_name=1 as a number
        if isinstance(name, str) and (name in (".", "..") or "/" in name):
            raise UserError(
                f"nemo_grpo.run_name={name!r} must be a plain folder name; nemo_grpo.runs_dir says where"
            )
        return name

    @field_validator("task", mode="before")
    @classmethod
    def _parse_task(cls, section: Any) -> Any:
        return parse_task(section) if isinstance(section, Mapping) else section

    @field_validator("prompt")
    @classmethod
    def _task_knows_of_the_open_tag(cls, prompt: Prompt, info: ValidationInfo) -> Prompt:
        opens = prompt.response_prefix.rpartition("</think>")[2].count("<think>") > 0
        if opens and not getattr(info.data.get("task"), "think_is_open", True):
            raise UserError(
                f"nemo_grpo.prompt.response_prefix={prompt.response_prefix!r} opens the think block, so that "
                "responses lack the tag; set nemo_grpo.task.think_is_open=true"
            )
        return prompt

    @field_validator("rewards")
    @classmethod
    def _are_components_of_the_task(cls, rewards: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        task: TaskConfig | None = info.data.get("task")  # None: refused itself
        for name, weight in rewards.items():
            if task is not None and name not in task.reward_components:
                raise UserError(
                    f"nemo_grpo.rewards.{name}={weight}: task {task.name!r} has no such reward "
                    f"component{did_you_mean(name, task.reward_components)}"
                )
        return rewards
