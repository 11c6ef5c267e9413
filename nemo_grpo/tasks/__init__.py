"""Problems, their prompts and their rewards. Imports neither torch nor an engine."""

from nemo_grpo.tasks.base import Problem, Task, TaskConfig
from nemo_grpo.tasks.presets import PRESETS
from nemo_grpo.tasks.prompts import Prompt, chat_messages, encode_prompt
from nemo_grpo.tasks.registry import TASKS, parse_task

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
