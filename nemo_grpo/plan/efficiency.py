"""What of the vendors' peaks real runs reach: a few constants, fitted on published step times.

`benchmarks/plan_vs_published.py --fit` fits them; docs/plan.md shows what error they leave.
"""

from dataclasses import dataclass


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
                routes: of a decoding batch's tokens, the share whose experts are independent of the others'.
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
class Local:
    """The embedded engine on a CPU; the machine's own rates are measured (`plan.machine`).

    `benchmarks/plan_vs_this_machine.py --fit` fits them on real runs.

    Attributes: moved: bytes that a layer's forward pass moves beside its products, in times of what it keeps
                    for the backward pass.
                logits: bytes moved per logit of a forward pass.
                decode, train: operations of a layer in a decoding step, and in a microbatch's forward pass.
                sample: operations to decode, score and record a response.
    """

    moved: float = 10.4
    logits: float = 93.9
    decode: float = 48.5
    train: float = 280.0
    sample: float = 150.0


LOCAL = Local()
