"""Content of a Hugging Face model folder: config, weight files, and everything else."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemo_grpo.support import nemo_folder as nemo
from nemo_grpo.support.errors import UserError, listed, reading

log = logging.getLogger(__name__)

WHOLE = "model.safetensors"
"""File with all weights of a model."""
INDEX = "model.safetensors.index.json"
"""File that names the weight file of each tensor, for a model with several files."""
ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS_KEY = "transformers_weights"
"""Key of config.json that names a file for transformers to load."""
_MAX_DEPTH = 20
"""Most levels of nested objects in a config.json."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_PLAIN_NAME = re.compile(r"[\w.+-]{1,200}\.safetensors", re.ASCII)
SIDE_FILES = (
    # Configs.
    "config.json",
    "generation_config.json",
    "params.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    # Chat templates.
    "chat_template*.json",
    "*.jinja",
    # Tokenizers.
    "tokenizer*.json",
    "tokenizer*.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "tiktoken.model",
    "*.tiktoken",
    # Code that transformers runs with trust_remote_code.
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
    "*processing_*.py",
    "*reasoning_parser.py",
    # Terms that must go with a copy.
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Files that exports copy from a model's folder."""
TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates, ``NAME.jinja``, as transformers writes it."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_LFS = b"version https://git-lfs.github.com/spec/"
_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)
"""Pattern by which transformers finds the files that a model's code imports."""
_DOCUMENTS = ("README.md", ".gitattributes", "SHA256SUMS")


def weight_map(folder: Path) -> dict[str, str]:
    """Read the name of the weight file of each tensor from `INDEX`; empty for a model without an index."""
    index = folder / INDEX
    if (folder / WHOLE).exists() or not index.exists():
        return {}
    with reading(index, "a safetensors index", "download it again", TypeError, AttributeError, KeyError):
        files = dict(json.loads(index.read_text())["weight_map"].items())
        for name, file in files.items():
            # A name with a path could lead out of the model's folder.
            if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
                raise ValueError(f"{name} is in {file!r:.60}, which is no file beside it")
    return files


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model that transformers would load.

    They are `WHOLE`, or without it the files that `INDEX` names, or without an index all safetensors files.
    The choice matters: some folders have the weights a second time, in another form and under other names.
    """
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    names = sorted(set(weight_map(folder).values()))
    if not names:
        return sorted(folder.glob("*.safetensors"))
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise UserError(f"{folder / INDEX} names {listed(absent)}, missing here; download the model again")
    return [folder / name for name in names]


def is_hub_name(name: str) -> bool:
    """True for a name of the form ORGANISATION/MODEL that is not a path on this machine."""
    return _HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)


def how_to_get(folder: Path) -> str:
    """Return the remedy for a path that should be a model folder and is not."""
    remedy = "give a Hugging Face model folder"
    if is_hub_name(str(folder)):
        remedy += f"; `hf download {folder} --local-dir DIR` makes one of a model on the Hub"
    return remedy


def check_weights(folder: Path) -> None:
    """Refuse a folder without safetensors files."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {how_to_get(folder)}")
    for file in sorted(folder.glob("*.safetensors")):
        # The Hub's cache has links to blobs, which a copied folder or an emptied cache leaves dangling.
        if file.is_symlink() and not file.exists():
            raise UserError(
                f"{file} is a link to {file.readlink()}, which is not there; download the model again"
            )
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))
    if pickles:
        raise UserError(
            f"{pickles[0]} is a pickle, which can run code when it is read; load the model with transformers "
            "where you trust it, save it with save_pretrained(), and convert that folder"
        )
    raise UserError(f"{folder} holds no *.safetensors; download the model's weights there")


def check_no_other_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose weights in transformers are not those of `weight_files` alone.

    Args:
        folder: Model folder.
        config: Content of its config.json.
    """
    if (folder / ADAPTER_CONFIG).exists():
        raise UserError(
            f"{folder} has {ADAPTER_CONFIG} beside config.json, so transformers adds an adapter to the "
            "weights; merge it first, or move it away"
        )
    other_file = config.get(WEIGHTS_KEY)
    if other_file:
        raise UserError(
            f"{folder / 'config.json'} has {WEIGHTS_KEY}={other_file!r:.80}, so transformers loads that file "
            f"alone; move it to a folder of its own as {WHOLE}, with the other files and without the key"
        )


def hf_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json."""
    path = folder / "config.json"
    with reading(folder, "a model's folder", "check its name and mode"):
        if not path.exists():
            reason = nemo.reason_against(folder)
            if reason is not None:
                raise UserError(f"{folder} is {reason}")
            raise UserError(f"{folder} has no config.json; {how_to_get(folder)}")
    return read_config(path)


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from config.json or another config file."""
    with reading(path, "JSON", "give a model's config.json, or download it again"):
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise UserError(f"{path} is not a JSON object; download it again")
        # A library that recurses would fail later at a deep object, although it parses here. `reading` turns
        # this error into a message.
        if _depth(config) > _MAX_DEPTH:
            raise RecursionError
    return config


def with_config_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a recipe's policy.hf_config_overrides to a config.json, as transformers and vLLM do.

    A value replaces the whole value of its key; a nested configuration, such as text_config, is updated key
    by key.
    """
    changed = dict(config)
    for key, value in overrides.items():
        below = changed.get(key)
        if key.endswith("_config") and isinstance(below, Mapping) and isinstance(value, Mapping):
            changed[key] = {**below, **value}
        else:
            changed[key] = value
    return changed


