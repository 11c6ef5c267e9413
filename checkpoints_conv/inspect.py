"""Summary of a checkpoint folder, from headers and metadata."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    """Description of a folder.  Attributes: facts: (label, value).  tensors: (name, shape, dtype, bytes)."""

    folder: Path
    facts: list[tuple[str, str]]
    tensors: list[tuple[str, tuple[int, ...], Dtype, int]]


def summarize(path: Path) -> Summary:
    """Describe a Hugging Face folder or a Megatron checkpoint; every file is checked for its length."""
    if next(path.glob("*.safetensors"), None) is not None or (path / "config.json").exists():
        return _hf(path)
    return _megatron(path)


def _hf(path: Path) -> Summary:
    weights = SafetensorsFolder(path, decodes=False)
    tensors = [(name, one.shape, one.dtype, one.num_bytes) for name, one in sorted(weights.tensors.items())]
    facts = [("format", "Hugging Face safetensors"), ("files", str(len(weights.files))), *_sizes(tensors)]
    if (path / "config.json").exists():
        config = hf_config(path)
        names = config.get("architectures")
        facts.append(("architecture", ", ".join(map(str, names)) if isinstance(names, list) else "unknown"))
        try:
            family_for(config)
            facts.append(("convertible", "yes"))
        except UserError as error:
            facts.append(("convertible", f"no: {error}"))
    weights.close()
    facts.append((SHA256SUMS, "yes" if (path / SHA256SUMS).exists() else "no"))
    return Summary(path, facts, tensors)


def _megatron(path: Path) -> Summary:
    reader = TorchDistReader(path)
    weights = reader.weights
    tensors = [(name, key.shape, key.dtype, key.num_bytes) for name, key in sorted(weights.items())]
    rest = [key.num_bytes for name, key in reader.keys.items() if name not in weights]
    chunks = sum(len(key.chunks) for key in weights.values())
    facts = [
        ("format", "Megatron torch_dist"),
        ("folder", str(reader.folder)),
        ("chunks", str(chunks)),
        *_sizes(tensors),
        ("optimizer and other state", f"{len(rest)} tensors, {sum(rest) / 1e9:.3f} GB"),
        (RUN_CONFIG, "yes" if (reader.folder / RUN_CONFIG).exists() else "no"),
    ]
    reader.close()
    return Summary(reader.folder, facts, tensors)


def _sizes(tensors: Iterable[tuple[str, tuple[int, ...], Dtype, int]]) -> list[tuple[str, str]]:
    tensors = list(tensors)
    dtypes = Counter(str(dtype).removeprefix("torch.") for _, _, dtype, _ in tensors)
    num_parameters = sum(math.prod(shape) for _, shape, _, _ in tensors)
    return [
        ("tensors", str(len(tensors))),
        ("parameters", f"{num_parameters:,}"),
        ("size", f"{sum(size for *_, size in tensors) / 1e9:.3f} GB"),
        ("dtypes", ", ".join(f"{dtype} x {count}" for dtype, count in sorted(dtypes.items()))),
    ]
