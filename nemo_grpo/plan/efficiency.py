"""Fractions of the vendors' peaks that real runs reach, fitted on published step times.

`benchmarks/plan_vs_published.py --fit` fits them, `--errors` prints the values of `PredictionError`.
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
class PredictionError:
    """Predicted steps of one kind of hardware beside published or measured ones.

    Attributes: what: the steps, for a sentence.  num_steps: compared.
                median, worst: of |predicted / seen - 1|.
                low, high: ends of the interval, in times of the prediction.
                covered: share of the steps between the ends that the other models' steps give.
    """

    what: str
    num_steps: int
    median: float
    worst: float
    low: float
    high: float
    covered: float

    def around(self, seconds: float) -> tuple[float, float]:
        """The interval of a predicted time."""
        return self.low * seconds, self.high * seconds


PUBLISHED = {
    "h100": PredictionError("published steps on H100", 26, 0.106, 0.299, 0.77, 1.29, 0.846),
    "gb200": PredictionError("published steps on GB200", 18, 0.23, 0.564, 0.697, 2.3, 0.611),
}
"""Steps of NeMo-RL, each predicted by constants that were fitted without its model
(`benchmarks/plan_vs_published.py --errors`)."""

OTHER = PredictionError("published steps, none of them on such GPUs", 44, 0.145, 0.564, 0.697, 2.3, 0.864)
"""The same of all GPUs together, for the others."""
