"""Exports of a rehearsal's checkpoint by the converters and by Megatron-Bridge, and their comparison.

``python -m nemo_grpo.rehearsal.export MODEL CHECKPOINT OUTPUT`` exports by Bridge, in a process of its own
because Bridge needs a rehearsal's hooks.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from nemo_grpo.recipe import Recipe
from nemo_grpo.rehearsal import vision
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, run_python


def conversion_of(recipe: Recipe, checkpoint: Path, output: Path, base: Path) -> list[str]:
    """List the arguments of Python that convert a checkpoint; adapters are merged into ``base``."""
    arguments = ["-m", "checkpoints_conv", "megatron-to-hf", "--megatron-checkpoint", str(checkpoint)]
    arguments += ["--hf-config", str(checkpoint / "policy" / "tokenizer"), "--output", str(output), "--force"]
    if recipe.policy.megatron_cfg.lora_in_use:
        arguments += ["--lora", "merge", "--base", str(base)]
    return arguments


def convert(rehearsal: Rehearsal, checkpoint: Path, name: str = "hf") -> Path:
    """Export a checkpoint with the converters to the rehearsal's folder ``name``."""
    output = rehearsal.folder / name
    arguments = conversion_of(rehearsal.small, checkpoint, output, rehearsal.model.folder)
    with rehearsal.timed("conversion"):
        run_python(rehearsal, arguments, "conversion.log")
    return output


def bridges_export(rehearsal: Rehearsal, checkpoint: Path) -> Path:
    """Export a checkpoint with Megatron-Bridge, which cannot export adapters."""
    output = rehearsal.folder / "hf-of-bridge"
    (weights,) = (checkpoint / "policy" / "weights").glob("iter_*")
    folders = [str(rehearsal.model.folder), str(weights), str(output)]
    with rehearsal.timed("Bridge's export"):
        run_python(rehearsal, ["-m", __name__, *folders], "bridge.log")
    return output


def load(folder: Path, dtype: Any = "auto") -> Any:
    """Load a Hugging Face folder's model.

    Args:
        folder: the model's.
        dtype: torch's, or "auto": as it is stored.
    """
    from transformers import AutoConfig

    model = vision.model_class(AutoConfig.from_pretrained(folder))
    return model.from_pretrained(folder, dtype=dtype).eval()


def compare_folders(converted: Path, bridges: Path) -> str:
    """Check that the converters' folder and Bridge's hold the same model, bit for bit."""
    import torch

    model = load(converted)
    bridges_model = load(bridges)
    weights = model.state_dict()
    bridges_weights = bridges_model.state_dict()
    if set(weights) != set(bridges_weights):
        raise Failed(f"other names than Bridge's: {sorted(set(weights) ^ set(bridges_weights))[:5]}")
    different = [name for name in weights if not torch.equal(weights[name], bridges_weights[name])]
    if different:
        raise Failed(f"weights differ from Bridge's: {different[:5]}")
    # Any tokens will do; the first few may be special.
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        logits = model(tokens).logits
        bridges_logits = bridges_model(tokens).logits
    if not torch.equal(logits, bridges_logits):
        raise Failed("logits differ from those of Bridge's export")
    return f"{len(weights)} weights and the logits equal those of Megatron-Bridge's export, bit for bit"


def compare_with_base(converted: Path, base: Path) -> str:
    """Check that an exported weight differs from the model that training started from."""
    weights = weights_of(converted)
    base_weights = weights_of(base)
    # A name that only the export has, such as an untied head, cannot be compared.
    moved = [name for name, weight in weights.items() if not weight.equal(base_weights.get(name, weight))]
    if not moved:
        raise Failed("every exported weight equals the model that training started from")
    return f"{len(moved)} of {len(weights)} weights moved"


def weights_of(folder: Path) -> dict[str, Any]:
    """Read a folder's tensors as they are stored."""
    from safetensors.torch import load_file

    weights: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    if not weights:
        raise Failed(f"{folder} holds no weights")
    return weights


def main(model: str, checkpoint: str, output: str) -> None:
    """Export a checkpoint of NeMo-RL by Megatron-Bridge.

    Args:
        model: the folder that the run started from.
        checkpoint: ``step_N/policy/weights/iter_*``.
        output: the folder to write.
    """
    # The hooks replace megatron-core's layers once this module has been imported.
    importlib.import_module("nemo_rl.models.policy.workers.megatron_policy_worker")
    community_import = importlib.import_module("nemo_rl.models.megatron.community_import")
    community_import.export_model_from_megatron(model, checkpoint, output, model, overwrite=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
