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
"""File in a run's folder: the SHA-256 that each input file had when the run began, by the file's name."""
MODEL = "model/"
"""Prefix of the model's files in `INPUTS_FILE`."""
WEIGHTS = ".safetensors"
"""Ending of the model files that hold weights."""


def check_same_run(
    recipe: Recipe,
    resolved: Path,
    remedy: str = ANOTHER_RUN,
    *,
    may_extend: bool = True,
) -> Recipe | None:
    """Refuse to continue a run with a recipe that computes something else.

    Args:
        recipe: Recipe to continue with.
        resolved: recipe.resolved.yaml of the run. If it does not exist, nothing is checked.
        remedy: Advice for users who do not want to undo their change.
        may_extend: True if the recipe may set more steps and other validations, and if the user's own code
            may have changed. `RunFolder.keep_settings` logs changed code.

    Returns:
        The recipe in ``resolved``, or None if that file does not exist.
    """
    if not resolved.exists():
        return None
    run = resolved.parent
    first = _recorded_recipe(resolved, recipe, remedy)
    first_checkpoint = newest_checkpoint(first.checkpoint_dir)
    checkpoint = newest_checkpoint(recipe.checkpoint_dir)
    # Without a checkpoint NeMo-RL starts from the beginning, so any recipe may take the folder.
    if recipe.nemo_grpo.target == "cluster" and first_checkpoint is None and checkpoint is None:
        return first
    _refuse_changed_settings(first, recipe, run, remedy, may_extend=may_extend)
    if not may_extend:
        _refuse_changed_code(recipe, run, remedy)
    check_inputs(run, data_files(recipe), remedy)
    if first_checkpoint is not None and checkpoint is None:
        raise UserError(
            f"checkpointing.checkpoint_dir={recipe.checkpoint_dir} has no checkpoint, "
            f"{first.checkpoint_dir} has {first_checkpoint.name}; move them, or undo that"
        )
    return first


def _refuse_changed_settings(
    first: Recipe, recipe: Recipe, run: Path, remedy: str, *, may_extend: bool
) -> None:
    """Refuse a recipe that computes something else than the recipe that the run began with."""
    before = deciding_settings(first, may_extend=may_extend)
    now = deciding_settings(recipe, may_extend=may_extend)
    # With "auto" the run keeps the precision that it began with, so any earlier value fits.
    if now["policy.precision"] == "auto":
        del before["policy.precision"]
        del now["policy.precision"]
    changes = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changes:
        raise UserError(
            f"another recipe than {run} was trained with: {'; '.join(changes)}; undo that, or {remedy}"
        )


def _refuse_changed_code(recipe: Recipe, run: Path, remedy: str) -> None:
    """Refuse a user's own variants, tasks and rewards if they differ from the copies in the run's folder."""
    for name, text in recipe.own_files.items():
        copy = own_copy(run, name)
        if copy.is_file() and copy.read_bytes() != text.encode():
            raise UserError(
                f"another {name} than {run} was trained with, which {copy} holds; undo the change, or "
                f"{remedy}"
            )


def check_continuation(recipe: Recipe) -> Recipe | None:
    """Refuse to resume if the run's folder, or that of its checkpoints, belongs to another recipe.

    Returns:
        The recipe that the run began with, or None if neither folder has a recipe.
    """
    began_as = check_same_run(recipe, recipe.run_dir / RECIPE_FILE)
    if recipe.checkpoint_dir == recipe.run_dir:
        return began_as
    # Checkpoints elsewhere have a copy of the recipe beside them.
    checkpoints_began_as = check_same_run(recipe, recipe.checkpoint_dir / RECIPE_FILE)
    return began_as if began_as is not None else checkpoints_began_as


