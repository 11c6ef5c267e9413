"""A policy's state on disk, through megatron-core's own distributed checkpointing."""

import inspect
import io
import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.validation import StrictHandling

from checkpoints_conv.formats.torch_dist import METADATA, TorchDistReader
from nemo_grpo.engine.megatron import writer
from nemo_grpo.engine.megatron.optimizer import SHARDING
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.megatron.writer import PendingWrite
from nemo_grpo.support import distributed
from nemo_grpo.support.errors import UserError, first_line

log = logging.getLogger(__name__)

RUN_CONFIG = "run_config.yaml"
"""File in which Megatron-Bridge, and with it the converters, look for the scale of LoRA adapters."""

# Versions that have several writers default to one that is another package.
_STRATEGY: dict[str, Any] = (
    {"async_strategy": "mcore"}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    else {}
)


def begin_save(policy: MegatronPolicy, folder: Path, iteration: int, *, behind: bool = False) -> PendingWrite:
    """Write model, optimizer and schedule as torch_dist; complete after the result's ``finish``.

    Every rank of the policy calls it. ``behind``: the tensors are written while the caller goes on. With LoRA
    the model is its adapters, under Megatron-Bridge's names, with their scale in `RUN_CONFIG`.
    """
    writer.install()
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = policy.sharded_state_dict(loading=False)
    state |= {"iteration": iteration, "lora": _lora_of(policy)}
    with torch.no_grad():
        request = dist_checkpointing.save(
            state, str(folder), async_sharded_save=True, content_metadata=SHARDING, **_STRATEGY
        )
        pending = PendingWrite(request, behind=behind)
    if policy.lora is not None and distributed.is_rank_zero():
        (folder / RUN_CONFIG).write_text(f"peft:\n  dim: {policy.lora.dim}\n  alpha: {policy.lora.alpha}\n")
    return pending


def check_readable(folder: Path) -> None:
    """Read the index of what `begin_save` wrote as `load_policy` will; no tensor is read.

    Raises: UserError: the installed torch and megatron-core write what they cannot read.
    """
    try:
        load_sharded_metadata(str(folder))
        dist_checkpointing.load_common_state_dict(str(folder))
    except Exception as error:  # whatever two packages that do not fit raise
        installed = " and ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
        raise UserError(
            f"{folder} was written and cannot be read back: no run could resume from it. {installed} do not "
            f"fit ({type(error).__name__}: {first_line(error)}); install nemo-grpo again, by `pip install`, "
            "which chooses versions that do"
        ) from error


def load_policy(policy: MegatronPolicy, folder: Path) -> None:
    """Read what `begin_save` wrote, at this policy's layout. The policy must have its optimizer already.

    Raises: UserError: it was written with other LoRA settings, is damaged, or holds pickled code.
    """
    with closing(TorchDistReader(folder)) as reader:  # refuses metadata that would run code
        if reader.folder != folder:
            raise UserError(f"{folder} has no {METADATA}, a folder in it has; copy the checkpoint again")
    with _data_alone():
        _load_policy(policy, folder)


def _load_policy(policy: MegatronPolicy, folder: Path) -> None:
    saved = dist_checkpointing.load_common_state_dict(str(folder)).get("lora")
    if saved != _lora_of(policy):
        raise UserError(
            f"{folder} was written with LoRA settings {saved}, policy.megatron_cfg.peft says "
            f"{_lora_of(policy)}; resume with the same ones (None: peft.enabled=false)"
        )
    state = policy.sharded_state_dict(loading=True)
    absent = _absent_extra_states(state["model"], folder)
    for name in absent:
        del state["model"][name]
    with warnings.catch_warnings():  # about how megatron-core calls torch
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        loaded = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    loaded["model"] |= dict.fromkeys(absent)  # None: the layer keeps what it has
    policy.load_state_dict(loaded)


@contextmanager
def _data_alone() -> Iterator[None]:
    """Within the block ``torch.load`` runs no pickled code; torch's own reader of checkpoints asks it to."""
    load = torch.load

    def restricted(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "weights_only": True})

    torch.load = restricted
    try:
        with torch.serialization.safe_globals([io.BytesIO]):  # FP8's scaling history
            yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"the checkpoint holds something besides data and was not read: {first_line(error)}"
        ) from None
    finally:
        torch.load = load


def _absent_extra_states(model: dict[str, Any], folder: Path) -> list[str]:
    """Names of what Transformer Engine's layers keep besides weights and the local layers did not save.

    That is FP8's scaling history, which a layer builds up anew. Any other absence is an error when loading.
    """
    asked = {
        name: part.unique_key
        for name, part in model.items()
        if isinstance(part, ShardedObject) and name.endswith("._extra_state")
    }
    there = load_sharded_metadata(str(folder)) if asked else {}
    absent = [name for name, key in asked.items() if key not in there]
    if absent:
        log.info("%s was written by other layers: %d FP8 states begin anew", folder, len(absent))
    return absent


def _lora_of(policy: MegatronPolicy) -> dict[str, Any] | None:
    return None if policy.lora is None else asdict(policy.lora)
