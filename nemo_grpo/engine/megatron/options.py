"""Settings of policy.megatron_cfg for recomputation and FP8, and the checks that FP8 needs.

The checks get the machine as an argument, so they can be tested without its GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nemo_grpo.engine.megatron.layers import transformer_engine_is_installed
from nemo_grpo.models import ModelSpec
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import Megatron

_FP8_ALIGNMENT = {"delayed": 16, "tensorwise": 16, "blockwise": 128}
"""Divisor of token counts and of the hidden size in FP8, by scaling recipe. The matrix products need 16. A
scaling block has 128 numbers, and with sequence parallelism Transformer Engine refuses incomplete blocks."""

FP8_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0)}
"""Lowest compute capability of a GPU on which Transformer Engine supports each scaling recipe."""

_BLOCKWISE_CUDA = (12, 9)
"""Lowest CUDA version that torch must be built for, so that Transformer Engine supports blockwise scaling."""


def fp8_alignment(recipe: str | None) -> int:
    """Return the multiple to which FP8 pads the number of tokens; 1 without FP8 (``recipe`` None)."""
    return 1 if recipe is None else _FP8_ALIGNMENT[recipe]


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that FP8 depends on.

    Attributes:
        capability: Compute capability (major, minor) of the GPU; None without a GPU.
        transformer_engine: True if Transformer Engine is installed.
        cuda: CUDA version (major, minor) that torch was built for; None for a build without CUDA.
    """

    capability: tuple[int, int] | None
    transformer_engine: bool
    cuda: tuple[int, int] | None


def this_machine() -> Machine:
    """Describe this rank's GPU."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    major, _, minor = (torch.version.cuda or "").partition(".")
    cuda = (int(major), int(minor)) if major else None
    return Machine(capability, transformer_engine_is_installed(), cuda)


def config_fields(megatron: Megatron) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` that the recipe sets."""
    return _recompute_fields(megatron) | _fp8_fields(megatron)


def _recompute_fields(megatron: Megatron) -> dict[str, Any]:
    if not megatron.activation_checkpointing:
        return {}
    if megatron.recompute_granularity == "selective":
        # megatron-core's default.
        modules = megatron.recompute_modules or ["core_attn"]
        return {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _fp8_fields(megatron: Megatron) -> dict[str, Any]:
    fp8 = megatron.fp8_in_use
    overrides = megatron.model_overrides
    if fp8 is None:
        return {}
    fields: dict[str, Any] = {"fp8": fp8.fp8, "fp8_recipe": fp8.fp8_recipe, "fp8_param": fp8.fp8_param}
    if overrides is not None and overrides.first_last_layers_bf16:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": overrides.num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": overrides.num_layers_at_end_in_bf16,
        }
    return fields


def fp8_refusals(megatron: Megatron, machine: Machine) -> Iterator[str]:
    """Yield a message ``key=value: rule; remedy`` for each reason why this machine cannot train in FP8."""
    fp8 = megatron.fp8_in_use
    if fp8 is None:
        return
    setting = "policy.megatron_cfg.fp8_cfg.enabled=true"
    if machine.capability is None:
        yield f"{setting}: FP8 needs a CUDA GPU and torch finds none; use false for BF16"
        return
    if not machine.transformer_engine:
        yield (
            f"{setting}: FP8 needs Transformer Engine and it is not installed; run "
            "scripts/install_transformer_engine.sh, or use false for BF16"
        )
    lowest = FP8_CAPABILITY[fp8.fp8_recipe]
    if machine.capability < lowest:
        usable = [name for name, capability in FP8_CAPABILITY.items() if capability <= machine.capability]
        remedy = f"use fp8_recipe={' or '.join(usable)}" if usable else "use false for BF16"
        yield (
            f"{setting}: fp8_recipe={fp8.fp8_recipe} needs compute capability {_dotted(lowest)} and this "
            f"GPU has {_dotted(machine.capability)}; {remedy}"
        )
    elif fp8.fp8_recipe == "blockwise" and machine.cuda is not None and machine.cuda < _BLOCKWISE_CUDA:
        yield (
            f"{setting}: fp8_recipe=blockwise needs a torch for CUDA {_dotted(_BLOCKWISE_CUDA)} or newer and "
            f"this one is for {_dotted(machine.cuda)}; use fp8_recipe=delayed or tensorwise"
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def fp8_hint(megatron: Megatron) -> str | None:
    """Return a warning about FP8 settings that train badly, or None."""
    fp8 = megatron.fp8_in_use
    if fp8 is None or (fp8.fp8_recipe, fp8.fp8) != ("delayed", "e4m3"):
        return None
    return (
        "policy.megatron_cfg.fp8_cfg: delayed scaling starts at a scale of 1, and most of the first update's "
        "gradients are too small for e4m3; use fp8=hybrid"
    )


def fp8_width_refusals(spec: ModelSpec, layout: Layout, recipe: str) -> Iterator[str]:
    """Yield a message for each width of the model that FP8's matrix products do not support."""
    tensor_parallel = layout.tensor
    alignment = fp8_alignment("tensorwise")
    # With sequence parallelism Transformer Engine refuses incomplete blocks.
    hidden_alignment = fp8_alignment(recipe) if layout.sequence_parallel else alignment
    for name, width, multiple in (
        ("hidden_size", spec.hidden_size, hidden_alignment),
        ("intermediate_size / TP", spec.ffn_size // tensor_parallel, alignment),
        ("num_attention_heads x head_dim / TP", spec.query_size // tensor_parallel, alignment),
    ):
        if width % multiple:
            yield (
                f"policy.megatron_cfg.fp8_cfg.enabled=true: the model's {name} = {width} is not a multiple "
                f"of {multiple}; use false for BF16, or a smaller TP"
            )
