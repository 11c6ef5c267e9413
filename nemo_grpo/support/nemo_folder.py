"""Checkpoints of nemo-toolkit: folders of NeMo 2.0, and archives of NeMo 1.

A folder of NeMo 2.0 has ``weights`` in torch_dist, and ``context`` beside them. The layout is taken from
NeMo's ``lightning``: ``io/pl.py`` and ``ckpt_utils.py`` (folders), ``megatron_parallel.py`` (names below
``module.``) and ``io/mixin.py`` (model.yaml).
"""

import re
from pathlib import Path

from nemo_grpo.support.errors import UserError

MODEL_YAML = Path("context") / "model.yaml"
_WRAPPERS = re.compile(r"(module\.)+(?=(language_model|embedding|decoder|output_layer|visual)\.)")

_ARCHIVE = (
    "a NeMo 1 checkpoint; NeMo's scripts/checkpoint_converters/convert_nemo1_to_nemo2.py makes it a NeMo 2.0 "
    "folder"
)


def without_wrappers(key: str) -> str:
    """Strip the names of modules that wrap megatron-core's model from a torch_dist key."""
    return _WRAPPERS.sub("", key, count=1) if key.startswith("module.") else key


def model_yaml(weights: Path) -> Path:
    """Return the path of the model's description, which NeMo 2.0 writes beside a torch_dist folder."""
    return weights.parent / MODEL_YAML


def is_folder(path: Path) -> bool:
    """True for a folder that NeMo 2.0 has written."""
    return (path / MODEL_YAML.parent).is_dir() and (path / "weights").is_dir()


def is_archive(path: Path) -> bool:
    """True for a checkpoint of NeMo 1: a file with the ending ``.nemo``, or the folder unpacked from one."""
    return path.suffix == ".nemo" or (path / "model_config.yaml").exists()


def refuse_archive(path: Path) -> None:
    """Refuse a checkpoint of NeMo 1."""
    if is_archive(path):
        raise UserError(f"{path} is {_ARCHIVE}; give that")


def reason_against(path: Path) -> str | None:
    """Explain that a path is a NeMo checkpoint, not a Hugging Face model; return None if it is neither."""
    if is_archive(path):
        return f"{_ARCHIVE}; convert that with `nemo-grpo convert megatron-to-hf`"
    if is_folder(path):
        return (
            f"a NeMo 2.0 checkpoint; name the result of `nemo-grpo convert megatron-to-hf "
            f"--megatron-checkpoint {path} --hf-config BASE_MODEL --output MODEL`"
        )
    return None
