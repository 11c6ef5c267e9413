"""The data sets, processors and environments that a recipe of NeMo-RL's names, set up by NeMo-RL."""

from pathlib import Path
from typing import Any

from nemo_grpo.errors import UserError, first_line
from nemo_grpo.nemorl import compat, nemo_gym
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.versions import OWN_DATA
from nemo_grpo.recipe import host

PROMPT_FILES = ("prompt_file", "system_prompt_file")

Data = tuple[Any, Any, dict[str, Any], dict[str, Any]]


def find_prompt_files(config: Any, repository: Path) -> None:
    """Replace prompts' paths by those of `host.prompt_file`.

    Raises: UserError: see there.
    """
    sections = [config.data.get(split) for split in ("train", "validation", "default")]
    listed = [one for section in sections for one in (section if isinstance(section, list) else [section])]
    for section in filter(None, listed):
        for name in PROMPT_FILES:
            if section.get(name) is not None:
                section[name] = str(host.prompt_file(section[name], repository))


def set_up_data(run: ClusterRun, encoder: Any) -> Data:
    """Read the data sets and start the environments.

    Args:    encoder: the tokenizer, or the processor for data with images.
    Returns: (data, validation data, {task: environment}, {task: environment}), as NeMo-RL's trainers take it;
             no environments yet where NeMo-Gym makes the rollouts.
    Raises:  UserError: a data set cannot be read, or this NeMo-RL does not fit.
    """
    compat.require(OWN_DATA)
    config = run.master_config
    find_prompt_files(config, compat.package_folder().parent)
    further = {"is_vlm": True} if run.has_images else {}
    set_up = compat.import_name("nemo_rl.data.utils:setup_response_data")
    with_gym = run.recipe.env.should_use_nemo_gym
    try:
        data, validation, *environments = set_up(
            encoder, config.data, None if with_gym else config.env, **further
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"data: {_named(run)} cannot be read ({first_line(error)}); {REMEDY}") from error
    if with_gym:
        nemo_gym.validate_on_all(config, validation)
    training_env, validation_env = environments or ({}, {})
    return data, validation, training_env, validation_env


REMEDY = (
    "download it once where there is a network (HF_HOME on a disk that the nodes see), or name a local file: "
    "dataset_name: ResponseDataset, data_path, input_key, output_key"
)


def _named(run: ClusterRun) -> str:
    names = [str(data.get("data_path") or data.get("dataset_name")) for _, data in host.data_sets(run.recipe)]
    return ", ".join(dict.fromkeys(names))
