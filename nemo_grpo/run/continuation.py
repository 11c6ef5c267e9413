"""Recipes and input files with which a run may resume, on either engine.

Input files are compared by content: a copy is the same file, and a change is noticed.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.recipe.continuity import deciding_settings
from nemo_grpo.recipe.recipe import RECIPE_FILE
from nemo_grpo.run.folder import newest_checkpoint, own_copy
from nemo_grpo.support.dotted import leaves
from nemo_grpo.support.errors import UserError, reading
from nemo_grpo.support.files import sha256_of, write_atomically
from nemo_grpo.support.model_folder import side_files

ANOTHER_RUN = "start another nemo_grpo.run_name"
INPUTS_FILE = "inputs.json"
"""In a run's folder: name -> SHA-256, as they were when it began."""
MODEL, WEIGHTS = "model/", ".safetensors"


def check_same_run(
    recipe: Recipe,
    resolved: Path,
    remedy: str = ANOTHER_RUN,
    *,
    may_extend: bool = True,
) -> Recipe | None:
    """Refuse to continue a run with a recipe that computes something else.

    Args:    resolved: the run's recipe.resolved.yaml; nothing is checked if it is not there.
             remedy: the alternative to undoing the change.
             may_extend: the run may become longer, be validated otherwise, and go on with changed code of the
                 user's own, which `RunFolder.keep_settings` notes.
    Returns: the recipe in ``resolved``.
    """
    if not resolved.exists():
        return None
    first = _recorded(resolved, recipe, remedy)
    left, found = (newest_checkpoint(one.checkpoint_dir) for one in (first, recipe))
    if recipe.nemo_grpo.target == "cluster" and left is None and found is None:
        return first  # without a checkpoint NeMo-RL starts from the beginning
    before = deciding_settings(first, may_extend=may_extend)
    now = deciding_settings(recipe, may_extend=may_extend)
    if now["policy.precision"] == "auto":
        del before["policy.precision"], now["policy.precision"]  # the run keeps its own
    changed = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise UserError(
            f"another recipe than {resolved.parent} was trained with: {'; '.join(changed)}; undo that, or "
            f"{remedy}"
        )
    for name, text in recipe.own_files.items():
        copy = own_copy(resolved.parent, name)
        if not may_extend and copy.is_file() and copy.read_bytes() != text.encode():
            raise UserError(
                f"another {name} than {resolved.parent} was trained with, which {copy} holds; undo the "
                f"change, or {remedy}"
            )
    check_inputs(resolved.parent, data_files(recipe), remedy)
    if left is not None and found is None:
        raise UserError(
            f"checkpointing.checkpoint_dir={recipe.checkpoint_dir} has no checkpoint, "
            f"{first.checkpoint_dir} has {left.name}; move them, or undo that"
        )
    return first


def check_continuation(recipe: Recipe) -> Recipe | None:
    """Refuse to resume if the run's folder, or that of its checkpoints, belongs to another recipe."""
    folders = dict.fromkeys((recipe.run_dir, recipe.checkpoint_dir))
    found = [check_same_run(recipe, folder / RECIPE_FILE) for folder in folders]
    return next(filter(None, found), None)


def _recorded(resolved: Path, recipe: Recipe, remedy: str) -> Recipe:
    with reading(resolved, "the recipe of a run", f"restore it, or {remedy}"):
        if resolved.read_bytes() == recipe.to_yaml().encode():  # the usual case
            return recipe
    try:
        return load_recipe(resolved)
    except UserError as error:
        raise UserError(
            f"{error}; {resolved} says what the run was trained with: restore it, or {remedy}"
        ) from None


def data_files(recipe: Recipe) -> dict[str, Path]:
    """List the files of the recipe's task, or of NeMo-RL's own data, by their paths in the recipe."""
    task = recipe.nemo_grpo.task
    if task is None:
        texts = [value for _, value in leaves(recipe.data.model_dump()) if isinstance(value, str)]
        return {file: Path(file) for file in texts if Path(file).is_file()}
    listed = [*getattr(task, "files", ()), getattr(task, "corpus", None)]
    return {file: Path(file) for file in listed if file}


def model_files(source: Path) -> dict[str, Path]:
    """List config, tokenizer and weights of a model's folder, which may lie elsewhere on resume."""
    return {
        f"{MODEL}{path.relative_to(source)}": path
        for path in (*side_files(source), *source.glob(f"*{WEIGHTS}"))
    }


def list_and_check_inputs(
    recipe: Recipe, source: Path, *, resumed: Path | None, has_reference: bool
) -> dict[str, Path]:
    """List a run's input files, and refuse to resume with changed ones that the run still reads.

    A resumed run takes its weights from its checkpoint. It reads those of ``source`` only for a reference
    policy, or as the frozen base of LoRA.

    Args:
        source: folder of the model to start from.
        resumed: folder of the run to resume; None: the run begins.
        has_reference: the run has a reference policy.
    """
    inputs = data_files(recipe) | model_files(source)
    if resumed is None:
        return inputs
    reads_weights = has_reference or recipe.policy.megatron_cfg.lora_in_use is not None
    # A new model is made again from its sizes, and its config may name other versions than the first time.
    reads_side_files = recipe.policy.model_name is not None
    used = {}
    for name, path in inputs.items():
        if not name.startswith(MODEL):
            is_read = True
        elif path.suffix == WEIGHTS:
            is_read = reads_weights
        else:
            is_read = reads_side_files
        if is_read:
            used[name] = path
    check_inputs(resumed, used, ANOTHER_RUN)
    return inputs


def check_inputs(run: Path, files: Mapping[str, Path], remedy: str) -> None:
    """Refuse files that have changed since a run began; runs of older versions have no record.

    Args: remedy: other than undoing the change.
    """
    before = _recorded_hashes(run)
    for name, path in files.items():
        if name in before and path.is_file() and (now := content_hash(path)) != before[name]:
            raise UserError(
                f"{path} is not the file that {run} was trained with (SHA-256 {before[name][:12]} -> "
                f"{now[:12]}); restore it, or {remedy}; if the change does not matter, remove "
                f"{run / INPUTS_FILE}"
            )


def keep_inputs(run: Path, files: Mapping[str, Path], *, begins: bool = False) -> None:
    """Record the files that the run's folder has no record of yet; if the run ``begins``, all."""
    before = {} if begins else _recorded_hashes(run)
    found = {
        name: content_hash(path) for name, path in files.items() if name not in before and path.is_file()
    }
    if found:
        write_atomically(run / INPUTS_FILE, json.dumps(before | found, indent=2) + "\n")


def _recorded_hashes(run: Path) -> dict[str, str]:
    path = run / INPUTS_FILE
    if not path.exists():
        return {}
    with reading(path, "a mapping in JSON", "restore it, or remove it and the check with it", TypeError):
        return {str(name): str(value) for name, value in dict(json.loads(path.read_text())).items()}


def content_hash(path: Path) -> str:
    """Hash a file (SHA-256), once per process until it changes."""
    state = path.stat()
    return _hash_of(path, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_of(path: Path, *_state: int) -> str:
    return sha256_of(path)
