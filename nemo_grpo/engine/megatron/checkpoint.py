"""A policy's state on disk, through megatron-core's own distributed checkpointing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.megatron.policy import SHARDING, MegatronPolicy
from nemo_grpo.errors import UserError

RUN_CONFIG = "run_config.yaml"
"""Where Megatron-Bridge, and with it the converters, look for the scale of LoRA adapters."""


def save_policy(policy: MegatronPolicy, folder: Path, iteration: int) -> None:
    """Write model, optimizer and schedule as torch_dist; every rank of the policy calls it.

    With LoRA the model is its adapters, under Megatron-Bridge's names, with their scale in `RUN_CONFIG`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = policy.sharded_state_dict(loading=False)
    state |= {"iteration": iteration, "lora": _lora_of(policy)}
    with torch.no_grad():
        dist_checkpointing.save(state, str(folder), content_metadata=SHARDING)
    if policy.lora is not None and parallel.is_rank_zero():
        (folder / RUN_CONFIG).write_text(f"peft:\n  dim: {policy.lora.dim}\n  alpha: {policy.lora.alpha}\n")


def load_policy(policy: MegatronPolicy, folder: Path) -> None:
    """Read what `save_policy` wrote, at this policy's layout. The policy must have its optimizer already.

    Raises: UserError: it was written with other LoRA settings.
    """
    saved = dist_checkpointing.load_common_state_dict(str(folder)).get("lora")
    if saved != _lora_of(policy):
        raise UserError(
            f"{folder} was written with LoRA settings {saved}, policy.megatron_cfg.peft says "
            f"{_lora_of(policy)}; resume with the same ones (None: peft.enabled=false)"
        )
    state = policy.sharded_state_dict(loading=True)
    loaded = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    policy.load_state_dict(loaded)


def _lora_of(policy: MegatronPolicy) -> dict[str, Any] | None:
    return None if policy.lora is None else asdict(policy.lora)
