"""Files that a run depends on, by content: a copy is the same file, a changed one does not go unnoticed."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from nemo_grpo.recipe import Recipe
from nemo_grpo.support.dotted import leaves
from nemo_grpo.support.errors import UserError, reading
from nemo_grpo.support.files import sha256_of, write_atomically
from nemo_grpo.support.model_folder import side_files

INPUTS_FILE = "inputs.json"
"""In a run's folder: name -> SHA-256, as they were when it began."""
MODEL, WEIGHTS = "model/", ".safetensors"


def data_files(recipe: Recipe) -> dict[str, Path]:
    """The files of the recipe's task, or of NeMo-RL's own data, by their paths in the recipe."""
    task = recipe.nemo_grpo.task
    if task is None:
        texts = [value for _, value in leaves(recipe.data.model_dump()) if isinstance(value, str)]
        return {file: Path(file) for file in texts if Path(file).is_file()}
    listed = [*getattr(task, "files", ()), getattr(task, "corpus", None)]
    return {file: Path(file) for file in listed if file}


def model_files(source: Path) -> dict[str, Path]:
    """Config, tokenizer and weights of a model's folder, which may lie elsewhere when a run is resumed."""
    return {
        f"{MODEL}{path.relative_to(source)}": path
        for path in (*side_files(source), *source.glob(f"*{WEIGHTS}"))
    }


def resume_inputs(files: Mapping[str, Path], recipe: Recipe, *, has_reference: bool) -> dict[str, Path]:
    """Return the input files that a resumed run still reads: weights only with LoRA or a reference policy.

    A warm start that is made again has the same tokenizer, and a config with the versions of its making.
    """
    weights = has_reference or recipe.policy.megatron_cfg.lora_in_use is not None
    side = recipe.policy.model_name is not None
    return {
        name: path
        for name, path in files.items()
        if not name.startswith(MODEL) or (weights if path.suffix == WEIGHTS else side)
    }


def check_inputs(run: Path, files: Mapping[str, Path], remedy: str) -> None:
    """Refuse files that have changed since a run began; runs of older versions have no record.

    Args: remedy: other than undoing the change.
    """
    before = _read(run)
    for name, path in files.items():
        if name in before and path.is_file() and (now := content_hash(path)) != before[name]:
            raise UserError(
                f"{path} is not the file that {run} was trained with (SHA-256 {before[name][:12]} -> "
                f"{now[:12]}); restore it, or {remedy}; if the change does not matter, remove "
                f"{run / INPUTS_FILE}"
            )


def keep_inputs(run: Path, files: Mapping[str, Path], *, begins: bool = False) -> None:
    """Record the files that the run's folder has no record of yet; if the run ``begins``, all."""
    before = {} if begins else _read(run)
    found = {
        name: content_hash(path) for name, path in files.items() if name not in before and path.is_file()
    }
    if found:
        write_atomically(run / INPUTS_FILE, json.dumps(before | found, indent=2) + "\n")


def _read(run: Path) -> dict[str, str]:
    path = run / INPUTS_FILE
    if not path.exists():
        return {}
    with reading(path, "a mapping in JSON", "restore it, or remove it and the check with it", TypeError):
        return {str(name): str(value) for name, value in dict(json.loads(path.read_text())).items()}


def content_hash(path: Path) -> str:
    """SHA-256 of a file, which is read once in a process until it changes."""
    state = path.stat()
    return _hash_of(path, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_of(path: Path, *_state: int) -> str:
    return sha256_of(path)
