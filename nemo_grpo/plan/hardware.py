"""Kinds of GPU: their peaks, from `hardware.yaml` or a user's file, and the fractions that real runs reach.

`benchmarks/plan_vs_published.py --fit` fits the fractions on published step times, `--errors` prints the
values of `PredictionError`.
"""

import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from nemo_grpo.support.errors import UserError, did_you_mean, reading
from nemo_grpo.support.files import read_yaml


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU; rates are the vendor's peaks, per GPU, dense and in one direction.

    Attributes: memory_bytes: as nvidia-smi states it.
                bf16_flops, fp8_flops: matrix products, FLOP/s; no FP8 is 0.
                memory_bandwidth: of HBM, bytes/s.
                nvlink_bandwidth: to another GPU of the same NVLink domain, bytes/s; PCIe where there is none.
                network_bandwidth, host_bandwidth: to another domain, and to the host's memory, bytes/s.
                nvlink_domain: GPUs joined by NVLink; those of a node where there is none.
                host_slowdown: time of the CPU's own work, relative to the Xeon of an H100 node.
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
    """Read a file of kinds of GPU: a mapping of names to the attributes of `Hardware`.

    With ``base: h100`` an entry takes missing attributes from a known kind.
    """
    names = ", ".join(_NAMES)
    with reading(f"--hardware {path}", "valid YAML", f"write name: {{{names}}}", yaml.YAMLError):
        tree = read_yaml(path)
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


CPU = "cpu"
"""Name of this machine's CPUs, on which the embedded engine can train."""


def this_machine() -> Hardware:
    """Return this machine's memory; nothing else of it is planned."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(num_bytes, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def hardware_of(gpu: str, file: Path | None = None) -> Hardware:
    """Look up a kind of GPU by its name."""
    if gpu == CPU:
        return this_machine()
    known = HARDWARE | (read_hardware(file, HARDWARE) if file else {})
    if gpu not in known:
        raise UserError(
            f"--gpu {gpu}: unknown{did_you_mean(gpu, known)}; `nemo-grpo plan --hardware FILE` takes others"
        )
    return known[gpu]


@dataclass(frozen=True)
class Efficiency:
    """Fractions of a peak, and fixed times in seconds.

    Attributes: matrix: dense matrix products in training and scoring, of peak FLOP/s.
                grouped: the experts' products, of peak FLOP/s.
                memory: HBM bandwidth while decoding.
                link: NVLink and network bandwidth in collectives.
                layer: least time of a layer's kernels for one microbatch and one direction, dense.
                expert_layer: the same with experts: routing, permutation, launches.
                decode: a decoding iteration's fixed time: scheduling, sampling, launches.
                hop, far_hop: an all-reduce's least time inside an NVLink domain, and across domains.
                tensor: handing one tensor of the Hugging Face model to the rollout engines.
                refit: putting engines to sleep and waking them, where they share the training GPUs.
                routes: share of a decoding batch's tokens whose experts are independent of the others'.
                step: data, rewards and logging of a step.
                sample: the same, per response.
    """

    matrix: float = 0.495
    grouped: float = 0.193
    memory: float = 0.731
    link: float = 0.594
    layer: float = 0.0003
    expert_layer: float = 0.00499
    decode: float = 0.006
    hop: float = 1.54e-05
    far_hop: float = 9.35e-05
    tensor: float = 0.000499
    refit: float = 3.2
    routes: float = 0.392
    step: float = 3.36
    sample: float = 0.00105


FITTED = Efficiency()


@dataclass(frozen=True)
class PredictionError:
    """Error of predicted step times on one kind of GPU, against published ones.

    Attributes: what: the steps, for a sentence.  num_steps: compared.
                median, worst: of |predicted / published - 1|.
                low, high: ends of the prediction interval, as factors of the prediction.
                covered: share of steps inside an interval fitted on the other models' steps.
    """

    what: str
    num_steps: int
    median: float
    worst: float
    low: float
    high: float
    covered: float

    def around(self, seconds: float) -> tuple[float, float]:
        """Compute the interval of a predicted time."""
        return self.low * seconds, self.high * seconds


PUBLISHED = {
    "h100": PredictionError("published steps on H100", 26, 0.106, 0.299, 0.77, 1.29, 0.846),
    "gb200": PredictionError("published steps on GB200", 18, 0.23, 0.564, 0.697, 2.3, 0.611),
}
"""Errors on NeMo-RL's steps, each predicted by constants fitted without its model
(`benchmarks/plan_vs_published.py --errors`)."""

OTHER = PredictionError("published steps, none of them on such GPUs", 44, 0.145, 0.564, 0.697, 2.3, 0.864)
"""Errors on the steps of all GPUs together, for GPUs without published steps."""
