"""Sections of a recipe that a command takes as options, too."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nemo_grpo.support.errors import UserError


class OwnSection(BaseModel):
    """A part of the recipe that this package defines."""

    # Deferred, here and in every other section: a command validates few of the 84, and building all their
    # validators takes 60 ms.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class EvalOptions(OwnSection):
    """Options of an evaluation: of `nemo-grpo eval`, of ``nemo_grpo.evaluation``, and of `evaluate`.

    None: the protocol's value, else the recipe's, else `nemo_grpo.evaluate.config.EvalConfig`'s default.
    """

    benchmarks: str | None = Field(default=None, description="Data sets, JSONL files, recipe; with commas.")
    num_samples: int | None = Field(
        default=None, gt=0, description="Samples per problem. Default: the recipe's, or 16."
    )
    temperature: float | None = Field(default=None, ge=0, description="0: greedy; else the recipe's, or 1.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus; else the recipe's, or 0.95.")
    max_tokens: int | None = Field(
        default=None, gt=0, description="Longest response; else the recipe's, or 2048."
    )
    num_problems: int | None = Field(default=None, gt=0, description="First ones; else the recipe's, or all.")
    data_dir: str | None = Field(
        default=None, description="Folder of `nemo-grpo data prepare`. Default: data."
    )
    generator: Literal["auto", "decoder", "hf", "vllm"] | None = Field(
        default=None, description="auto: the own decoder, or transformers (hf). Else the recipe's, or auto."
    )
    prompt: str | None = Field(default=None, description="A paper's, as gpg_7b; else the recipe's or task's.")
    protocol: str | None = Field(
        default=None,
        description="A paper's: cw_grpo, erpo, tr_grpo, gpg, r1, qwen-math, greedy; options win.",
    )
    task: str | None = Field(default=None, description="Task of JSONL files without manifest. Default: math.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        default=None, description="auto: bfloat16 on a GPU, else float32. Else the recipe's, or auto."
    )
    device: Literal["auto", "cpu", "cuda"] | None = Field(
        default=None, description="Else the recipe's, auto."
    )
    batch_size: int | None = Field(default=None, gt=0, description="Responses at a time; not for vllm.")
    tensor_parallel: int | None = Field(
        default=None, gt=0, description="GPUs that share the model, for vllm. Default: 1."
    )
    cache_gib: float | None = Field(default=None, ge=0.01, description="GiB of vllm's KV cache.")
    pass_at: str | None = Field(default=None, description="More k for pass@k, with commas, at most --k: 3,5.")
    seed: int | None = Field(default=None, ge=0, description="Seed of the samples. Default: 0.")
    seeds: str | None = Field(default=None, description="Mean over how many seeds (4 is 0,1,2,3), or which.")

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