def _recorded_recipe(resolved: Path, recipe: Recipe, remedy: str) -> Recipe:
    """Load the recipe of a run."""
    with reading(resolved, "the recipe of a run", f"restore it, or {remedy}"):
        # Usually nothing has changed, and validating a recipe takes longer than comparing its text.
        if resolved.read_bytes() == recipe.to_yaml().encode():
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
        # NeMo-RL's data sections have many forms, so every text in them that is the path of a file counts.
        texts = [value for _, value in leaves(recipe.data.model_dump()) if isinstance(value, str)]
        return {text: Path(text) for text in texts if Path(text).is_file()}
    files = [*getattr(task, "files", ()), getattr(task, "corpus", None)]
    return {file: Path(file) for file in files if file}


def model_files(source: Path) -> dict[str, Path]:
    """List config, tokenizer and weights of a model's folder, which may lie elsewhere on resume."""
    paths = [*side_files(source), *source.glob(f"*{WEIGHTS}")]
    return {f"{MODEL}{path.relative_to(source)}": path for path in paths}


def list_and_check_inputs(
    recipe: Recipe, source: Path, *, resumed: Path | None, has_reference: bool
) -> dict[str, Path]:
    """List a run's input files, and refuse to resume with changed ones that the run still reads.

    A resumed run takes its weights from its checkpoint. It reads those of ``source`` only for a reference
    policy, or as the frozen base of LoRA.

    Args:
        recipe: Recipe of the run.
        source: Folder of the model to start from.
        resumed: Folder of the run to resume, or None for a new run.
        has_reference: True if the run has a reference policy.

    Returns:
        Paths of all input files by name, also of those that a resumed run does not read.
    """
    inputs = data_files(recipe) | model_files(source)
    if resumed is None:
        return inputs
    reads_weights = has_reference or recipe.policy.megatron_cfg.lora_in_use is not None
    # Without a model_name the model is built from its sizes at every start. Its config.json may then name
    # another version of transformers than the first time, which is no change of the run.
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
    """Refuse files that have changed since a run began.

    A file without a recorded hash passes: runs of older versions of this package recorded none.

    Args:
        run: Folder of the run.
        files: Paths by the names in the run's record.
        remedy: Advice for users who do not want to restore the file.
    """
    recorded_hashes = _recorded_hashes(run)
    for name, path in files.items():
        if name not in recorded_hashes or not path.is_file():
            continue
        before = recorded_hashes[name]
        now = content_hash(path)
        if now != before:
            raise UserError(
                f"{path} is not the file that {run} was trained with (SHA-256 {before[:12]} -> {now[:12]}); "
                f"restore it, or {remedy}; if the change does not matter, remove {run / INPUTS_FILE}"
            )


def keep_inputs(run: Path, files: Mapping[str, Path], *, begins: bool = False) -> None:
    """Record the hashes of input files in the run's folder.

    Args:
        run: Folder of the run.
        files: Paths by name.
        begins: True for a new run, whose record replaces an older one. A resumed run only adds the files
            that its record lacks.
    """
    recorded_hashes = {} if begins else _recorded_hashes(run)
    new_hashes = {
        name: content_hash(path)
        for name, path in files.items()
        if name not in recorded_hashes and path.is_file()
    }
    if new_hashes:
        write_atomically(run / INPUTS_FILE, json.dumps(recorded_hashes | new_hashes, indent=2) + "\n")


def _recorded_hashes(run: Path) -> dict[str, str]:
    """Read the hashes that the run's folder records, by file name. Without a record there are none."""
    path = run / INPUTS_FILE
    if not path.exists():
        return {}
    # `dict` raises a TypeError where the JSON is not a mapping.
    with reading(path, "a mapping in JSON", "restore it, or remove it and the check with it", TypeError):
        recorded = dict(json.loads(path.read_text()))
        return {str(name): str(digest) for name, digest in recorded.items()}


def content_hash(path: Path) -> str:
    """Hash a file (SHA-256), once per process until it changes."""
    status = path.stat()
    return _hash_of(path, status.st_ino, status.st_size, status.st_mtime_ns)


# Weights of several GB are needed twice, in the check before the start and for the record; they are hashed
# once. A changed file has another status, which is a part of the cache's key.
@lru_cache(maxsize=1024)
def _hash_of(path: Path, *_status: int) -> str:
    return sha256_of(path)
