"""CPU seconds of sampling: the engine's decoder against itself without packed weights, and transformers.

All sample from the same weights with the same random numbers, on one thread, taking turns in one process, so
that load of the machine meets all alike. The models are those of engine_vs_trl.py.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/generation_speed.py [--config tiny] [--repetitions 7]
"""

import argparse
import statistics
import time
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.engine_vs_trl import CONFIGS, ROOT, recipe_of
from nemo_grpo.engine import setup
from nemo_grpo.engine.warm_start import starting_policy
from nemo_grpo.hf_folder import end_tokens, load_tokenizer
from nemo_grpo.sampling.decoder import matrices
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.generate_hf import HFGenerator
from nemo_grpo.sampling.requests import Request
from nemo_grpo.tasks import encode_prompt


def measure(name: str, repetitions: int) -> None:
    """Print one line per generator."""
    torch.set_num_threads(1)
    recipe = recipe_of(CONFIGS[name], ROOT / "runs")
    task = recipe.nemo_grpo.task.build()
    source = starting_policy(recipe)
    tokenizer = load_tokenizer(source)
    sampling = setup.training_sampling(recipe, end_tokens(source, tokenizer))
    problems = [task.train_problem(number, 0) for number in range(recipe.grpo.num_prompts_per_step)]
    prompts = [encode_prompt(tokenizer, recipe.nemo_grpo.prompt, problem) for problem in problems]
    generators = {
        "decoder": DecoderGenerator(source),
        "unpacked": unpacked(source),
        "transformers": HFGenerator(source),
    }
    seconds: dict[str, list[float]] = {label: [] for label in generators}
    tokens: dict[str, int] = {}
    for turn in range(repetitions + 1):
        for label, generator in generators.items():
            start = time.process_time()
            rollout = generator.generate(
                Request(prompts, recipe.grpo.num_generations_per_prompt, sampling, seed=turn)
            )
            if turn:  # the first warms up
                seconds[label].append(time.process_time() - start)
            tokens[label] = int(rollout.lengths.sum())
    print(
        f"{name}: {len(prompts)} prompts x {recipe.grpo.num_generations_per_prompt}, {repetitions} turns each"
    )
    for label, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"  {label:12s} {median:.3f} CPU s ({spread}), {tokens[label] / median:,.0f} tokens/s")
    ours, *others = (statistics.median(values) for values in seconds.values())
    print(
        "  decoder /", ", ".join(f"{n} {ours / s:.2f}" for n, s in zip([*seconds][1:], others, strict=True))
    )


def unpacked(source: Path) -> DecoderGenerator:
    """The decoder with torch's own products."""
    with patch.object(matrices, "packs", lambda _weight: False):
        return DecoderGenerator(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", choices=CONFIGS, help="only this one")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    for name in [arguments.config] if arguments.config else CONFIGS:
        measure(name, arguments.repetitions)


if __name__ == "__main__":
    main()
