"""Our loss and its backward pass against NeMo-RL's `ClippedPGLossFn` on the same tensors; prepare's cost.

    NEMO_RL_SRC=DIR PYTHONPATH=. .venv-nemo-rl/bin/python benchmarks/loss_vs_nemo_rl.py [--output FILE.md]

Both losses report the same metrics and reach the same value and gradient, which is checked. They alternate in
one process; the best of the repeats counts. On a CPU time is processor time of one thread, so that other
processes matter little; on a GPU it is the time until the device has finished.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "nemo_rl"), os.environ.get("NEMO_RL_SRC", "")]

import newer_python  # noqa: E402, F401
import torch  # noqa: E402

ROWS, LENGTH, GROUP = 64, 4096, 8
REPEATS = 5
KL = 0.01


def step_data(device: str, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """A step of 64 responses of 1000 to 4096 tokens, prompts of 200."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, length + 1)
    positions = torch.arange(length + 1)
    ends = torch.randint(length // 4, length + 1, (ROWS, 1), generator=generator)

    def near(logprobs: torch.Tensor, distance: float) -> torch.Tensor:
        return logprobs + distance * torch.randn(shape, generator=generator)

    prev = -2 * torch.rand(shape, generator=generator)
    data = {
        "token_mask": ((positions >= length // 20) & (positions < ends)).float(),
        "sample_mask": torch.ones(ROWS),
        "prev_logprobs": prev,
        "generation_logprobs": near(prev, 0.02),
        "reference_policy_logprobs": near(prev, 0.1),
        "advantages": torch.randn(ROWS, 1, generator=generator).expand(shape).clone(),
        "current": near(prev, 0.2)[:, 1:].clone(),
    }
    return {name: tensor.to(device) for name, tensor in data.items()}


def losses(kl: float) -> dict[str, Any]:
    """Ours and NeMo-RL's, of the same equation."""
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn

    from nemo_grpo.nemorl.loss import build_loss

    ours = {"variant": "grpo", "reference_policy_kl_penalty": kl, "kl_score_function_gradient": kl > 0}
    return {
        "NeMo-RL": ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=kl)),
        "ours": build_loss(ours),
    }


def seconds(work: Callable[[], Any], device: str) -> float:
    """Processor time on a CPU, elapsed time with a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def loss_and_gradient(loss_fn: Any, data: dict[str, torch.Tensor], rows: int) -> tuple[float, torch.Tensor]:
    """The step in microbatches of ``rows``, each with its backward pass."""
    sizes = {
        "global_valid_seqs": data["sample_mask"].sum(),
        "global_valid_toks": (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum(),
    }
    total, gradients = 0.0, []
    for start in range(0, ROWS, rows):
        part = {name: tensor[start : start + rows] for name, tensor in data.items()}
        current = part["current"].requires_grad_()
        loss, metrics = loss_fn(current, part, **sizes)
        loss.backward()
        total += metrics["loss"]
        assert current.grad is not None
        gradients.append(current.grad)
    return total, torch.cat(gradients)


def compare_losses(device: str) -> list[str]:
    """One line per setting: milliseconds for the whole step, ratio."""
    lines, data = [], step_data(device)
    for rows in (ROWS, 1):
        for kl in (0.0, KL):
            pair, best = losses(kl), {}
            results = {name: loss_and_gradient(loss_fn, data, rows) for name, loss_fn in pair.items()}
            (a, b), (gradient_a, gradient_b) = zip(*results.values(), strict=True)
            assert abs(a - b) < 1e-5, (a, b)
            torch.testing.assert_close(gradient_a, gradient_b, rtol=1e-4, atol=1e-9)
            for _ in range(REPEATS):
                for name, loss_fn in pair.items():
                    took = seconds(lambda f=loss_fn, r=rows: loss_and_gradient(f, data, r), device)
                    best[name] = min(took, best.get(name, took))
            ratio = best["ours"] / best["NeMo-RL"]
            shown = " | ".join(f"{1000 * best[name]:.1f}" for name in ("NeMo-RL", "ours"))
            lines.append(f"| {device} | {rows} | {kl:g} | {shown} | {ratio:.2f} |")
    return lines


def prepare_share(length: int = 512) -> list[str]:
    """prepare against scoring, forward and backward of the quickstart's model on the same tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from nemo_grpo.nemorl.advantage import VariantEstimator
    from nemo_grpo.nemorl.exchange import StepExchange
    from nemo_grpo.variants import parse_loss_fn

    data = step_data("cpu", length)
    config = Qwen2Config(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = Qwen2ForCausalLM(config)
    ids = torch.randint(0, 512, (ROWS, length + 1), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        for rows in ids.split(8):
            with torch.no_grad():
                model(rows)
            model(rows, labels=rows).loss.backward()

    step_seconds = seconds(step, "cpu")
    rewards = (torch.rand(ROWS, generator=torch.Generator().manual_seed(2)) > 0.5).float()
    prompts = torch.arange(ROWS // GROUP).repeat_interleave(GROUP)[:, None]
    lines = []
    for variant in ("grpo", "cw_grpo", "tr_grpo", "erpo", "gpg", "clip_cov"):
        exchange = StepExchange()
        loss_fn = parse_loss_fn({"variant": variant})
        estimator = VariantEstimator(loss_fn, num_generations=GROUP, exchange=exchange)

        def prepare(estimator: Any = estimator, exchange: Any = exchange) -> None:
            exchange.entropies = -data["prev_logprobs"]
            estimator.compute_advantage(
                prompts,
                rewards,
                data["token_mask"],
                logprobs_policy=data["prev_logprobs"],
                logprobs_reference=data["reference_policy_logprobs"],
            )

        took = min(seconds(prepare, "cpu") for _ in range(REPEATS))
        lines.append(f"| {variant} | {1000 * took:.1f} | {step_seconds:.1f} | {took / step_seconds:.2%} |")
    return lines


def minimal_loss(current: torch.Tensor, batch: Any, advantages: torch.Tensor) -> torch.Tensor:
    """GRPO with a KL penalty in as few operations as its equation has; no metrics, no bounds."""
    ratio = torch.exp(current - batch.prev_logprobs)
    policy = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gap = batch.reference_policy_logprobs - current
    terms = policy - KL * (torch.exp(gap) - gap - 1)
    return -(terms * batch.counts).sum() / batch.counts.sum()


def compare_variants() -> list[str]:
    """One line per variant: milliseconds of prepare, and of loss and backward pass beside `minimal_loss`.

    The objective alone, without NeMo-RL's metrics. Medians: memory that is fetched anew is part of the time.
    """
    from nemo_grpo import build_objective
    from nemo_grpo.core.batch import TokenBatch, global_counts

    data = step_data("cpu")
    batch = TokenBatch(
        prev_logprobs=data["prev_logprobs"][:, 1:],
        generation_logprobs=data["generation_logprobs"][:, 1:],
        token_mask=data["token_mask"][:, 1:],
        reference_policy_logprobs=data["reference_policy_logprobs"][:, 1:],
        entropies=-data["prev_logprobs"][:, 1:],
        sample_mask=data["sample_mask"],
        rewards=(torch.rand(ROWS, generator=torch.Generator().manual_seed(2)) > 0.5).float(),
        group_ids=torch.arange(ROWS) // GROUP,
    )
    tokens, sequences = global_counts(batch)
    settings = {"grpo": 0.0, "grpo with KL": KL, "tr_grpo": KL, "erpo": KL}
    made = {
        name: build_objective(name.split()[0], reference_policy_kl_penalty=kl)
        for name, kl in settings.items()
    }
    prepared = {name: objective.prepare(batch) for name, objective in made.items()}
    clean, advantages = prepared["grpo"].batch, prepared["grpo"].advantages

    def learn(name: str) -> None:
        current = data["current"].clone().requires_grad_()
        if name == "minimal":
            loss = minimal_loss(current, clean, advantages)
        else:
            rows = prepared[name].select(slice(None), next_token_logprobs=current)
            loss, _ = made[name].loss(rows, global_valid_toks=tokens, global_valid_seqs=sequences)
        loss.backward()

    times: dict[str, list[float]] = {}
    for _ in range(5 * REPEATS):
        for name in ("minimal", *made):
            times.setdefault(name, []).append(seconds(lambda n=name: learn(n), "cpu"))
            if name in made:
                took = seconds(lambda n=name: made[n].prepare(batch), "cpu")
                times.setdefault(f"prepare {name}", []).append(took)
    shown = {name: 1000 * median(took) for name, took in times.items()}
    lines = []
    for name in made:
        ratio = shown[name] / shown["minimal"]
        lines.append(f"| {name} | {shown[f'prepare {name}']:.1f} | {shown[name]:.1f} | {ratio:.2f} |")
    return lines


def report() -> str:
    """Everything as Markdown."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    lines = [
        "# Loss and backward pass against NeMo-RL's own",
        "",
        f"`benchmarks/loss_vs_nemo_rl.py`, {platform.processor() or platform.machine()}, "
        f"torch {torch.__version__}, one thread; {ROWS} responses, {LENGTH} tokens, best of {REPEATS}, "
        "both alternating.",
        "",
        "| device | rows per call | beta | NeMo-RL, ms | ours, ms | ratio |",
        "|---|---|---|---|---|---|",
        *(line for device in devices for line in compare_losses(device)),
        "",
        "The estimator (prepare, once per step on the driver) at 64 x 512 tokens against scoring, forward",
        "and backward of the quickstart's model of 0.5 million parameters on the same tokens and core:",
        "",
        "| variant | prepare, ms | model, s | share |",
        "|---|---|---|---|",
        *prepare_share(),
        "",
        "The objective alone on all rows at once, against GRPO with a KL penalty in as few operations as its",
        "equation has; medians:",
        "",
        "| variant | prepare, ms | loss and backward pass, ms | in times of the minimal loss |",
        "|---|---|---|---|",
        *compare_variants(),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the table there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = report()
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
