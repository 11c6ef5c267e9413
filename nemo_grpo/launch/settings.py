"""Recipe settings that a job's shell scripts need."""

import shlex
from pathlib import Path

from nemo_grpo.recipe import Recipe


def shell_settings(recipe: Recipe) -> str:
    """Assignments that a shell can source: where the run's folders are, GPUs per node, the starting model."""
    values = {
        "RUN_DIR": recipe.run_dir.absolute(),
        "CHECKPOINT_DIR": recipe.checkpoint_dir.absolute(),
        "SAVES": "yes" if recipe.checkpointing.enabled else "",
        "GPUS_PER_NODE": recipe.cluster.gpus_per_node,
        "NUM_NODES": recipe.cluster.num_nodes,
        "TARGET": recipe.nemo_grpo.target,
        "MODEL": folder_of(recipe.policy.model_name or ""),
        "LORA": "merge" if recipe.policy.megatron_cfg.lora_in_use else "",
    }
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def folder_of(model: str) -> str:
    """Local folder of a Hugging Face hub model; returned unchanged if it is a folder or not downloaded."""
    if not model or Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(model, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return model
