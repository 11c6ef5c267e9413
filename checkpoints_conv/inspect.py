"""Summary of a checkpoint folder, from headers and metadata."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.run_config import RUN_CONFIG
from nemo_grpo.models import family_for
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import SHA256SUMS
from nemo_grpo.support.model_folder import hf_config


@dataclass(frozen=True)
class Summary:
    """Description of a folder.

    Attributes:
        folder: folder with the files.
        values: name -> number, text, list or dictionary; ready for JSON.
        tensors: (name, shape, dtype, bytes).
    """

    folder: Path
    values: dict[str, Any]
    tensors: list[tuple[str, tuple[int, ...], Dtype, int]]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """List the values as (label, text), to be printed."""
        return [(_LABELS[name], _formatted(name, value)) for name, value in self.values.items()]

    def to_json(self, tensors: bool = False) -> dict[str, Any]:
        """Return ``values``, with a list of all tensors if ``tensors`` is True."""
        if not tensors:
            return self.values
        rows = [
            {"name": name, "shape": list(shape), "dtype": _short(dtype), "num_bytes": num_bytes}
            for name, shape, dtype, num_bytes in self.tensors
        ]
        return {**self.values, "tensors": rows}


_LABELS = {
    "format": "format",
    "folder": "folder",
    "num_files": "files",
    "num_chunks": "chunks",
    "num_tensors": "tensors",
    "num_parameters": "parameters",
    "num_bytes": "size",
    "dtypes": "dtypes",
    "other_state": "optimizer and other state",
    "architectures": "architecture",
    "convertible": "convertible",
    "has_run_config": RUN_CONFIG,
    "has_sha256sums": SHA256SUMS,
}
"""Names of values -> their labels for people."""


def _formatted(name: str, value: Any) -> str:
    """Format a value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "num_parameters":
        return f"{value:,}"
    if name == "num_bytes":
        return f"{value / 1e9:.3f} GB"
    if name == "dtypes":
        return ", ".join(f"{dtype} x {count}" for dtype, count in value.items())
    if name == "other_state":
        return f"{value['num_tensors']} tensors, {value['num_bytes'] / 1e9:.3f} GB"
    if name == "architectures":
        return ", ".join(value) or "unknown"
    if name == "convertible":
        return f"no: {value}"
    return str(value)


def summarize(path: str | Path) -> Summary:
    """Describe a Hugging Face folder or a Megatron checkpoint, and check the length of every file.

    Raises: UserError: the folder is neither, or damaged.
    """
    path = Path(path)
    if any(path.glob("*.safetensors")) or (path / "config.json").exists():
        return _hf(path)
    return _megatron(path)


def _hf(path: Path) -> Summary:
    # The files are described as they are; FP8 and MXFP4 are decoded only for a conversion.
    weights = SafetensorsFolder(path, decodes=False)
    tensors = [
        (name, stored.shape, stored.dtype, stored.num_bytes)
        for name, stored in sorted(weights.tensors.items())
    ]
    values = {"format": "Hugging Face safetensors", "num_files": len(weights.files), **_sizes(tensors)}
    if (path / "config.json").exists():
        config = hf_config(path)
        names = config.get("architectures")
        values["architectures"] = list(map(str, names)) if isinstance(names, list) else []
        try:
            family_for(config)
            values["convertible"] = True
        except UserError as error:
            values["convertible"] = str(error)
    weights.close()
    values["has_sha256sums"] = (path / SHA256SUMS).exists()
    return Summary(path, values, tensors)


def _megatron(path: Path) -> Summary:
    reader = TorchDistReader(path)
    weights = reader.weights
    tensors = [(name, key.shape, key.dtype, key.num_bytes) for name, key in sorted(weights.items())]
    other_sizes = [key.num_bytes for name, key in reader.keys.items() if name not in weights]
    values = {
        "format": "Megatron torch_dist",
        "folder": str(reader.folder),
        "num_chunks": sum(len(key.chunks) for key in weights.values()),
        **_sizes(tensors),
        "other_state": {"num_tensors": len(other_sizes), "num_bytes": sum(other_sizes)},
        "has_run_config": (reader.folder / RUN_CONFIG).exists(),
    }
    reader.close()
    return Summary(reader.folder, values, tensors)


def _sizes(tensors: Sequence[tuple[str, tuple[int, ...], Dtype, int]]) -> dict[str, Any]:
    dtypes = Counter(_short(dtype) for _, _, dtype, _ in tensors)
    return {
        "num_tensors": len(tensors),
        "num_parameters": sum(math.prod(shape) for _, shape, _, _ in tensors),
        "num_bytes": sum(size for *_, size in tensors),
        "dtypes": dict(sorted(dtypes.items())),
    }


def _short(dtype: Dtype) -> str:
    return str(dtype).removeprefix("torch.")
