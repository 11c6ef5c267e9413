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

    Attributes:
        memory_bytes: memory as nvidia-smi states it.
        bf16_flops: BF16 matrix products, FLOP/s.
        fp8_flops: FP8 matrix products, FLOP/s; 0: no FP8.
        memory_bandwidth: bandwidth of HBM, bytes/s.
        nvlink_bandwidth: bandwidth to a GPU of the same NVLink domain, bytes/s; without NVLink that of PCIe.
        network_bandwidth: bandwidth to a GPU of another domain, bytes/s.
        host_bandwidth: bandwidth to the host's memory, bytes/s.
        nvlink_domain: number of GPUs joined by NVLink; without NVLink the number of GPUs of a node.
        compute_capability: 8 for Ampere, 8.9 for Ada, 9 for Hopper, 10 for Blackwell.
        host_slowdown: time that the CPU takes for its own work, relative to the Xeon of an H100 node.
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


def read_hardware(path: Path, catalogue: Mapping[str, Hardware]) -> dict[str, Hardware]:
    """Read a file of kinds of GPU: a mapping of names to the attributes of `Hardware`.

    With ``base: h100`` an entry takes missing attributes from a kind of the catalogue.
    """
    names = ", ".join(_NAMES)
    with reading(f"--hardware {path}", "valid YAML", f"write name: {{{names}}}", yaml.YAMLError):
        tree = read_yaml(path)
    if not isinstance(tree, Mapping) or not all(isinstance(entry, Mapping) for entry in tree.values()):
        raise UserError(f"--hardware {path}: expected name: {{{names}}}")
    return {
        str(name).lower(): _entry(f"--hardware {path}: {name}", entry, catalogue)
        for name, entry in tree.items()
    }


def _entry(place: str, entry: Mapping[str, Any], catalogue: Mapping[str, Hardware]) -> Hardware:
    """Build a kind of GPU from its attributes, and from those of the kind that it names as its base."""
    base = entry.get("base")
    if base is not None and base not in catalogue:
        raise UserError(f"{place}.base={base}: unknown{did_you_mean(str(base), catalogue)}")
    values: dict[str, Any] = dict(_DEFAULTS)
    if base:
        values |= asdict(catalogue[base])
    values |= entry
    values.pop("base", None)
    for key, value in values.items():
        values[key] = _number(place, key, value)
    missing_names = [name for name in _NAMES if name not in values]
    if missing_names:
        raise UserError(f"{place} lacks {', '.join(missing_names)}; give them, or base: h100")
    return Hardware(**values)


def _number(place: str, key: str, value: Any) -> float:
    if key not in _NAMES:
        raise UserError(f"{place}.{key}: unknown{did_you_mean(key, _NAMES)}")
    try:
        # YAML reads 3.35e12 without a sign as a string; float() takes both.
        number = int(value) if key == "nvlink_domain" else float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{place}.{key}={value} is not a number; write it like 3.35e12") from None
    is_absent_fp8 = key == "fp8_flops" and number == 0
    # `not (number > 0)` and no `number <= 0`, so that NaN is refused.
    if not (number > 0 or is_absent_fp8):
        raise UserError(f"{place}.{key}={value} must be above 0")
    return number


HARDWARE = read_hardware(Path(__file__).with_name("hardware.yaml"), {})


CPU = "cpu"
"""Name of this machine's CPUs, on which the embedded engine can train."""


def this_machine() -> Hardware:
    """Describe this machine by its memory. All rates are 0, because no times are predicted on CPUs."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(num_bytes, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def hardware_of(gpu: str, file: Path | None = None) -> Hardware:
    """Look up a kind of GPU by its name."""
    if gpu == CPU:
        return this_machine()
    catalogue = dict(HARDWARE)
    if file is not None:
        catalogue |= read_hardware(file, HARDWARE)
    if gpu not in catalogue:
        hint = did_you_mean(gpu, catalogue)
        raise UserError(f"--gpu {gpu}: unknown{hint}; `nemo-grpo plan --hardware FILE` takes others")
    return catalogue[gpu]


@dataclass(frozen=True)
class Efficiency:
    """Fractions of a peak, and fixed times in seconds.

    Attributes:
        matrix: share of peak FLOP/s that dense matrix products reach in training and scoring.
        grouped: share of peak FLOP/s that the experts' products reach.
        memory: share of HBM's bandwidth that decoding reaches.
        link: share of the bandwidth of NVLink and of the network that collectives reach.
        layer: least seconds of a dense layer's kernels for one microbatch in one direction.
        expert_layer: the same for a layer with experts: routing, permutation, launches.
        decode: fixed seconds of a decoding iteration: scheduling, sampling, launches.
        hop: least seconds of an all-reduce inside an NVLink domain.
        far_hop: least seconds of an all-reduce across domains.
        tensor: seconds to hand one tensor of the Hugging Face model to the rollout engines.
        refit: seconds to put engines to sleep and wake them, where they share the training GPUs.
        routes: share of a decoding batch's tokens whose experts are independent of the others'.
        step: seconds per step for data, rewards and logging.
        sample: additional seconds for these, per response.
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

    Attributes:
        what: name of the compared steps in a sentence.
        num_steps: number of the compared steps.
        median: median of |predicted / published - 1|.
        worst: largest |predicted / published - 1|.
        low: lower end of the prediction interval, as a factor of the prediction.
        high: upper end of the prediction interval, as a factor of the prediction.
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


# (name in a sentence, number of steps, median, worst, low, high, covered), as `--errors` prints them.
PUBLISHED = {
    "h100": PredictionError("published steps on H100", 26, 0.106, 0.299, 0.77, 1.29, 0.846),
    "gb200": PredictionError("published steps on GB200", 18, 0.23, 0.564, 0.697, 2.3, 0.611),
}
"""Errors on step times that NeMo-RL published (`benchmarks/plan_vs_published.py --errors`).

Each step is predicted by constants that were fitted on the steps of the other models."""

OTHER = PredictionError("published steps, none of them on such GPUs", 44, 0.145, 0.564, 0.697, 2.3, 0.864)
"""Errors on the published steps of all kinds of GPU together, for kinds without steps of their own."""
