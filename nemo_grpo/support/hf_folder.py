"""Hugging Face model folders: read weights, write an export."""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.support.files import make_readable, publish_folder
from nemo_grpo.support.model_card import Training, base_model, write_card
from nemo_grpo.support.model_folder import (
    copy_side_files,
    peft_config,
    read_config,
    weight_files,
)

MAX_SHARD_SIZE = "5GB"
"""Largest safetensors file of an export, as huggingface_hub reads it."""


def load_config(folder: Path) -> Any:
    """Load the folder's transformers config object."""
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the model's config in {folder}: {first_line(error)}") from error


def stated_dtype(folder: Path) -> torch.dtype:
    """Return the dtype that the folder's config.json states, or float32 if it states none."""
    dtype = load_config(folder).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def load_tokenizer(folder: Path) -> Any:
    """Load the folder's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # The tokenizers library raises plain Exception at a damaged file.
        raise UserError(
            f"cannot read the tokenizer in {folder}: {first_line(error)}; save the model's own there again"
        ) from error


def end_tokens(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """List the tokens that end a response of this model.

    The first one is the tokenizer's end-of-sequence token. The others are the ``eos_token_id`` of
    generation_config.json, or of config.json without that file or key, at which transformers' ``generate``
    stops, too. They differ in many chat models, whose turns end with another token than documents do.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        stated_ids = _eos_token_ids(folder / name)
        if stated_ids is not None:
            ids += stated_ids
            break
    # Remove repetitions, but keep the order.
    return tuple(dict.fromkeys(ids))


def _eos_token_ids(path: Path) -> list[int] | None:
    """Read the ``eos_token_id`` of a config; None if there is no such file or key."""
    config = read_config(path) if path.is_file() else {}
    # The config of a vision model has the settings of its language model in text_config.
    language_config = {**(config.get("text_config") or {}), **config}
    eos = language_config.get("eos_token_id")
    if eos is None:
        return None
    ids = eos if isinstance(eos, list) else [eos]
    # `isinstance` would accept true, which is an int.
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise UserError(f"{path}: eos_token_id={eos!r:.80} must be a token's id or a list of ids; correct it")
    return ids


def stream_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the folder's safetensors files, one at a time in memory."""
    for opened in _safetensors(folder):
        # `opened` is not a mapping, so `in opened` would not work.
        for name in opened.keys():  # noqa: SIM118
            yield name, opened.get_tensor(name)


def weight_names(folder: Path) -> set[str]:
    """List the names of the tensors in the folder's safetensors files."""
    return {name for opened in _safetensors(folder) for name in opened.keys()}  # noqa: SIM118


def _safetensors(folder: Path) -> Iterator[Any]:
    """Open the folder's safetensors files, one after the other."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                yield opened
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"cannot load a causal language model from {folder}: {file.name}: {error}"
            ) from error


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Load all tensors of the folder's safetensors files, and check that they are finite."""
    tensors = dict(stream_weights(folder))
    name = _not_finite(tensors)
    if name is not None:
        raise UserError(f"{folder}: {name} holds NaN or inf; give a sound checkpoint")
    return tensors


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or inf."""
    for name, tensor in tensors.items():
        # aminmax raises an error for an empty tensor.
        if tensor.numel() == 0:
            continue
        # If a tensor has NaN or inf, its minimum or maximum is one. `isfinite` of the whole tensor would
        # allocate a mask as large as the tensor.
        smallest, largest = tensor.aminmax()
        if not (smallest.isfinite() and largest.isfinite()):
            return name
    return None


def _check_trained(tensors: Mapping[str, Tensor], target: Path) -> None:
    """Refuse to export weights that are not finite."""
    name = _not_finite(tensors)
    if name is not None:
        raise UserError(
            f"{target} is not written: {name} holds NaN or inf, training has diverged; resume an earlier "
            "checkpoint with a lower policy.megatron_cfg.optimizer.lr"
        )


def export(
    named_tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    target: Path,
    dtype: torch.dtype,
    training: Training | None,
) -> None:
    """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads.

    The folder is written under a temporary name and then renamed, so a folder of this name is always
    complete. An older folder is replaced.

    Args:
        named_tensors: Names and tensors of the model.
        source: Model folder that training started from; its side files are copied.
        target: Folder to write.
        dtype: Precision of the written tensors.
        training: Facts for the model card. None writes no card, for a model that is not trained yet.
    """
    # `copy=True` even if dtype and device stay: safetensors refuses tensors that share memory.
    tensors = {
        name: tensor.to(device="cpu", dtype=dtype, copy=True).contiguous() for name, tensor in named_tensors
    }
    _check_trained(tensors, target)
    config = load_config(source)
    config.dtype = dtype
    with appearing(target) as temporary:
        copy_side_files(source, temporary)
        # huggingface_hub logs the temporary name, which would mislead the user. Its logger cannot be turned
        # off alone, because the name of this logger depends on the version of huggingface_hub.
        logging.disable(logging.INFO)
        try:
            save_torch_state_dict(tensors, temporary, max_shard_size=MAX_SHARD_SIZE)
        finally:
            logging.disable(logging.NOTSET)
        with no_transformers_bars():
            config.save_pretrained(temporary)
        if training is not None:
            write_card(temporary, training, source)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Make a folder under a temporary name, and rename it to ``target`` when the block ends."""
    temporary = target.with_name(f"tmp_{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    make_readable(temporary)
    publish_folder(temporary, target)


def export_adapter(
    tensors: Mapping[str, Tensor], source: Path, target: Path, training: Training, *, dim: int, alpha: float
) -> None:
    """Write LoRA matrices as a folder that PEFT's `PeftModel.from_pretrained` loads on top of ``source``.

    Like the folder of `export`, it is written under a temporary name and then renamed.

    Args:
        tensors: Matrices by PEFT's names, ``base_model.model.<module>.lora_A.weight`` and ``lora_B``.
        source: Folder of the base model.
        target: Folder to write.
        training: Facts for the model card.
        dim: Rank of the matrices A and B in the update (alpha / dim) B A.
        alpha: Scale of the update.
    """
    copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    _check_trained(copies, target)
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = peft_config(base_model(training, source)[0], dim, alpha, modules)
    with appearing(target) as temporary:
        save_file(copies, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        (temporary / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_card(temporary, training, source, is_adapter=True)


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Within the block, hide the progress bars that transformers shows while it reads or writes weights."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
