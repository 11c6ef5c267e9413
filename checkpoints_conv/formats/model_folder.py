"""What lies in a Hugging Face model folder: config, weight files, and everything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints_conv.formats import nemo
from nemo_grpo.errors import UserError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_map(folder: Path) -> dict[str, str]:
    """File of each tensor by the index; empty where none is needed.

    Raises: UserError: the index is damaged.
    """
    index = folder / INDEX
    if (folder / WHOLE).exists() or not index.exists():
        return {}
    try:
        found: dict[str, str] = dict(json.loads(index.read_text())["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a safetensors index ({error}); download it again") from None
    return found


def weight_files(folder: Path) -> list[Path]:
    """A model's safetensors files as transformers chooses them: the one, else the index's, else all.

    Some models come with their weights once more, in another form and under other names.

    Raises: UserError: the index is damaged.
    """
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if names := set(weight_map(folder).values()):
        return [folder / name for name in sorted(names) if (folder / name).exists()]
    return sorted(folder.glob("*.safetensors"))


def check_weights(folder: Path) -> None:
    """Refuse a folder without safetensors.

    Raises: UserError: there are none, or pickles in their place.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder that holds config.json and *.safetensors")
    for file in sorted(folder.glob("*.safetensors")):
        if file.is_symlink() and not file.exists():
            raise UserError(
                f"{file} is a link to {file.readlink()}, which is not there; download the model again"
            )
    if any(folder.glob("*.safetensors")):
        return
    if pickles := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth")):
        raise UserError(
            f"{pickles[0]} is a pickle, which can run code when it is read; load the model with transformers "
            "where you trust it, save it with save_pretrained(), and convert that folder"
        )
    raise UserError(f"{folder} holds no *.safetensors; download the model's weights there")


def hf_config(folder: Path) -> dict[str, Any]:
    """The content of a model folder's config.json.

    Raises: UserError: it is missing or no JSON object.
    """
    path = folder / "config.json"
    if not path.exists() and (reason := nemo.reason_against(folder)):
        raise UserError(f"{folder} is {reason}")
    if not path.exists():
        raise UserError(f"{folder} has no config.json; give a Hugging Face model folder")
    return read_config(path)


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json, whatever its name.

    Raises: UserError: it cannot be read or is no JSON object.
    """
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a model's config.json") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object; download it again")
    return config


def side_files(folder: Path) -> Iterator[Path]:
    """What a model folder holds besides weights: configs, tokenizer, chat template, generation config."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
    documents = ("README.md", ".gitattributes", "SHA256SUMS")
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.endswith(weights) and path.name not in documents:
            yield path
