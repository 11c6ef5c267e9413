"""What commands on a trained model share: its folder, its limits, the place of the results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints_conv.model_folder import hf_config
from nemo_grpo.errors import UserError


@contextmanager
def finite_logits(model: Path) -> Iterator[None]:
    """Raises UserError where sampling from the model meets NaN or inf."""
    try:
        yield
    except FloatingPointError as error:
        raise UserError(f"--model {model}: {error}; give a sound checkpoint, or another dtype") from error


def result_name(model: Path) -> str:
    """The folder's name; of a run's folder hf, the run's: every run has one of that name."""
    folder = model.resolve()
    return folder.parent.name if folder.name == "hf" and folder.parent.name else folder.name


def check_place(out: Path) -> None:
    """Before the work: its results must not be lost for want of a place. Makes nothing yet."""
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {out} cannot be made: {existing} cannot be written; choose another folder")


def tokenizer_of(model: Path) -> Any:
    """Its tokenizer.  Raises: UserError: there is none, or none that can end a response."""
    from nemo_grpo.engine.hf_folder import load_tokenizer

    if not model.is_dir():
        raise UserError(f"--model {model} is not a folder; give a Hugging Face model folder on this machine")
    known = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((model / name).is_file() for name in known):
        raise UserError(f"--model {model} has no tokenizer ({', '.join(known)}); {_remedy(model)}")
    tokenizer = load_tokenizer(model)
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in --model {model} has no end-of-sequence token; set eos_token")
    return tokenizer


def _remedy(model: Path) -> str:
    """What to do with a folder that is no model folder."""
    if (model / "recipe.resolved.yaml").is_file():
        return f"this is a run's folder: give its model, {model / 'hf'}"
    if (model / "policy").is_dir() or (model / ".metadata").is_file():
        return "this is a Megatron checkpoint: `nemo-grpo convert megatron-to-hf` makes a model folder of it"
    return "save the tokenizer there"


def model_limits(model: Path) -> tuple[int | None, int | None]:
    """Longest sequence and vocabulary of the model in this folder; None where its config does not say."""
    config = hf_config(model) if (model / "config.json").is_file() else {}
    return config.get("max_position_embeddings"), config.get("vocab_size")
