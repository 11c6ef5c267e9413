"""Peak memory and time of the embedded engine's update of a pretrained model, beside the planner's figure.

The policy alone, in this process: no sampler, no data, one update on random tokens that fill its microbatches
(prompts of 45 tokens with 8 responses of 20 to 47). The planner's figure is that of recipes/smollm2.yaml
without the sampler.

    python benchmarks/update_memory.py .cache/smollm2 [--precision bfloat16] [--responses 32]
"""

import argparse
import re
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from nemo_grpo import build_objective
from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.engine.megatron import cpu
from nemo_grpo.plan.memory import training_bytes
from nemo_grpo.plan.presets import shape_of
from nemo_grpo.plan.setup import setup_of
from nemo_grpo.recipe import load_recipe
from nemo_grpo.training.rollout import Sequences

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2.yaml"
GROUP, PROMPT, SHORTEST, LONGEST = 8, 45, 20, 47


def peak() -> float:
    """MiB that this process has had in memory at most."""
    return int(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def batch(num_responses: int, vocab_size: int) -> tuple[Sequences, TokenBatch]:
    """Random tokens and rewards."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(num_responses) // GROUP
    lengths = PROMPT + torch.randint(SHORTEST, LONGEST + 1, (num_responses,), generator=generator)
    ids = torch.randint(vocab_size, (num_responses, PROMPT + LONGEST), generator=generator)
    ids[:, :PROMPT] = ids[groups * GROUP][:, :PROMPT]
    column = torch.arange(ids.shape[1] - 1)
    tokens = TokenBatch(
        prev_logprobs=torch.zeros(len(ids), len(column)),
        token_mask=(column >= PROMPT - 1) & (column < lengths[:, None] - 1),
        sample_mask=torch.ones(num_responses),
        rewards=torch.rand(num_responses, generator=generator).round(),
        group_ids=groups,
    )
    return Sequences(ids, lengths, torch.full((num_responses,), PROMPT), groups), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--responses", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cpu.install()
    from nemo_grpo.engine.megatron.policy import MegatronPolicy
    from nemo_grpo.hf_folder import load_config, load_weights

    recipe = load_recipe(
        RECIPE, [f"policy.model_name={options.model}", f"policy.precision={options.precision}"]
    )
    optimizer, dtype = recipe.policy.megatron_cfg.optimizer, getattr(torch, options.precision)
    policy = MegatronPolicy(load_config(options.model), optimizer, dtype=dtype)
    policy.load_weights(load_weights(options.model), keep_reference=False)
    objective, before = build_objective("grpo"), peak()
    sequences, tokens = batch(options.responses, policy.hf.vocab_size)
    mb_tokens, start = recipe.policy.sequence_packing.train_mb_tokens, time.process_time()
    policy.update(
        objective,
        objective.prepare(tokens),
        sequences,
        micro_batch_size=1,
        temperature=1.0,
        mb_tokens=mb_tokens,
        scoring=True,
    )
    seconds, measured = time.process_time() - start, peak()
    parts = training_bytes(shape_of(recipe), setup_of(recipe), 0)
    planned = (sum(parts.values()) - parts["sampler"]) / 2**20
    print(f"{options.precision}: {seconds:.1f} CPU s; {before:.0f} MiB before, at most {measured:.0f},")
    print(f"planned {planned:.0f} ({planned / measured - 1:+.0%})")


if __name__ == "__main__":
    main()
