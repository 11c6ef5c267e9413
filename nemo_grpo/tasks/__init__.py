"""Problems, their prompts and their rewards, and the tasks by name.

The package imports neither torch nor an engine, so that preparing data and checking a recipe start quickly.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.extensions import is_reference, load_class
from nemo_grpo.tasks.base import Problem, Task, TaskConfig
from nemo_grpo.tasks.knights_knaves import KnightsKnavesConfig
from nemo_grpo.tasks.logic import LogicConfig
from nemo_grpo.tasks.mathematics import MathConfig
from nemo_grpo.tasks.prompts import PRESETS, Prompt, chat_messages, encode_prompt
from nemo_grpo.tasks.search_qa import SearchQAConfig
from nemo_grpo.tasks.vision import (
    VisionClassificationConfig,
    VisionCountingConfig,
    VisionGroundingConfig,
    VisionMathConfig,
)
from nemo_grpo.tasks.word_problems import WordProblemsConfig

__all__ = [
    "PRESETS",
    "TASKS",
    "Problem",
    "Prompt",
    "Task",
    "TaskConfig",
    "chat_messages",
    "encode_prompt",
    "parse_task",
]

TASKS: dict[str, type[TaskConfig]] = {
    config.model_fields["name"].default: config
    for config in (
        KnightsKnavesConfig,
        WordProblemsConfig,
        MathConfig,
        LogicConfig,
        SearchQAConfig,
        VisionGroundingConfig,
        VisionClassificationConfig,
        VisionCountingConfig,
        VisionMathConfig,
    )
}
"""Name -> configuration class. To add a task, write its file and add its class here."""


def parse_task(section: Mapping[str, Any]) -> TaskConfig:
    """Parse a recipe's ``nemo_grpo.task`` section.

    Args:
        section: ``name`` and that task's parameters. A user's own task is named ``my_file.py:MyTaskConfig``.

    Returns:
        The frozen configuration. Its ``build()`` makes the task.
    """
    name = section.get("name")
    if not isinstance(name, str):
        raise UserError(f"nemo_grpo.task needs a name (one of {', '.join(sorted(TASKS))}); got {name!r}")
    if is_reference(name):
        config = load_class(name, TaskConfig, "nemo_grpo.task.name")
    elif name in TASKS:
        config = TASKS[name]
    else:
        raise UserError(f"unknown task nemo_grpo.task.name={name!r}{did_you_mean(name, TASKS)}")
    _refuse_unknown_keys(section, name, config)
    try:
        return config.model_validate(dict(section))
    except ValidationError as error:
        first_error = error.errors()[0]
        # pydantic puts a union's member, such as dict[str,str], into the place of the error.
        key = ".".join(str(part) for part in first_error["loc"] if "[" not in str(part))
        rule = first_error["msg"].removeprefix("Value error, ")
        if first_error["type"] == "tuple_type":
            # pydantic's message speaks of a tuple, which YAML does not have.
            rule = "it must be a list, such as [a, b]"
        raise UserError(f"nemo_grpo.task.{key}={first_error['input']!r}: {rule}") from error


def _refuse_unknown_keys(section: Mapping[str, Any], name: str, config: type[TaskConfig]) -> None:
    """Refuse keys of another task, which a recipe often inherits, and misspelt ones."""
    for key in section:
        if key in config.model_fields:
            continue
        hint = did_you_mean(str(key), config.model_fields)
        owners = [task_name for task_name, task in TASKS.items() if key in task.model_fields]
        if owners:
            hint = (
                f", but for {', '.join(owners)}; ~nemo_grpo.task.{key} removes an inherited one, "
                "_override_: true in the section all of them"
            )
        raise UserError(f"unknown key nemo_grpo.task.{key} for task {name!r}{hint}")
