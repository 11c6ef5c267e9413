"""NeMo-Gym: servers that make the rollouts and their rewards, out of vLLM's HTTP server.

NeMo-RL's `setup` starts them; what its own driver for them (examples/nemo_gym) does around that stands here.
"""

from typing import Any

from nemo_grpo.dotted import set_value
from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.compat import Parts
from nemo_grpo.nemorl.uses import GYM_SETTINGS, VIDEO_SETTINGS
from nemo_grpo.nemorl.versions import NEMO_GYM


def fix_frames(config: Any) -> None:
    """Give the processor, the data and vLLM the same frames of a video; before the processor is loaded.

    Args:    config: NeMo-RL's `MasterConfig`; changed.
    Raises:  UserError: this NeMo-RL does not fit.
    """
    compat.require(NEMO_GYM)
    if compat.has_name(VIDEO_SETTINGS):  # 0.7.0 has no videos
        compat.import_name(VIDEO_SETTINGS)(config.policy, config.data)


def configure(config: Any, tokenizer: Any) -> None:
    """Let vLLM serve HTTP, without stops.  Args: config: NeMo-RL's `MasterConfig`; changed."""
    compat.import_name(GYM_SETTINGS)(config, tokenizer)


def validate_on_all(config: Any, problems: Any) -> None:
    """Let every validation take the whole data set at once, as NeMo-Gym's data is to be used as it is."""
    if problems is not None:
        for key in ("grpo.max_val_samples", "grpo.val_batch_size"):
            set_value(config, key, len(problems))


def environments(parts: Parts) -> list[dict[str, Any]]:
    """{task: environment} of training and validation: the one that `setup` started, by NeMo-RL's name."""
    return [{"nemo_gym": parts.nemo_gym}] * 2
