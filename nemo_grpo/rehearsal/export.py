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
    """List the arguments of Python that convert a checkpoint, adapters merged into ``base``."""
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
    with rehearsal.timed("Bridge's export"):
        folders = map(str, (rehearsal.model.folder, weights, output))
        run_python(rehearsal, ["-m", __name__, *folders], "bridge.log")
    return output


def load(folder: Path, dtype: Any = "auto") -> Any:
    """Load a Hugging Face folder's model.  Args: dtype: auto: as it is stored."""
    from transformers import AutoConfig

    model = vision.model_class(AutoConfig.from_pretrained(folder))
    return model.from_pretrained(folder, dtype=dtype).eval()


def compare_folders(ours: Path, theirs: Path) -> str:
    """Check that two Hugging Face folders hold the same model, bit for bit."""
    import torch

    models = [load(path) for path in (ours, theirs)]
    mine, other = (model.state_dict() for model in models)
    if set(mine) != set(other):
        raise Failed(f"other names than Bridge's: {sorted(set(mine) ^ set(other))[:5]}")
    if different := [name for name in mine if not torch.equal(mine[name], other[name])]:
        raise Failed(f"weights differ from Bridge's: {different[:5]}")
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    if not torch.equal(*logits):
        raise Failed("logits differ from those of Bridge's export")
    return f"{len(mine)} weights and the logits equal those of Megatron-Bridge's export, bit for bit"


def compare_with_base(ours: Path, base: Path) -> str:
    """Check that training has moved the export."""
    mine, before = weights_of(ours), weights_of(base)
    moved = [name for name, weight in mine.items() if not weight.equal(before.get(name, weight))]
    if not moved:
        raise Failed("every exported weight equals the model that training started from")
    return f"{len(moved)} of {len(mine)} weights moved"


def weights_of(folder: Path) -> dict[str, Any]:
    """Read a folder's tensors as they are stored."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        raise Failed(f"{folder} holds no weights")
    return found


def main(model: str, checkpoint: str, output: str) -> None:
    """Export a checkpoint of NeMo-RL by Megatron-Bridge.

    Args: model: the folder that the run started from.  checkpoint: ``step_N/policy/weights/iter_*``.
    """
    importlib.import_module("nemo_rl.models.policy.workers.megatron_policy_worker")  # and its replacements
    community_import = importlib.import_module("nemo_rl.models.megatron.community_import")
    community_import.export_model_from_megatron(model, checkpoint, output, model, overwrite=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