def _depth(value: Any) -> int:
    """Count the levels of nested objects and lists."""
    # Level by level, because a recursion would end at Python's own limit.
    depth = 0
    level = [value]
    while level:
        depth += 1
        next_level = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            next_level += [inner for inner in values if isinstance(inner, dict | list)]
        level = next_level
    return depth


def side_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a model folder besides its weights: configs, tokenizer, chat templates, code.

    Files whose names no model has may be secrets: they are left out, and a warning names them.
    """
    left_out = []
    code = _code_files(folder)
    for path in sorted((*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*"))):
        # An export writes its own weights and documents.
        if not path.is_file() or path.name.endswith(_WEIGHTS) or path.name in _DOCUMENTS:
            continue
        if path not in code and not _is_named_like_a_side_file(path):
            left_out.append(str(path.relative_to(folder)))
            continue
        if not _stays_within(path, folder):
            raise UserError(
                f"{path} is a link to {path.resolve()}, outside of the model's folder; put a copy of the "
                "file in its place, or remove it"
            )
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read; change its mode, or remove it")
        if _is_lfs_pointer(path):
            raise UserError(
                f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` in {folder}, or "
                "download the model again"
            )
        yield path
    if left_out:
        log.warning("%s: not copied, since models have no such files: %s", folder, listed(left_out))


def _is_named_like_a_side_file(path: Path) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in SIDE_FILES)


def _is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_LFS)) == _LFS


def auto_map_files(settings: Mapping[str, Any]) -> set[str]:
    """List the Python files that the ``auto_map`` of a config or tokenizer config names."""
    auto_map = settings.get("auto_map")
    if not isinstance(auto_map, dict):
        return set()
    class_names = []
    for entry in auto_map.values():
        # A tokenizer's entry lists two classes: the slow one and the fast one.
        class_names += entry if isinstance(entry, list) else [entry]
    files = set()
    for name in class_names:
        # A name is MODULE.CLASS. The form REPOSITORY--MODULE.CLASS names code that is not in this folder.
        if isinstance(name, str) and "." in name and "--" not in name:
            module = name.rpartition(".")[0]
            files.add(f"{module}.py")
    return files


def _code_files(folder: Path) -> set[Path]:
    """Find the Python files of a model's code: those that transformers loads, and those that these import."""
    names: set[str] = set()
    for config in ("config.json", "tokenizer_config.json", "processor_config.json"):
        if (folder / config).is_file():
            names |= auto_map_files(read_config(folder / config))
    files: set[Path] = set()
    remaining = [folder / name for name in names]
    remaining += [path for path in folder.glob("*.py") if _is_named_like_a_side_file(path)]
    while remaining:
        path = remaining.pop()
        if path in files or path.parent != folder or not path.is_file():
            continue
        files.add(path)
        text = path.read_text(encoding="utf-8", errors="replace")
        remaining += [folder / f"{module}.py" for module in _RELATIVE_IMPORT.findall(text)]
    return files


def copy_side_files(source: Path, target: Path) -> set[str]:
    """Copy a model folder's `side_files`; returns their names, relative to the folder."""
    names = set()
    for path in side_files(source):
        name = path.relative_to(source)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
        names.add(str(name))
    return names


def _stays_within(path: Path, folder: Path) -> bool:
    """True for a file in the folder itself, and for a link into the same model's files in the Hub's cache."""
    real_folder = folder.resolve()
    places = [real_folder / path.relative_to(folder).parent]
    # In the Hub's cache the files of a snapshot are links to the model's folder of blobs.
    if real_folder.parent.name == "snapshots":
        places.append(real_folder.parents[1] / "blobs")
    return path.resolve().parent in places


def peft_config(base: str, rank: int, alpha: float, modules: set[str]) -> dict[str, object]:
    """Build the content of adapter_config.json.

    Args:
        base: Name of the base model, as in the adapter's card.
        rank: Rank of the matrices.
        alpha: Scale of the update.
        modules: Names of the adapted modules without their path, such as ``q_proj``.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
    }
