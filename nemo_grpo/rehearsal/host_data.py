"""Stand-ins for the data of a recipe of NeMo-RL's: a few sums in NeMo-RL's own `ResponseDataset`.

Environment, processor and prompt stay the recipe's. The small model learns to answer these sums as NeMo-RL's
environments for mathematics read answers, so that its groups have signal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_grpo.errors import UserError, as_yaml
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.host import data_sets
from nemo_grpo.tasks.mathematics import MathConfig
from nemo_grpo.tasks.prompts import SLOT, Prompt

ENVIRONMENTS = ("math", "math_multi_reward")
"""NeMo-RL's environments whose rewards the small model can earn."""
PROCESSORS = ("default", "math_data_processor", "math_hf_data_processor")
KEPT = ("env_name", "processor", "prompt_file", "system_prompt_file")


def refuse_data(recipe: Recipe) -> None:
    """Refuse data that sums cannot stand for.

    Raises: UserError: another environment or processor.
    """
    key, data = data_sets(recipe)[0]
    for name, known in (("env_name", ENVIRONMENTS), ("processor", PROCESSORS)):
        if data.get(name, "default" if name == "processor" else None) not in known:
            raise UserError(
                f"{key}.{name}={as_yaml(data.get(name))}: a rehearsal has small problems for "
                f"{', '.join(known)} alone; use recipe check and plan, or give data.train one of these"
            )


def sums(folder: Path, number: int) -> MathConfig:
    """The problems, as the task that teaches the small model.

    Args: folder: gets the files.  number: of training problems, and of validation problems.
    """
    return MathConfig(form="boxed").made_up(folder, number)


def prompt_of(recipe: Recipe, nemo_rl: Path) -> Prompt:
    """The recipe's prompt, as this package writes it.

    Args: nemo_rl: NeMo-RL's repository, to which its recipes' paths are relative.
    """
    _, data = data_sets(recipe)[0]
    template = _text(data.get("prompt_file"), nemo_rl)
    shown = SLOT if template is None else template.format(SLOT)  # as NeMo-RL's processors fill it
    return Prompt(system=_text(data.get("system_prompt_file"), nemo_rl), template=shown)


def _text(name: str | None, nemo_rl: Path) -> str | None:
    if name is None:
        return None
    found = next((path for path in (Path(name), nemo_rl / name) if path.is_file()), None)
    if found is None:
        raise UserError(f"data: the prompt {name} is neither here nor in {nemo_rl}; correct the path")
    return found.read_text(encoding="utf-8")


def section(recipe: Recipe, task: MathConfig, split: str) -> dict[str, Any] | None:
    """``data.train`` or ``data.validation`` of the rehearsal; null if the recipe never validates."""
    if split == "validation" and not recipe.grpo.validates:
        return None
    _, given = data_sets(recipe)[0]
    (file,) = task.train_files if split == "train" else task.validation_files
    return {
        "_override_": True,
        "dataset_name": "ResponseDataset",
        "data_path": file,
        "input_key": "question",
        "output_key": "answer",
        "split": "train",
        **{key: given[key] for key in KEPT if key in given},
    }
