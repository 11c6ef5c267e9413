"""CPU seconds of a training step: the embedded engine against TRL's GRPOTrainer.

Both sides train the same model folder with the same tokenizer, prompts, batch, lengths, sampling, loss (GRPO
without KL), learning rate and reward, on one thread. Each is a process of its own; they take turns of a few
steps, so that other load meets all alike. A step is everything from drawing prompts to updated weights and
metrics. Both compute in float32, or with `--precision bfloat16` in bfloat16 with float32 master weights: ours
in the optimizer, TRL's in the model under autocast.

TRL runs three times, because its default on a CPU is not its best (`HEADS`):

    stock     the default: a fused head scores every position, prompts and padding too, and recomputes logits
    compact   the same head for responses only, TRL's choice on a GPU
    classic   a plain head for responses (logits_to_keep) that keeps the logits, as in earlier releases of TRL

    python -m benchmarks.engine_vs_trl [--trl-python PATH] [--config tiny]

TRL needs an environment of its own, with this one's torch; without it only our side is measured:

    python -m venv /tmp/trl
    /tmp/trl/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.23.0

All sides of smollm2 at once take more than 20 GB of memory: `--heads classic` and so on run one at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.turns import Side, Turns

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

ROOT = Path(__file__).parents[1]
HEADS = ("stock", "compact", "classic")
LEARNING_RATE = 1e-6
"""Learning rate at which responses keep their lengths, so that all steps are alike."""
INPUTS = "inputs.json"
"""File with the path of the model and the prompts, for TRL's side."""


@dataclass(frozen=True)
class Config:
    """One comparison.

    Attributes:
        num_prompts: prompts in a step.
        num_generations: responses to a prompt.
        max_new_tokens: maximum tokens of a response.
        micro_batch_size: responses in a microbatch, on every side.
        steps_per_turn: steps that a side trains before the next side's turn.
        changes: overrides of the recipe.
        recipe: name of the recipe.
        precision: precision of every side.
    """

    num_prompts: int
    num_generations: int
    max_new_tokens: int
    micro_batch_size: int
    steps_per_turn: int
    changes: tuple[str, ...] = ()
    recipe: str = "quickstart"
    precision: str = "float32"


TINY = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
"""Sizes of the model with random weights that "tiny" trains."""

CONFIGS = {
    "tiny": Config(4, 8, 32, 32, 10),
    "quickstart": Config(16, 8, 40, 32, 3),
    # 135 million parameters, pretrained: python -m nemo_grpo.data.smollm2 .cache/smollm2
    "smollm2": Config(
        num_prompts=2,
        num_generations=8,
        max_new_tokens=64,
        micro_batch_size=16,
        steps_per_turn=2,
        changes=(f"policy.model_name={ROOT / '.cache/smollm2'}", "cluster.gpus_per_node=1"),
        recipe="smollm2",
    ),
}


def reward(text: str) -> float:
    """Compute the share of vowels, which differs within every group, so that every step updates."""
    return sum(character in "aeiou" for character in text) / max(1, len(text))


def recipe_of(config: Config, folder: Path) -> Recipe:
    """Load the comparison's recipe, with runs in ``folder``."""
    from nemo_grpo.recipe import load_recipe

    optimizer = "policy.megatron_cfg.optimizer"
    scheduler = "policy.megatron_cfg.scheduler"
    overrides = [
        f"grpo.num_prompts_per_step={config.num_prompts}",
        f"grpo.num_generations_per_prompt={config.num_generations}",
        f"policy.generation.max_new_tokens={config.max_new_tokens}",
        f"policy.train_micro_batch_size={config.micro_batch_size}",
        f"{optimizer}.lr={LEARNING_RATE:.7f}",
        f"{optimizer}.min_lr={LEARNING_RATE:.7f}",
        f"{scheduler}.lr_decay_style=constant",
        f"{scheduler}.lr_warmup_iters=0",
        f"policy.precision={config.precision}",
        "logger.tensorboard_enabled=false",
        f"nemo_grpo.runs_dir={folder}",
        "nemo_grpo.run_name=ours",
        *config.changes,
    ]
    return load_recipe(ROOT / f"recipes/{config.recipe}.yaml", overrides)


def run_ours(config: Config, folder: Path) -> None:
    """Train with the embedded engine, as `nemo-grpo train` does between validations and checkpoints."""
    from nemo_grpo.engine.checks import Start, choose_device
    from nemo_grpo.engine.setup import set_up
    from nemo_grpo.engine.steps import reinforce, sample

    model, _ = json.loads((folder / INPUTS).read_text())
    recipe = recipe_of(config, folder)
    task: Any = recipe.task.build()
    run = set_up(recipe, Path(model), Start(choose_device(recipe), task))
    task.score = lambda _problem, response: {"accuracy": reward(response), "format": 0.0}
    turns = Turns()
    goes_on = True
    while goes_on:
        row = reinforce(run.learner, sample(run.rollouts, run.learner), run.recorder.diagnostics)
        run.recorder.folder.append_metrics(row)
        # A step without an update would be too fast.
        assert row["steps/no_signal"] == row["steps/skipped"] == 0
        times = {name: row[f"time/{name}"] for name in ("rollout", "score", "update")}
        goes_on = turns.step_done(length=row["length/mean"], **times)


