"""Checks of an evaluation's folders before it starts: the model's, and the one for the results."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import existing_parent
from nemo_grpo.support.hf_folder import load_tokenizer
from nemo_grpo.support.model_card import Training, base_model
from nemo_grpo.support.model_folder import check_no_other_weights, hf_config, how_to_get


@contextmanager
def finite_logits(model: Path) -> Iterator[None]:
    """Raise UserError if sampling from the model meets NaN or inf."""
    try:
        yield
    except FloatingPointError as error:
        raise UserError(f"--model {model}: {error}; use another checkpoint or dtype") from error


def result_name(model: Path) -> str:
    """Return a name for the results of a model: the name of its folder, or of its run.

    Every run writes its model to RUN/hf, so "hf" would not tell models apart.
    """
    folder = model.resolve()
    run_name = folder.parent.name
    # The parent of /hf is the root, whose name is empty.
    if folder.name == "hf" and run_name:
        return run_name
    return folder.name


def check_place(out: Path) -> None:
    """Refuse an output folder that cannot be written. Nothing is created yet."""
    existing = existing_parent(out)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {out} cannot be made: {existing} cannot be written; choose another folder")


def tokenizer_of(model: Path) -> Any:
    """Load the model's tokenizer.

    Raises:
        UserError: the tokenizer is missing or has no end-of-sequence token, or the folder also holds weights
            that would be ignored, such as an adapter.
    """
    if not model.is_dir():
        raise UserError(f"--model {model} is not a folder; {how_to_get(model)}")
    tokenizer_files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((model / name).is_file() for name in tokenizer_files):
        raise UserError(f"--model {model} has no tokenizer ({', '.join(tokenizer_files)}); {_remedy(model)}")
    tokenizer = load_tokenizer(model)
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in --model {model} has no end-of-sequence token; set eos_token")
    if (model / "config.json").is_file():
        check_no_other_weights(model, hf_config(model))
    return tokenizer


def _remedy(model: Path) -> str:
    """Tell the user how to put a tokenizer into a model folder that has none."""
    name, metadata = base_model(Training(), model)
    if "base_model" in metadata:
        load = f"AutoTokenizer.from_pretrained({name!r})"
        return f"{load}.save_pretrained({str(model)!r}) puts its base's there"
    return "put the tokenizer of its base model there, the one of --hf-config if it was converted"


def model_limits(model: Path) -> tuple[int | None, int | None]:
    """Read the model's longest sequence and vocabulary; None if its config does not say."""
    if not (model / "config.json").is_file():
        return None, None
    config = hf_config(model)
    # A vision-language model keeps the sizes of its language model in a section of its config.
    language_model = {**config, **config.get("text_config", {})}
    return language_model.get("max_position_embeddings"), language_model.get("vocab_size")
