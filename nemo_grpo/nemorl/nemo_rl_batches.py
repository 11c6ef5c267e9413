"""Data sets and environments of a recipe with NeMo-RL's own data, set up by NeMo-RL.

NeMo-Gym is one of the environments: servers that sample from vLLM over HTTP and grade. NeMo-RL's `setup`
starts them; the settings that its own driver for them (examples/nemo_gym) makes are made here.
"""

from pathlib import Path
from typing import Any

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.host_api import NEMO_GYM, OWN_DATA
from nemo_grpo.recipe import host
from nemo_grpo.support.dotted import set_value
from nemo_grpo.support.errors import UserError, first_line

GYM_SETTINGS = "nemo_rl.environments.nemo_gym:setup_nemo_gym_config"
VIDEO_SETTINGS = "nemo_rl.models.generation.vllm.config:materialize_vllm_video_config"
PROMPT_FILES = ("prompt_file", "system_prompt_file")

Data = tuple[Any, Any, dict[str, Any], dict[str, Any]]


def find_prompt_files(config: Any, repository: Path) -> None:
    """Replace the paths of prompt files in the configuration by those that `host.prompt_file` finds."""
    sections: list[Any] = []
    for split in ("train", "validation", "default"):
        # A split is one data set or a list of them; its key may be absent.
        data_sets = config.data.get(split)
        sections += data_sets if isinstance(data_sets, list) else [data_sets]
    for section in sections:
        for key in PROMPT_FILES:
            if section and section.get(key) is not None:
                section[key] = str(host.prompt_file(section[key], repository))


def set_up_data(run: ClusterRun, encoder: Any) -> Data:
    """Read the data sets and start the environments.

    Args:
        run: its NeMo-RL configuration is changed: prompt files, and the validation of NeMo-Gym.
        encoder: the tokenizer, or the processor for data with images.

    Returns:
        Training data, validation data, {task: environment} of training and of validation. Both dictionaries
        are empty if NeMo-Gym makes the rollouts: NeMo-RL's `setup` starts its servers.
    """
    compat.require(OWN_DATA)
    config = run.master_config
    find_prompt_files(config, compat.package_folder().parent)
    set_up = compat.import_name("nemo_rl.data.utils:setup_response_data")
    uses_gym = run.recipe.env.should_use_nemo_gym
    env_config = None if uses_gym else config.env
    further = {"is_vlm": True} if run.has_images else {}
    try:
        data, validation, *environments = set_up(encoder, config.data, env_config, **further)
    except (OSError, ValueError, KeyError) as error:
        names = ", ".join(_data_set_names(run))
        raise UserError(f"data: {names} cannot be read ({first_line(error)}); {REMEDY}") from error
    if uses_gym and validation is not None:
        # As in NeMo-RL's driver for NeMo-Gym: a validation is one batch of all problems.
        for key in ("grpo.max_val_samples", "grpo.val_batch_size"):
            set_value(config, key, len(validation))
    # Without env_config NeMo-RL's function returns only the data.
    training_env, validation_env = environments if environments else ({}, {})
    return data, validation, training_env, validation_env


def _data_set_names(run: ClusterRun) -> list[str]:
    """Name the files or the data sets of a recipe, each once."""
    names = []
    for _, data_set in host.data_sets(run.recipe):
        path = data_set.get("data_path")
        names.append(str(path if path else data_set.get("dataset_name")))
    return list(dict.fromkeys(names))


def set_names(run: ClusterRun, problems: Any) -> list[str]:
    """Return the set's name of each validation problem that NeMo-RL reads; [] if there is only one set."""
    if not isinstance(run.recipe.data.validation, list) or run.recipe.env.should_use_nemo_gym:
        return []
    num_problems = min(len(problems), run.recipe.grpo.num_val_problems)
    return [str(problems.dataset[index]["task_name"]) for index in range(num_problems)]


REMEDY = (
    "download it once where there is a network (HF_HOME on a disk that the nodes see), or name a local file: "
    "dataset_name: ResponseDataset, data_path, input_key, output_key"
)


def configure_gym(config: Any, tokenizer: Any) -> None:
    """Let vLLM serve over HTTP, without stop texts or stop tokens, which NeMo-Gym does not support.

    Args:
        config: NeMo-RL's `MasterConfig`; changed.
        tokenizer: the model's.
    """
    compat.import_name(GYM_SETTINGS)(config, tokenizer)


def fix_video_frames(config: Any) -> None:
    """Give the processor, the data and vLLM the same frames of a video.

    Call it before the processor is loaded, which reads the setting.

    Args:
        config: NeMo-RL's `MasterConfig`; changed.
    """
    compat.require(NEMO_GYM)
    # 0.7.0 has no videos.
    if compat.has_name(VIDEO_SETTINGS):
        compat.import_name(VIDEO_SETTINGS)(config.policy, config.data)
