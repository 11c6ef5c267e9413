"""Record of Megatron-Bridge's names and settings of every family, for the contract tests.

    PYTHONPATH=.:tests .venv-nemo-rl/bin/python scripts/record_megatron_bridge.py

Writes tests/contract/megatron_bridge-<version>.json: for each tiny model (`tests/small_models.py`) the
Hugging Face tensors of each Megatron tensor, and the provider's values of the keys of `model_section`.
"""

import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "nemo_grpo" / "rehearsal" / "site"))

import rehearsal_hooks  # noqa: E402


def main() -> None:
    """Write the record."""
    # Before Megatron-Bridge is imported, which needs CUDA's libraries: the hooks stand in for them.
    rehearsal_hooks.install()
    importlib.import_module("megatron.core")
    importlib.import_module("nemo_grpo.rehearsal.megatron").prepare()
    from small_models import FAMILIES

    record = {name: model_of(name) for name in FAMILIES}
    file = ROOT / "tests" / "contract" / f"megatron_bridge-{version('megatron-bridge')}.json"
    file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def model_of(name: str) -> dict[str, Any]:
    """Record a model.

    Returns:
        tensors: Megatron's pattern -> Hugging Face's.
        provider: plain values.
    """
    from megatron.bridge import AutoBridge
    from small_models import auto_class, small_config

    from checkpoints_conv.formats.dtypes import DTYPES
    from checkpoints_conv.run_config import model_section
    from nemo_grpo.models import family_for

    config = small_config(name, num_hidden_layers=4)
    config.architectures = [type(auto_class(config).from_config(config)).__name__]
    bridge = AutoBridge.from_hf_config(config)
    provider = bridge.to_megatron_provider(load_weights=False)
    values = {}
    for key in model_section(family_for(config.to_dict()), DTYPES["float32"]):
        value = plain_of(getattr(provider, key, None))
        # A provider holds functions and modules, too, which no run_config.yaml has.
        if value is not None:
            values[key] = value
    return {"tensors": tensors_of(bridge), "provider": values}


def tensors_of(bridge: Any) -> dict[str, list[str]]:
    """Return the Hugging Face names of each Megatron name."""
    names: dict[str, list[str]] = {}
    for mapping in bridge._model_bridge.mapping_registry():
        hf = mapping.hf_param
        # Several tensors of Hugging Face's may make one of Megatron's, such as query, key and value.
        names[mapping.megatron_param] = list(hf.values()) if isinstance(hf, dict) else [hf]
    return names


def plain_of(value: Any) -> Any:
    """Reduce a value to what JSON holds: numbers, texts and lists of them; None for anything else."""
    if isinstance(value, (list, tuple)):
        items = [plain_of(item) for item in value]
        return None if None in items else items
    return value if isinstance(value, (bool, int, float, str)) else None


if __name__ == "__main__":
    main()
