"""Kinds of GPU and their peaks, from `hardware.yaml`; more come from a file of the user's."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from nemo_grpo.support.errors import UserError, did_you_mean, reading


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU; rates are the vendor's peaks, per GPU, dense and in one direction.

    Attributes: memory_bytes: as nvidia-smi states it.
                bf16_flops, fp8_flops: matrix products, FLOP/s; no FP8 is 0.
                memory_bandwidth: of HBM, bytes/s.
                nvlink_bandwidth: to another GPU of the same NVLink domain, bytes/s; PCIe where there is none.
                network_bandwidth, host_bandwidth: to another domain, and to the host's memory, bytes/s.
                nvlink_domain: GPUs that NVLink joins; those of a node where there is none.
                host_slowdown: of the CPU's own work beside an H100's, a Xeon's.
                compute_capability: 8 Ampere, 8.9 Ada, 9 Hopper, 10 Blackwell.
    """

    memory_bytes: float
    bf16_flops: float
    fp8_flops: float
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    nvlink_domain: int = 8
    compute_capability: float = 9.0
    host_slowdown: float = 1.0


_NAMES = tuple(field.name for field in fields(Hardware))
_DEFAULTS = {field.name: field.default for field in fields(Hardware) if field.default is not MISSING}


def read_hardware(path: Path, known: Mapping[str, Hardware]) -> dict[str, Hardware]:
    """A file's own kinds of GPU: a mapping of names to the attributes of `Hardware`.

    ``base: h100`` takes what the entry leaves out from a kind that is known.
    """
    names = ", ".join(_NAMES)
    with reading(f"--hardware {path}", "valid YAML", f"write name: {{{names}}}", yaml.YAMLError):
        tree = yaml.safe_load(path.read_text())
    if not isinstance(tree, Mapping) or not all(isinstance(entry, Mapping) for entry in tree.values()):
        raise UserError(f"--hardware {path}: expected name: {{{names}}}")
    return {
        str(name).lower(): _entry(f"--hardware {path}: {name}", entry, known) for name, entry in tree.items()
    }


def _entry(where: str, entry: Mapping[str, Any], known: Mapping[str, Hardware]) -> Hardware:
    base = entry.get("base")
    if base is not None and base not in known:
        raise UserError(f"{where}.base={base}: unknown{did_you_mean(str(base), known)}")
    values: dict[str, Any] = {**_DEFAULTS, **(asdict(known[base]) if base else {}), **entry}
    values.pop("base", None)
    for key, value in values.items():
        if key not in _NAMES:
            raise UserError(f"{where}.{key}: unknown{did_you_mean(key, _NAMES)}")
        try:
            values[key] = int(value) if key == "nvlink_domain" else float(value)
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"{where}.{key}={value} is not a number; write it like 3.35e12") from None
        if not (values[key] > 0 or (key == "fp8_flops" and values[key] == 0)):
            raise UserError(f"{where}.{key}={value} must be above 0")
    if missing := [name for name in _NAMES if name not in values]:
        raise UserError(f"{where} lacks {', '.join(missing)}; give them, or base: h100")
    return Hardware(**values)


HARDWARE = read_hardware(Path(__file__).with_name("hardware.yaml"), {})


def hardware_of(gpu: str, file: Path | None = None) -> Hardware:
    """A kind of GPU by its name."""
    known = HARDWARE | (read_hardware(file, HARDWARE) if file else {})
    if gpu not in known:
        raise UserError(
            f"--gpu {gpu}: unknown{did_you_mean(gpu, known)}; `nemo-grpo plan --hardware FILE` takes others"
        )
    return known[gpu]
