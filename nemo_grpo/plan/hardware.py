"""Kinds of GPU: what one of them computes, holds and moves. More come from a file."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from nemo_grpo.errors import UserError, did_you_mean, reading

MIB = 1024**2


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU; rates are the vendor's peaks, per GPU, dense and in one direction.

    Attributes: memory_bytes: as nvidia-smi states it.
                bf16_flops, fp8_flops: matrix products, FLOP/s; no FP8 is 0.
                memory_bandwidth: of HBM, bytes/s.
                nvlink_bandwidth: to another GPU of the same NVLink domain, bytes/s; PCIe where there is none.
                network_bandwidth: to another domain, bytes/s.
                host_bandwidth: to the host's memory, bytes/s.
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


HARDWARE: dict[str, Hardware] = {
    "h100": Hardware(81559 * MIB, 989e12, 1979e12, 3.35e12, 450e9, 50e9, 64e9),
    "h200": Hardware(143771 * MIB, 989e12, 1979e12, 4.8e12, 450e9, 50e9, 64e9),
    "b200": Hardware(183359 * MIB, 2250e12, 4500e12, 8.0e12, 900e9, 50e9, 64e9, compute_capability=10.0),
    "gb200": Hardware(
        189471 * MIB, 2500e12, 5000e12, 8.0e12, 900e9, 50e9, 450e9, 72, 10.0, host_slowdown=2.0
    ),
    "a100": Hardware(81920 * MIB, 312e12, 0.0, 2.039e12, 300e9, 25e9, 32e9, compute_capability=8.0),
    "h800": Hardware(81559 * MIB, 989e12, 1979e12, 3.35e12, 200e9, 50e9, 64e9),
    "h20": Hardware(97871 * MIB, 148e12, 296e12, 4.0e12, 450e9, 50e9, 64e9),
    "l40s": Hardware(46068 * MIB, 362e12, 733e12, 0.864e12, 32e9, 25e9, 32e9, compute_capability=8.9),
}
"""Dense peaks; a link's rate in one direction is half of what a data sheet states. One 400 Gbit/s adapter per
GPU; A100 and L40S, one of 200 Gbit/s.

- H100 SXM5, H200 SXM, A100 80 GB SXM4, B200 at 1000 W, GB200 NVL72 at 1200 W: NVIDIA's data sheets, as quoted
  at glennklockwood.com/garden/processors; memory as nvidia-smi shows it.
- L40S: the data sheet as sellers quote it (mullet.se): 362 TFLOPS, FP8 733, 864 GB/s, PCIe 4, no NVLink.
- H800 SXM5 (an H100 with NVLink of 400 GB/s) and H20 (148 TFLOPS, FP8 296, 96 GB at 4.0 TB/s, NVLink of
  900 GB/s): no data sheet was found; reviewers agree (philisun.com, willitrunai.com).
- host_slowdown of GB200: a Grace CPU launches a linear layer in 37 us, a DGX H100's Xeon in 13 (Transformer
  Engine's issue 2053); only a part of the fixed times are launches, and 2 is what GB200's steps of NeMo-RL
  v0.5 and v0.6 show.

Step times of A100 and L40S were not compared with published ones, those of H200, H20 and H800 with few.
"""


def read_hardware(path: Path) -> dict[str, Hardware]:
    """A file's own kinds of GPU: a mapping of names to the attributes of `Hardware`.

    ``base: h100`` takes what the entry leaves out from a kind that is known.

    Raises: UserError: no such file, an unknown attribute, one that is missing or not positive.
    """
    with reading(f"--hardware {path}", "valid YAML", f"write name: {{{', '.join(_NAMES)}}}", yaml.YAMLError):
        tree = yaml.safe_load(path.read_text())
    if not isinstance(tree, Mapping) or not all(isinstance(entry, Mapping) for entry in tree.values()):
        raise UserError(f"--hardware {path}: expected name: {{{', '.join(_NAMES)}}}")
    return {str(name).lower(): _entry(f"--hardware {path}: {name}", entry) for name, entry in tree.items()}


_NAMES = tuple(field.name for field in fields(Hardware))
_DEFAULTS = {field.name: field.default for field in fields(Hardware) if field.default is not MISSING}


def _entry(where: str, entry: Mapping[str, Any]) -> Hardware:
    base = entry.get("base")
    if base is not None and base not in HARDWARE:
        raise UserError(f"{where}.base={base}: unknown{did_you_mean(str(base), HARDWARE)}")
    values: dict[str, Any] = {name: getattr(HARDWARE[base], name) for name in _NAMES} if base else {}
    values = _DEFAULTS | values | {key: value for key, value in entry.items() if key != "base"}
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


def hardware_of(gpu: str, file: Path | None = None) -> Hardware:
    """A kind of GPU by its name.

    Raises: UserError: neither in the table nor in the file.
    """
    known = HARDWARE | (read_hardware(file) if file else {})
    if gpu not in known:
        raise UserError(
            f"--gpu {gpu}: unknown{did_you_mean(gpu, known)}; `nemo-grpo plan --hardware FILE` takes others"
        )
    return known[gpu]