def run_trl(config: Config, folder: Path, head: str) -> None:
    """Train TRL's GRPOTrainer on the model and prompts of `prepare`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig

    torch.set_num_threads(1)
    model, prompts = json.loads((folder / INPUTS).read_text())
    turns = Turns()
    lengths: list[float] = []

    def vowels(completions: list[str], completion_ids: list[list[int]], **_unused: Any) -> list[float]:
        lengths.append(statistics.mean(map(len, completion_ids)))
        return [reward(text) for text in completions]

    class Callback(TrainerCallback):
        def on_step_end(self, _args: Any, _state: Any, control: Any, **_unused: Any) -> None:
            control.should_training_stop = not turns.step_done(length=lengths[-1])

    batch = config.num_prompts * config.num_generations
    arguments = GRPOConfig(
        output_dir=str(folder / head),
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=batch // config.micro_batch_size,
        num_generations=config.num_generations,
        max_completion_length=config.max_new_tokens,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=10**6,
        bf16=config.precision == "bfloat16",
        gradient_checkpointing=False,
        **dict.fromkeys(("save_strategy", "logging_strategy", "eval_strategy"), "no"),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer_with(head)(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=vowels,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Callback()],
    ).train()


def trainer_with(head: str) -> Any:
    """Return TRL's trainer with one of `HEADS`."""
    import torch
    from trl import GRPOTrainer
    from trl.trainer import utils

    if head == "compact":
        # In TRL's module this function decides only which head is used.
        utils._use_triton = lambda _device: True
    if head != "classic":
        return GRPOTrainer

    class Classic(GRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self, *inputs: Any, compute_entropy: bool = False, **_unused: Any
        ) -> tuple[Any, Any, None]:
            model, input_ids, attention_mask, logits_to_keep = inputs
            output = model(input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1)
            logits = output.logits[:, :-1] / self.temperature
            logprobs = utils.selective_log_softmax(logits, input_ids[:, -logits_to_keep:])
            with torch.no_grad():
                entropies = utils.entropy_from_logits(logits) if compute_entropy else None
            return logprobs, entropies, None

    return Classic


def prepare(name: str, folder: Path) -> None:
    """Write `INPUTS`: the starting policy, and prompts as our side encodes them."""
    from nemo_grpo.engine.new_model import write_new_model
    from nemo_grpo.recipe.own import NewModel
    from nemo_grpo.support.hf_folder import load_tokenizer
    from nemo_grpo.tasks import encode_prompt

    recipe = recipe_of(CONFIGS[name], folder)
    task = recipe.task.build()
    source = Path(recipe.policy.model_name or "")
    if name == "tiny":
        source = folder / "tiny"
        source.mkdir()
        write_new_model(NewModel(**TINY), task, source)
    tokenizer = load_tokenizer(source)
    problems = [task.train_problem(number, recipe.grpo.seed) for number in range(2000)]
    encoded = [encode_prompt(tokenizer, recipe.nemo_grpo.prompt, problem) for problem in problems]
    prompts = [tokenizer.decode(ids) for ids in encoded]
    (folder / INPUTS).write_text(json.dumps([str(source), prompts]))


def start(python: str, side: str, folder: Path, options: list[str], root: Path = ROOT) -> Side:
    """Start a side's process from the sources in ``root``."""
    folder.mkdir(exist_ok=True)
    program = str(root / "benchmarks" / Path(__file__).name)
    command = [python, program, "--side", side, "--folder", str(folder), *options]
    return Side(command, root, folder / f"{side}.log")


def compare(name: str, config: Config, arguments: argparse.Namespace) -> None:
    """Measure one configuration and print its lines."""
    options = ["--config", name, "--precision", config.precision]
    with tempfile.TemporaryDirectory(prefix="engine-vs-trl-") as scratch:
        folder = Path(scratch)
        prepare(name, folder)
        sides = {"ours": start(sys.executable, "ours", folder, options)}
        if arguments.trl_python:
            for head in arguments.heads:
                sides[head] = start(arguments.trl_python, head, folder, options)
        if arguments.release:
            root = arguments.release.absolute()
            sides["release"] = start(sys.executable, "ours", folder / "release", options, root)
        for _ in range(arguments.repetitions):
            for side in sides.values():
                side.turn(config.steps_per_turn)
        for side in sides.values():
            # No more steps: the process ends.
            side.process.communicate("0\n")
    print(f"{name}: {config}, {arguments.repetitions} turns each")
    for label, side in sides.items():
        seconds = [result["cpu"] for result in side.results]
        print(
            f"  {label:7s} {side.median('cpu'):.3f} CPU s/step ({min(seconds):.3f} to {max(seconds):.3f}), "
            f"{side.median('wall'):.3f} s, mean response {side.median('length'):.1f} tokens"
        )
    ours = sides.pop("ours")
    parts = {part: ours.median(part) for part in ("rollout", "score", "update")}
    total = sum(parts.values())
    shares = [f"{part} {seconds_of_part / total:.0%}" for part, seconds_of_part in parts.items()]
    print("  ours by part:", ", ".join(shares))
    if sides:
        ratios = []
        for label, side in sides.items():
            ratios.append(f"{label} {ours.median('cpu') / side.median('cpu'):.2f}")
        print("  ours /", ", ".join(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl-python", help="Python of an environment with TRL")
    parser.add_argument("--release", type=Path, help="clone of an earlier release, as one more side")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS, help="only these of TRL's")
    parser.add_argument("--config", choices=CONFIGS, help="only this one")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--side", choices=["ours", *HEADS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    configs = {name: replace(config, precision=arguments.precision) for name, config in CONFIGS.items()}
    if arguments.side == "ours":
        run_ours(configs[arguments.config], arguments.folder)
    elif arguments.side:
        run_trl(configs[arguments.config], arguments.folder, arguments.side)
    else:
        if not arguments.trl_python:
            print("without TRL: give --trl-python PATH, see --help")
        for name in [arguments.config] if arguments.config else configs:
            compare(name, configs[name], arguments)


if __name__ == "__main__":
    main()
