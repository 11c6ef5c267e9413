"""The planner's memory of embedded runs against the kernel's peak of real ones, on a CPU.

Every size is a run of its own: the quickstart's task on a random policy, two steps with a KL penalty, so that
there is a reference policy and every response has a gradient. quickstart and tiny (`engine_vs_trl`) are the
recipes themselves, shortened, with validations, checkpoints and the export. Tiny and the bare sizes
have random weights.

    python -m benchmarks.plan_vs_measured [--sizes 256x4 512x8 768x12 quickstart tiny] [--tokens 2048]
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.peak_memory import in_child
from nemo_grpo.engine.new_model import write_new_model
from nemo_grpo.plan.planner import plan_recipe
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.own import NewModel

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
SHORTENED = ("grpo.max_num_steps=24", "grpo.val_period=12", "checkpointing.save_period=12")
WHOLE = {
    "quickstart": SHORTENED,
    "tiny": (*SHORTENED, "grpo.num_prompts_per_step=4", "policy.generation.max_new_tokens=32"),
}
"""Size that runs the whole recipe -> its overrides."""
BARE = (
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=8",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
    "nemo_grpo.export.hf=false",
    "nemo_grpo.engine.diagnostics_period=0",
    "loss_fn.reference_policy_kl_penalty=0.01",
)
"""Overrides of the quickstart that leave nothing but two steps with a KL penalty."""


def random_model(size: str, folder: Path) -> str:
    """Write a model of this size, hidden x layers, with random weights; return the override that names it."""
    hidden, layers = map(int, size.split("x"))
    sizes = NewModel(
        vocab_size=384,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    write_new_model(sizes, load_recipe(RECIPE).task.build(), folder)
    return f"policy.model_name={folder}"


def measure(size: str, tokens: int) -> tuple[int, float]:
    """Return (planned, measured) bytes."""
    changes = WHOLE.get(size, BARE)
    with tempfile.TemporaryDirectory() as folder:
        settings = [*changes, f"policy.sequence_packing.train_mb_tokens={tokens}"]
        settings.append(f"nemo_grpo.runs_dir={folder}/runs")
        if size != "quickstart":
            settings.append(random_model("64x2" if size == "tiny" else size, Path(folder, "model")))
        _, peak = in_child("nemo_grpo.cli", "train", RECIPE, *settings)
        return plan_recipe(load_recipe(RECIPE, settings)).peaks["training"], peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", default=["256x4", "512x8", "768x12"], help="hidden x layers, quickstart or tiny"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="of a microbatch")
    options = parser.parse_args()
    print("| hidden x layers | microbatch tokens | planned MiB | measured MiB | error |")
    print("|---|---|---|---|---|")
    for size in options.sizes:
        for tokens in options.tokens:
            planned, peak = measure(size, tokens)
            cells = f"{planned / 2**20:.0f} | {peak / 2**20:.0f} | {planned / peak - 1:+.0%}"
            print(f"| {size} | {tokens} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
