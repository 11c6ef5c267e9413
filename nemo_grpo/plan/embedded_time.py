"""Seconds of one step of the embedded engine on a CPU, phase by phase.

Every phase is its matrix products at the machine's rate for so many rows, what it moves at the machine's
bandwidth, and its operations at the least time of one. A prompt is computed once for all of its responses
(`sampling.decoder`, `engine.megatron.packing`), and where a step makes one update its forward pass scores.
"""

from dataclasses import dataclass, replace
from math import ceil

from nemo_grpo.families import ModelSpec
from nemo_grpo.plan.efficiency import LOCAL, Local
from nemo_grpo.plan.machine import Machine
from nemo_grpo.plan.memory import local_layer_bytes
from nemo_grpo.plan.parameters import model_parameters
from nemo_grpo.plan.rollout_time import drained
from nemo_grpo.plan.setup import Setup
from nemo_grpo.plan.step_time import StepTime
from nemo_grpo.plan.training_time import layer_flops, model_flops
from nemo_grpo.plan.workload import Workload

DRAW_BYTES = 40
"""Drawing a token, per logit: scaled logits, log-softmax, its exponential and sum in FP64, compared."""
ADAM_BYTES = 80
"""Per parameter: 18 FP32 numbers of `engine.megatron.adam`, the norm of gradients, the buffer emptied."""
ACCUMULATED_BYTES = 16
"""Per parameter and microbatch: the gradient written and read, the FP32 buffer read and written."""


@dataclass(frozen=True)
class Rank:
    """What computes: a model, its setup, the machine, and the constants."""

    shape: ModelSpec
    setup: Setup
    machine: Machine
    eff: Local = LOCAL

    def moved(self, tokens: float) -> float:
        """Seconds to move what a layer's forward pass makes, whether it is kept or computed again."""
        each = local_layer_bytes(self.shape, replace(self.setup, recompute=()))
        return self.eff.moved * tokens * each / self.machine.memory

    def forward(self, tokens: float, scores: float, *, sampling: bool = False) -> float:
        """One layer's forward pass. ``scores``: FLOPs of its attention in all."""
        products = layer_flops(self.shape, 0)[0] * tokens / self.machine.rate(tokens, sampling=sampling)
        return products + scores / self.machine.attention + self.moved(tokens)

    def head(self, tokens: float, logit_bytes: float, *, sampling: bool = False) -> float:
        """The output matrix, and what is made of the logits."""
        width, s = self.shape.vocab_size, self.shape
        product = 2 * tokens * width * s.hidden_size / self.machine.rate(tokens, sampling=sampling)
        return product + tokens * width * logit_bytes / self.machine.memory

    def iteration(self, active: float, context: float) -> float:
        """One token of ``active`` responses that hold ``context`` tokens each."""
        s, each = self.shape, self.setup.precision_bytes
        cache = active * context * 2 * s.key_value_size * each / self.machine.cache
        layer = self.forward(active, 0.0, sampling=True) + cache + self.eff.decode * self.machine.operation
        return s.num_layers * layer + self.head(active, DRAW_BYTES, sampling=True)

    def attention(self, prompts: float, responses: float, work: Workload) -> float:
        """FLOPs of one layer's attention: prompts to themselves, causally, and padded responses to both."""
        prompt, mean = work.lengths.prompt, work.lengths.mean
        pairs = prompts * prompt**2 / 2 + responses * mean * (prompt + mean)
        return 4 * self.shape.query_size * pairs


def embedded_step(
    shape: ModelSpec, setup: Setup, work: Workload, machine: Machine, eff: Local = LOCAL
) -> StepTime:
    """The time of one step on one rank."""
    rank = Rank(shape, setup, machine, eff)
    parameters, each = model_parameters(shape), setup.precision_bytes
    one_pass, backward = _passes(rank, work)
    phases = _rollout(rank, work, work.num_samples, work.num_draws)
    phases["scoring"] = work.scoring_passes * one_pass
    phases["forward and backward"] = one_pass + backward
    phases |= {"pipeline bubble": 0.0, "gradients": 0.0}  # one rank
    adam = ADAM_BYTES + (2 * each if each < 4 else 0)
    phases["optimizer"] = work.num_updates * adam * parameters / machine.memory
    phases["refit"] = 2 * each * parameters / machine.memory
    swapped = 6 * each * parameters if setup.keeps_reference else 0
    phases["swaps to the host"] = swapped / machine.memory
    phases["rewards, data, logs"] = eff.sample * machine.operation * work.num_samples * work.num_draws
    validation = _rollout(rank, work, work.val_samples, 1.0) if work.val_samples else {}
    return StepTime(
        phases=phases,
        steady=0.0,
        age=0,
        waits=False,
        validation=sum(validation.values()),
        checkpoint=(12 + each) * parameters / machine.memory,
        tokens=work.tokens,
        num_gpus=1,
        num_training_gpus=1,
        update_flops=3 * _tokens(work) * model_flops(shape, work.lengths.attended),
        peak_flops=machine.forward[-1][1],
    )


def _rollout(rank: Rank, work: Workload, samples: int, draws: float) -> dict[str, float]:
    """Batches of as many responses as the decoder takes; each ends with its longest."""
    lengths, batch = work.lengths, min(samples, rank.setup.vllm_max_sequences)
    number = samples / batch * draws
    prompts = max(batch / work.group_size, 1.0)
    tokens = prompts * lengths.prompt
    layer = rank.forward(tokens, rank.attention(prompts, 0.0, work), sampling=True)
    prefill = rank.shape.num_layers * layer + rank.head(prompts, DRAW_BYTES, sampling=True)
    decode, tail = drained(batch, lengths, lengths.longest(batch), rank.iteration)
    return {"prefill": number * prefill, "decode": number * decode, "tail": number * tail}


def _tokens(work: Workload) -> float:
    """That a forward pass computes: each prompt once."""
    return work.num_samples * (work.lengths.prompt / work.group_size + work.lengths.mean)


def _passes(rank: Rank, work: Workload) -> tuple[float, float]:
    """Seconds of a step's forward pass, and of its backward pass: two of products, twice what is moved."""
    shape, machine, eff, lengths = rank.shape, rank.machine, rank.eff, work.lengths
    groups, responses = work.num_samples / work.group_size, work.num_samples * lengths.mean
    tokens = _tokens(work)
    number = ceil(tokens / rank.setup.train_tokens)
    each = tokens / number
    scores = rank.attention(groups, work.num_samples, work) / number
    operations = eff.train * machine.operation
    layer = rank.forward(each, scores) + operations
    head = rank.head(responses / number, eff.logits)
    forward = number * (shape.num_layers * layer + head)
    products = 2 * layer_flops(shape, 0)[0] * each / machine.backward + 2 * scores / machine.attention
    head = 4 * responses / number * shape.vocab_size * shape.hidden_size / machine.backward
    head += 2 * responses / number * shape.vocab_size * eff.logits / machine.memory
    accumulated = ACCUMULATED_BYTES * model_parameters(shape) / machine.memory
    again = layer if "full" in rank.setup.recompute else 0.0
    layer = products + 2 * rank.moved(each) + 2 * operations + again
    return forward, number * (shape.num_layers * layer + head + accumulated)
