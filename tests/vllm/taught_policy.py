"""A warm start's policy, made without megatron-core, which vLLM's environment does not have."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from nemo_grpo.engine.demonstrations import demonstrated
from nemo_grpo.engine.warm_start import build_model
from nemo_grpo.engine.warm_start_tokenizer import build_tokenizer
from nemo_grpo.recipe.own import WarmStart
from nemo_grpo.rehearsal.model import teach
from nemo_grpo.tasks import Prompt, Task
from nemo_grpo.tasks.base import stream


def taught(config: WarmStart, task: Task, prompt: Prompt, folder: Path) -> Path:
    """The policy in a folder, trained by transformers."""
    tokenizer = build_tokenizer(task, config.vocab_size, config.seed)
    policy = build_model(config, tokenizer)
    limit, key = config.max_position_embeddings, "max_position_embeddings"
    lessons = (
        demonstrated(
            tokenizer, task, prompt, task.train_problem(i, 1), stream("lesson", i), limit=limit, key=key
        )
        for i in count()
    )
    teach(policy, lessons, tokenizer.pad_token_id, config.num_steps, config.batch_size)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
