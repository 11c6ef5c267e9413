"""Peak memory and time of logprobs + entropy with backward: chunked, against log_softmax in fp32.

Each case runs in a process of its own; the figure is the growth of its peak resident memory over what it held
with the logits in place, in units of the logits. The gradient, which both sides need, is 1.0 of it.

    python -m benchmarks.logprob_memory [--tokens 2048] [--vocab 65536] [--dtype bfloat16]
"""

import argparse
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from nemo_grpo.core.logprobs import logprobs_and_entropy


def dense(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logprobs and entropies by the whole log_softmax in FP32."""
    log_p = torch.log_softmax(logits.float(), -1)
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    return logprobs, entropies


def peak_bytes() -> int:
    """Return the peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(which: str, tokens: int, vocab: int, dtype: torch.dtype) -> None:
    """Run one case and print: extra memory in units of the logits, seconds."""
    torch.set_num_threads(1)
    function: Any = logprobs_and_entropy if which == "chunked" else dense
    generator = torch.Generator().manual_seed(0)
    # A first small call loads the code, which is not to count.
    small_logits = torch.randn(4, 64, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
    small_logprobs, small_entropies = function(small_logits, torch.zeros(4, dtype=torch.int64))
    (small_logprobs + small_entropies).sum().backward()
    logits = torch.empty(tokens, vocab, dtype=dtype)
    # Row by row: drawing all at once in FP32 would raise the peak before the measurement.
    for row in logits:
        row.normal_(generator=generator)
    logits.requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    peak_before = peak_bytes()
    start = time.perf_counter()
    logprobs, entropies = function(logits, targets)
    (logprobs + 0.1 * entropies).sum().backward()
    seconds = time.perf_counter() - start
    print((peak_bytes() - peak_before) / (logits.numel() * logits.element_size()), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--one", choices=["chunked", "dense"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one, arguments.tokens, arguments.vocab, getattr(torch, arguments.dtype))
        return
    size = arguments.tokens * arguments.vocab * getattr(torch, arguments.dtype).itemsize / 2**20
    shape = f"{arguments.tokens} x {arguments.vocab} {arguments.dtype}"
    print(f"logits {shape}: {size:.0f} MiB, forward and backward, one thread")
    memory: dict[str, float] = {}
    times: dict[str, float] = {}
    for which in ("dense", "chunked"):
        # A process of its own, because the kernel's peak of a process never falls.
        command = [sys.executable, "-m", "benchmarks.logprob_memory", *sys.argv[1:], "--one", which]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        memory[which], times[which] = map(float, output.split())
        print(f"  {which:8s} peak extra memory {memory[which]:5.2f} x logits   {times[which]:6.2f} s")
    memory_ratio = memory["chunked"] / memory["dense"]
    time_ratio = times["chunked"] / times["dense"]
    print(f"  chunked / dense: memory {memory_ratio:.2f}, time {time_ratio:.2f}")


if __name__ == "__main__":
    main()
