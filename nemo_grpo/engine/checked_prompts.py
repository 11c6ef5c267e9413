"""Every training prompt is encoded before a run starts, those of the same files and settings once."""

import hashlib
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from nemo_grpo.engine.inputs import content_hash
from nemo_grpo.sampling.prompting import PROMPTS_CHECKED
from nemo_grpo.support.model_folder import side_files
from nemo_grpo.tasks import Problem, Task

log = logging.getLogger(__name__)

CHECKED_DIR = Path(".cache") / "checked_prompts"
"""An empty file for each set of files and settings whose prompts were checked."""


def check_training_prompts(
    task: Task, encode: Callable[[list[Problem]], object], seed: int, source: Path, settings: object
) -> None:
    """Encode every training prompt, of an endless stream the first ones; of the same files only once.

    Args:   encode: raises if a prompt cannot be used.  source: the model's folder, with the tokenizer.
            settings: what else the result depends on; its repr tells.
    Raises: what ``encode`` raises.
    """
    checked = _marker(task, source, settings)
    if checked is not None and checked.exists():
        return
    number = getattr(task, "num_train_problems", PROMPTS_CHECKED)
    for start in range(0, number, PROMPTS_CHECKED):
        indices = range(start, min(start + PROMPTS_CHECKED, number))
        encode([task.train_problem(index, seed) for index in indices])
    if checked is not None:
        try:
            checked.parent.mkdir(parents=True, exist_ok=True)
            checked.touch()
        except OSError as error:
            log.info("%s: %s; the next start encodes all prompts again", checked, error.strerror)


def _marker(task: Task, source: Path, settings: object) -> Path | None:
    """The file in `CHECKED_DIR` for these prompts; None for a task without files."""
    files = getattr(task.config, "train_files", ())
    if not files:
        return None
    held_out = getattr(task.config, "validation_files", ())  # training drops the same questions
    hashes = [content_hash(Path(path)) for path in (*files, *held_out, *side_files(source))]
    content = repr(
        (hashes, len(files), task.config, settings, version("transformers"), version("tokenizers"))
    )
    return CHECKED_DIR / hashlib.sha256(content.encode()).hexdigest()[:32]
