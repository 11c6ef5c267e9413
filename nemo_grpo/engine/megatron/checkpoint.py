"""A policy's state on disk, through megatron-core's own distributed checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from nemo_grpo.engine.megatron.policy import SHARDING, MegatronPolicy


def save_policy(policy: MegatronPolicy, folder: Path, iteration: int) -> None:
    """Write model, optimizer and schedule as torch_dist; every rank of the policy calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = policy.sharded_state_dict(loading=False) | {"iteration": iteration}
    with torch.no_grad():
        dist_checkpointing.save(state, str(folder), content_metadata=SHARDING)


def load_policy(policy: MegatronPolicy, folder: Path) -> None:
    """Read what `save_policy` wrote, at this policy's layout. The policy must have its optimizer already."""
    state = policy.sharded_state_dict(loading=True)
    loaded = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    policy.load_state_dict(loaded)
