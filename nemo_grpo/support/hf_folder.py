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


def load_config(folder: Path) -> Any:
    """Load the folder's transformers config object."""
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the model's config in {folder}: {first_line(error)}") from error


def stated_dtype(folder: Path) -> torch.dtype:
    """Return the dtype that the folder's config states; float32 without one."""
    dtype = load_config(folder).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def load_tokenizer(folder: Path) -> Any:
    """Load the folder's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception at a damaged file
        raise UserError(
            f"cannot read the tokenizer in {folder}: {first_line(error)}; save the model's own there again"
        ) from error


def end_tokens(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """List the tokens that end this model's responses, the tokenizer's end of sequence first.

    The others are ``eos_token_id`` of generation_config.json, else of config.json, at which transformers'
    ``generate`` stops: a chat model's turns often end in another token than its tokenizer's documents.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        config = read_config(folder / name) if (folder / name).is_file() else {}
        found = {**(config.get("text_config") or {}), **config}.get("eos_token_id")
        if found is not None:
            listed = found if isinstance(found, list) else [found]
            if any(type(one) is not int or one < 0 for one in listed):
                raise UserError(
                    f"{folder / name}: eos_token_id={found!r:.80} must be a token's id or a list of ids; "
                    "correct it"
                )
            ids += listed
            break
    return tuple(dict.fromkeys(ids))


def stream_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the folder's safetensors files, one at a time in memory."""
    for opened in _safetensors(folder):
        for name in opened.keys():  # noqa: SIM118  (no mapping)
            yield name, opened.get_tensor(name)


def weight_names(folder: Path) -> set[str]:
    """List the names of the tensors in the folder's safetensors files."""
    return {name for opened in _safetensors(folder) for name in opened.keys()}  # noqa: SIM118


def _safetensors(folder: Path) -> Iterator[Any]:
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
    if name := _not_finite(tensors):
        raise UserError(f"{folder}: {name} holds NaN or inf; give a sound checkpoint")
    return tensors


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    filled = ((name, tensor) for name, tensor in tensors.items() if tensor.numel())
    return next((name for name, tensor in filled if not all(b.isfinite() for b in tensor.aminmax())), None)


def _check_trained(tensors: Mapping[str, Tensor], target: Path) -> None:
    if name := _not_finite(tensors):
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

    Written under a temporary name and renamed, so a folder of this name is always whole. An older one is
    replaced.

    Args: source: the model folder that training started from; its side files are copied.
          training: facts for the model card; None: no card, for a model that a run will start with.
    """
    tensors = {name: t.to(device="cpu", dtype=dtype, copy=True).contiguous() for name, t in named_tensors}
    _check_trained(tensors, target)
    config = load_config(source)
    config.dtype = dtype
    with appearing(target) as temporary:
        copy_side_files(source, temporary)
        logging.disable(logging.INFO)  # the library reports the temporary name, and its logger's name changes
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
    """Make a folder under a temporary name, which replaces ``target`` when the block ends."""
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

    Written under a temporary name and renamed, like `export`.

    Args: tensors: by PEFT's names, ``base_model.model.<module>.lora_A.weight`` and ``lora_B``.
          source: the base model's folder.  training: facts for the model card.
          dim, alpha: the update is alpha / dim B A.
    """
    copies = {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    _check_trained(copies, target)
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = peft_config(base_model(training, source)[0], dim, alpha, modules)
    with appearing(target) as temporary:
        save_file(copies, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        (temporary / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_card(temporary, training, source, is_adapter=True)


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Hide the bars that transformers draws while it reads or writes weights; restores its setting."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
