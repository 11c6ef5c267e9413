"""Policy updates on one GPU in BF16 and FP8: tokens/s, MFU, peak memory, loss curves, logprob drift.

The layers have the shapes of Qwen2.5-1.5B and 7B, as many of them as fit; weights and tokens are random, the
same for both precisions. FP8 needs Transformer Engine; without it only BF16 is measured.

    python -m benchmarks.gpu_policy_update [--shape qwen2.5-1.5b] [--fp8-recipe blockwise] [--output x.json]

Floating-point operations per token of an update, once forward and twice backward, a multiply-add as two:

    3 x [ L x (2 h (q + 2 kv) + 2 q h + 6 h f + 2 q S) + 2 h V ]

h hidden, q and kv the widths of all query and key heads, f MLP, S sequence length, V vocabulary, L layers.
2 q S is causal attention: two products with S / 2 keys on average. Recomputed activations, norms and the
embedding lookup do not count. MFU is that over the time and the chip's dense BF16 rate, for FP8 too, so that
the two compare.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

BF16_RATE = {(8, 0): 312e12, (9, 0): 989e12}
"""Dense BF16 operations per second by compute capability (A100; H100, H200), by the vendor's datasheets."""

STATE_BYTES_PER_PARAMETER = 18
"""BF16 weight 2, FP32 gradient 4, FP32 main weight 4, two FP32 Adam moments 8."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with q = h: h, L, heads, key-value heads, f, V."""

    hidden: int
    num_layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool

    @property
    def kv(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices."""
        return self.hidden * (2 * self.hidden + 2 * self.kv + 3 * self.ffn)


SHAPES = {
    "qwen2.5-1.5b": Shape(1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 18944, 152064, False),
}


def update_flops_per_token(shape: Shape, length: int) -> int:
    """Compute the formula at the top of this file."""
    layer = 2 * shape.layer_parameters + 2 * shape.hidden * length
    return 3 * (shape.num_layers * layer + 2 * shape.hidden * shape.vocab)


def layers_that_fit(shape: Shape, memory_bytes: float, tokens_per_microbatch: int) -> int:
    """Estimate the most layers of the shape that leave a tenth of the memory free; at least 1."""
    num_vocabulary_matrices = 1 if shape.tied else 2
    vocabulary_parameters = num_vocabulary_matrices * shape.vocab * shape.hidden
    vocabulary_bytes = vocabulary_parameters * STATE_BYTES_PER_PARAMETER
    # BF16 logits and their gradient.
    logit_bytes = 2 * 2 * tokens_per_microbatch * shape.vocab
    # BF16 activations of one layer that the backward pass needs.
    activation_bytes_per_token = 2 * (10 * shape.hidden + 4 * shape.kv + 4 * shape.ffn)
    layer_bytes = shape.layer_parameters * STATE_BYTES_PER_PARAMETER
    layer_bytes += tokens_per_microbatch * activation_bytes_per_token
    bytes_for_layers = 0.9 * memory_bytes - vocabulary_bytes - logit_bytes
    num_layers = int(bytes_for_layers // layer_bytes)
    return max(1, min(shape.num_layers, num_layers))


@dataclass
class Measured:
    """Results in one precision: medians over the timed updates, and the losses of all updates."""

    precision: str
    num_layers: int
    tokens_per_second: float
    mfu: float | None
    peak_gib: float
    losses: list[float]
    logprobs: torch.Tensor = field(repr=False)


def make_policy(shape: Shape, fields: dict[str, Any], device: torch.device, max_length: int) -> Any:
    """Make a BF16 policy with random weights, the same for every call with this shape."""
    from transformers import Qwen2Config

    from nemo_grpo.engine.megatron.policy import MegatronPolicy
    from nemo_grpo.recipe.megatron_sections import MegatronOptimizer

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=shape.tied,
    )
    settings = MegatronOptimizer(lr=1e-5, weight_decay=0.01)
    policy = MegatronPolicy(config, settings, dtype=torch.bfloat16, device=device, config_fields=fields)
    generator = torch.Generator(device).manual_seed(0)

    def weight(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("bias"):
            return torch.zeros(size, dtype=torch.bfloat16, device=device)
        values = torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator).mul_(0.02)
        return values.add_(1) if "norm" in name else values

    shapes = policy.weights.family.hf_shapes
    policy.load_weights({name: weight(name, size) for name, size in shapes.items()}, keep_reference=False)
    return policy


def measure(
    precision: str,
    shape: Shape,
    fields: dict[str, Any],
    device: torch.device,
    *,
    num_sequences: int,
    length: int,
    micro_batch_size: int,
    num_steps: int,
) -> Measured:
    """Score once, then make ``num_steps`` updates on the same rollout; the first three are not timed."""
    from nemo_grpo import TokenBatch, build_objective
    from nemo_grpo.run.groups import Sequences

    cuda = device.type == "cuda"
    policy = make_policy(shape, fields, device, length)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocab, (num_sequences, length), generator=generator)
    sequences = Sequences(ids, torch.full((num_sequences,), length))
    logprobs, _ = policy.score(sequences, micro_batch_size=micro_batch_size, temperature=1.0)
    objective = build_objective("grpo")
    prepared = objective.prepare(
        TokenBatch(
            prev_logprobs=logprobs,
            token_mask=torch.ones(num_sequences, length - 1, dtype=torch.bool),
            sample_mask=torch.ones(num_sequences),
            rewards=(torch.arange(num_sequences) % 2).float(),
            group_ids=torch.arange(num_sequences) // 4,
        )
    )
    losses = []
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        result = policy.update(
            objective, prepared, sequences, micro_batch_size=micro_batch_size, temperature=1.0
        )
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(result.metrics["loss/total"])
    tokens_per_second = num_sequences * (length - 1) / statistics.median(seconds[3:])
    chip_rate = BF16_RATE.get(torch.cuda.get_device_capability()) if cuda else None
    mfu = None
    if chip_rate is not None:
        mfu = tokens_per_second * update_flops_per_token(shape, length) / chip_rate
    measured = Measured(
        precision=precision,
        num_layers=shape.num_layers,
        tokens_per_second=tokens_per_second,
        mfu=mfu,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        losses=losses,
        logprobs=logprobs,
    )
    print(measured, flush=True)
    return measured


def drift(bf16: torch.Tensor, fp8: torch.Tensor) -> dict[str, float]:
    """Compare FP8's logprobs with BF16's under the same weights: |difference|, and the k3 estimate of KL."""
    d = (fp8 - bf16).double()
    kl = d.exp() - d - 1
    return {"abs_mean": d.abs().mean().item(), "abs_max": d.abs().max().item(), "kl": kl.mean().item()}


def report(name: str, results: list[Measured]) -> dict[str, Any]:
    """Print one shape's table and return it."""
    table: dict[str, Any] = {}
    for result in results:
        mfu = "   -" if result.mfu is None else f"{100 * result.mfu:4.1f}"
        print(
            f"{name:13s} {result.precision:16s} {result.num_layers:2d} layers  "
            f"{result.tokens_per_second:9.0f} tokens/s  MFU {mfu} %  peak {result.peak_gib:6.1f} GiB"
        )
        # JSON holds no tensor.
        without_logprobs = replace(result, logprobs=None)  # type: ignore[arg-type]
        table[result.precision] = asdict(without_logprobs)
    bf16 = results[0]
    for fp8 in results[1:]:
        differences = drift(bf16.logprobs, fp8.logprobs)
        table[fp8.precision]["drift"] = differences
        cells = ", ".join(f"{key} {value:.2e}" for key, value in differences.items())
        print(f"  logprobs {fp8.precision} - BF16: {cells}")
    for step in range(0, len(bf16.losses), 7):
        step_losses = "  ".join(f"{result.losses[step]:10.6f}" for result in results)
        print(f"  step {step + 1:4d}  loss {step_losses}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    recipes = ["tensorwise", "delayed", "blockwise"]
    parser.add_argument("--fp8-recipe", nargs="+", default=["blockwise"], choices=recipes)
    parser.add_argument("--fp8-format", default="e4m3", choices=["e4m3", "hybrid"])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=2049, help="tokens; one less is computed")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, help="write all numbers as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_policy_update: torch finds no CUDA device; run it on a GPU host", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING)
    from nemo_grpo.engine.megatron.options import fp8_refusals, this_machine
    from nemo_grpo.recipe.megatron_sections import Megatron

    precisions: dict[str, dict[str, Any]] = {"bf16": {}}
    for recipe in arguments.fp8_recipe:
        fields = {"fp8": arguments.fp8_format, "fp8_recipe": recipe}
        cfg = {"enabled": True, **fields}
        section = Megatron.model_validate({"optimizer": {"lr": 1e-5}, "fp8_cfg": cfg})
        reasons = list(fp8_refusals(section, this_machine()))
        if reasons:
            print(f"not measured: {'; '.join(reasons)}")
        else:
            precisions[f"fp8 {recipe}"] = fields
    device = torch.device("cuda", 0)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    sizes = {"num_sequences": arguments.sequences, "length": arguments.length}
    sizes |= {"micro_batch_size": arguments.micro_batch_size, "num_steps": arguments.steps}
    for name in arguments.shape or SHAPES:
        tokens = arguments.micro_batch_size * arguments.length
        free_bytes, _ = torch.cuda.mem_get_info()
        num_layers = layers_that_fit(SHAPES[name], free_bytes, tokens)
        shape = replace(SHAPES[name], num_layers=num_layers)
        results = []
        for precision, fields in precisions.items():
            torch.cuda.reset_peak_memory_stats()
            results.append(measure(precision, shape, fields, device, **sizes))
            # Free this policy before the next one is made.
            gc.collect()
            torch.cuda.empty_cache()
        figures[name] = report(name, results)
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
