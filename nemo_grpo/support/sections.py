"""The base class of this package's recipe sections, and the options of an evaluation.

The options of an evaluation are a section of the recipe and options of a command.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nemo_grpo.support.errors import UserError


class OwnSection(BaseModel):
    """A section of the recipe that this package defines. NeMo-RL defines the other sections."""

    # The building of validators is deferred, here and in all other sections: a command validates few of the
    # 84 sections, and building all their validators takes 60 ms.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class EvalOptions(OwnSection):
    """Options of an evaluation: of `nemo-grpo eval`, of ``nemo_grpo.evaluation``, and of `evaluate`.

    An option that is None takes the protocol's value, or the recipe's, or the default of
    `nemo_grpo.evaluate.config.EvalConfig`, in this order.
    """

    benchmarks: str | None = Field(
        default=None,
        description='Data sets, JSONL files, or "recipe", separated by commas. The default is recipe.',
    )
    num_samples: int | None = Field(
        default=None, gt=0, description="Samples per problem. The default is the recipe's, else 16."
    )
    temperature: float | None = Field(
        default=None,
        ge=0,
        description="Sampling temperature; 0 is greedy. The default is the recipe's, else 1.",
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Nucleus sampling's top_p. The default is the recipe's, else 0.95.",
    )
    max_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens of the longest response. The default is the recipe's, else 2048.",
    )
    num_problems: int | None = Field(
        default=None,
        gt=0,
        description="Take only the first problems. The default is the recipe's number, else all.",
    )
    data_dir: str | None = Field(
        default=None, description="Folder into which `nemo-grpo data prepare` wrote. The default is data."
    )
    generator: Literal["auto", "decoder", "hf", "vllm"] | None = Field(
        default=None,
        description="Sampler; auto is our decoder, else hf (transformers). Default: the recipe's, or auto.",
    )
    prompt: str | None = Field(
        default=None,
        description="Prompt of a paper, such as gpg_7b. The default is the recipe's, else the task's.",
    )
    protocol: str | None = Field(
        default=None,
        description="Settings: cw_grpo, erpo, tr_grpo, gpg, r1, qwen-math or greedy. Options override them.",
    )
    task: str | None = Field(
        default=None, description="Task that scores JSONL files without a manifest. The default is math."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Precision; auto: bfloat16 on a GPU, else float32. Default: the recipe's, or auto.",
    )
    device: Literal["auto", "cpu", "cuda"] | None = Field(
        default=None, description="Device that samples. The default is the recipe's, else auto."
    )
    batch_size: int | None = Field(
        default=None, gt=0, description="Responses that are sampled at the same time; vllm decides itself."
    )
    tensor_parallel: int | None = Field(
        default=None, gt=0, description="GPUs that share the model, for vllm. The default is 1."
    )
    cache_gib: float | None = Field(default=None, ge=0.01, description="Size of vllm's KV cache in GiB.")
    pass_at: str | None = Field(default=None, description="Further k of pass@k, such as 3,5; none above --k.")
    seed: int | None = Field(default=None, ge=0, description="Seed of the samples. The default is 0.")
    seeds: str | None = Field(
        default=None, description="Seeds to average over: a number (4 = 0-3) or a list such as 0,7."
    )

    def given(self) -> dict[str, Any]:
        """Collect the options that are set."""
        return {name: value for name, value in self if value is not None}


def parse_seeds(text: str) -> list[int]:
    """Read ``3`` as the seeds 0, 1, 2; ``0,7`` as these two; ``7,`` as seed 7 alone."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if "," not in text and numbers:
        numbers = list(range(numbers[0]))
    if not numbers or min(numbers) < 0:
        raise UserError(f"--seeds {text}: give how many, such as 3, or which, such as 0,7")
    return numbers
