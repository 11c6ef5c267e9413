"""CPU seconds of a training step: the embedded engine against TRL's GRPOTrainer.

Both sides train the same model folder (a Qwen2) with the same tokenizer, prompts, batch, lengths, sampling,
loss (GRPO without KL), learning rate and reward function, on one thread. Each is a process of its own; they
take turns, a few steps at a time, so that load of the machine meets all alike. A step is everything from
drawing prompts to updated weights and metrics.

Both compute in float32, or with `--precision bfloat16` both in bfloat16 with master weights in float32: ours
in the optimizer, TRL's, as it comes, in the model under autocast.

TRL runs three times, because what it does on a CPU by default is not its best (`HEADS`):

    stock     as it comes: a fused head scores every position, prompts and padding too, and recomputes logits
    compact   the same head for responses only, as TRL does it on a GPU
    classic   a plain head for responses (logits_to_keep) that keeps the logits, as earlier releases of TRL

    python -m benchmarks.engine_vs_trl [--trl-python PATH] [--config tiny]

TRL is no dependency of this project. Give it an environment of its own, with this one's torch:

    python -m venv /tmp/trl
    /tmp/trl/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.23.0

and pass --trl-python /tmp/trl/bin/python; without it only our side is measured. All sides of smollm2 at
once take more than 20 GB of memory: `--heads classic` and so on compare them one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

ROOT = Path(__file__).parents[1]
HEADS = ("stock", "compact", "classic")
WARM_UP_STEPS = 3
MARK = "@"  # begins the lines of a side's output that are for us
LEARNING_RATE = 1e-6  # small, so that responses keep the lengths that they begin with


@dataclass(frozen=True)
class Config:
    """One comparison.

    Attributes: micro_batch_size: sequences per forward and backward pass, on both sides.
                changes: overrides of the recipe.
                precision: float32 or bfloat16, on both sides.
    """

    num_prompts: int
    num_generations: int
    max_new_tokens: int
    micro_batch_size: int
    steps_per_turn: int
    changes: tuple[str, ...] = ()
    recipe: str = "quickstart"
    precision: str = "float32"


CONFIGS = {
    # One step at next to no learning rate: random weights.
    "tiny": Config(
        *(4, 8, 32, 32, 10),
        tuple(
            f"nemo_grpo.warm_start.{override}"
            for override in ("num_steps=1", "lr=1.0e-9", "hidden_size=64", "intermediate_size=128")
        ),
    ),
    "quickstart": Config(16, 8, 40, 32, 3),
    # A pretrained model of 135 million parameters: python -m nemo_grpo.data.smollm2 .cache/smollm2
    "smollm2": Config(
        *(2, 8, 64, 16, 2),
        (
            f"policy.model_name={ROOT / '.cache/smollm2'}",
            "cluster.gpus_per_node=1",
        ),
        "smollm2",
    ),
}


def reward(text: str) -> float:
    """Share of vowels: differs within every group, so that every step updates."""
    return sum(character in "aeiou" for character in text) / max(1, len(text))


class Turns:
    """One side's bookkeeping: measures as many steps as it is told, answers, and waits for the next order."""

    def __init__(self) -> None:
        self.steps, self.notes = WARM_UP_STEPS, []
        self._begin()

    def _begin(self) -> None:
        self.notes.clear()
        self.cpu, self.wall = sum(os.times()[:4]), time.perf_counter()  # with children it has waited for

    def step_done(self, **note: float) -> bool:
        """Call after each step with what it knows of it; False: no more steps are wanted."""
        self.notes.append(note)
        if len(self.notes) < self.steps:
            return True
        cpu, wall = sum(os.times()[:4]) - self.cpu, time.perf_counter() - self.wall
        means = {name: statistics.mean(note[name] for note in self.notes) for name in note}
        print(MARK + json.dumps({"cpu": cpu / self.steps, "wall": wall / self.steps} | means), flush=True)
        order = sys.stdin.readline()
        self.steps = int(order or 0)
        self._begin()
        return self.steps > 0


# ------------------------------------------------------------------ our side


def recipe_of(config: Config, folder: Path) -> Recipe:
    """The comparison's recipe, with runs in ``folder``."""
    from nemo_grpo.recipe import load_recipe

    optimizer, scheduler = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    overrides = [
        f"grpo.num_prompts_per_step={config.num_prompts}",
        f"grpo.num_generations_per_prompt={config.num_generations}",
        f"policy.generation.max_new_tokens={config.max_new_tokens}",
        f"policy.train_micro_batch_size={config.micro_batch_size}",
        *(f"{optimizer}.{name}={LEARNING_RATE:.7f}" for name in ("lr", "min_lr")),
        *(f"{scheduler}.lr_decay_style=constant", f"{scheduler}.lr_warmup_iters=0"),
        f"policy.precision={config.precision}",
        "logger.tensorboard_enabled=false",
        *(f"nemo_grpo.runs_dir={folder}", "nemo_grpo.run_name=ours"),
        *config.changes,
    ]
    return load_recipe(ROOT / f"recipes/{config.recipe}.yaml", overrides)


class VowelTask:
    """A task with `reward` for its score."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def score(self, _problem: Any, response: str) -> dict[str, float]:
        return {"accuracy": reward(response), "format": 0.0}


def run_ours(config: Config, folder: Path) -> None:
    """Train as `train` does between validations and checkpoints."""
    from nemo_grpo.engine.run import begin
    from nemo_grpo.engine.steps import reinforce
    from nemo_grpo.tasks.scoring import Scorer

    recipe = recipe_of(config, folder)
    parts = begin(recipe)
    parts.scorer = Scorer(VowelTask(parts.task), recipe.nemo_grpo.rewards, recipe.nemo_grpo.prompt)
    assert not parts.learner.objective.needs_reference
    turns, going = Turns(), True
    while going:
        row = reinforce(parts)
        parts.folder.append_metrics(row)
        assert row["steps/no_signal"] == row["steps/skipped"] == 0
        times = {name: row[f"time/{name}"] for name in ("rollout", "score", "update")}
        going = turns.step_done(length=row["length/mean"], **times)


# ------------------------------------------------------------------ TRL's side


def run_trl(config: Config, folder: Path, head: str) -> None:
    """`GRPOTrainer.train` on the model and the prompts that lie in ``folder``."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig

    torch.set_num_threads(1)
    prompts = json.loads((folder / "prompts.json").read_text())
    model = json.loads((folder / "model.json").read_text())
    lengths: list[float] = []

    def vowels(completions: list[str], completion_ids: list[list[int]], **_unused: Any) -> list[float]:
        lengths.append(statistics.mean(map(len, completion_ids)))
        return [reward(text) for text in completions]

    class Callback(TrainerCallback):
        def on_train_begin(self, *_args: Any, **_unused: Any) -> None:
            self.turns = Turns()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_unused: Any) -> None:
            control.should_training_stop = not self.turns.step_done(length=lengths[-1])

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
    """TRL's trainer with one of `HEADS`."""
    import torch
    from trl import GRPOTrainer
    from trl.trainer import utils

    if head == "compact":
        utils._use_triton = lambda _device: True  # in this module it decides on nothing else
    if head != "classic":
        return GRPOTrainer

    class Classic(GRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            logits_to_keep: int,
            *_unused: Any,
            compute_entropy: bool = False,
            **_others: Any,
        ) -> tuple[Any, Any, None]:
            output = model(input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1)
            logits = output.logits[:, :-1] / self.temperature
            logprobs = utils.selective_log_softmax(logits, input_ids[:, -logits_to_keep:])
            with torch.no_grad():
                entropies = utils.entropy_from_logits(logits) if compute_entropy else None
            return logprobs, entropies, None

    return Classic


# ------------------------------------------------------------------ the comparison


class Side:
    """A side's process from the sources in ``root``; ``options`` are the command line's."""

    def __init__(
        self, python: str, side: str, folder: Path, options: Sequence[str], root: Path = ROOT
    ) -> None:
        program = str(root / "benchmarks" / Path(__file__).name)
        command = [python, program, "--side", side, "--folder", str(folder), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(root) if side == "ours" else ""
        folder.mkdir(exist_ok=True)
        self.log = folder / f"{side}.log"
        self.process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
        )
        self.results: list[dict[str, float]] = []
        self._answer()  # the warm-up

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line[1:]))
        raise SystemExit(f"{self.log} ends with:\n" + "\n".join(self.log.read_text().splitlines()[-15:]))

    def turn(self, steps: int) -> None:
        self._order(steps)
        self.results.append(self._answer())

    def _order(self, steps: int) -> None:
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)

    def end(self) -> None:
        self._order(0)
        self.process.communicate()

    def median(self, name: str) -> float:
        return statistics.median(result[name] for result in self.results)


def prepare(name: str, folder: Path) -> None:
    """Leave in ``folder`` what TRL's side needs: the model's folder, and prompts as our side encodes them."""
    from nemo_grpo.engine.warm_start import starting_policy
    from nemo_grpo.support.hf_folder import load_tokenizer
    from nemo_grpo.tasks import encode_prompt

    recipe = recipe_of(CONFIGS[name], folder)
    task = recipe.nemo_grpo.task.build()
    source = starting_policy(recipe)
    tokenizer = load_tokenizer(source)
    problems = [task.train_problem(number, recipe.grpo.seed) for number in range(2000)]
    encoded = [encode_prompt(tokenizer, recipe.nemo_grpo.prompt, problem) for problem in problems]
    (folder / "prompts.json").write_text(json.dumps([tokenizer.decode(ids) for ids in encoded]))
    (folder / "model.json").write_text(json.dumps(str(source)))


def compare(name: str, config: Config, arguments: argparse.Namespace) -> None:
    """Measure one configuration, as the command line asks, and print its lines."""
    trl_python, heads = arguments.trl_python, arguments.heads
    options = ["--config", name, "--precision", config.precision]
    with tempfile.TemporaryDirectory(prefix="engine-vs-trl-") as scratch:
        folder = Path(scratch)
        prepare(name, folder)
        sides = {"ours": Side(sys.executable, "ours", folder, options)}
        if trl_python:
            sides |= {head: Side(trl_python, head, folder, options) for head in heads}
        if arguments.release:
            root = arguments.release.absolute()
            sides["release"] = Side(sys.executable, "ours", folder / "release", options, root)
        for _ in range(arguments.repetitions):
            for side in sides.values():
                side.turn(config.steps_per_turn)
        for side in sides.values():
            side.end()
        print(f"{name}: {config}, {arguments.repetitions} turns each")
        for label, side in sides.items():
            seconds = [result["cpu"] for result in side.results]
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            print(
                f"  {label:7s} {side.median('cpu'):.3f} CPU s/step ({spread}), {side.median('wall'):.3f} s, "
                f"mean response {side.median('length'):.1f} tokens"
            )
        parts = {part: sides["ours"].median(part) for part in ("rollout", "score", "update")}
        total = sum(parts.values())
        print("  ours by part:", ", ".join(f"{part} {s / total:.0%}" for part, s in parts.items()))
        if trl_python:
            ours = sides["ours"].median("cpu")
            ratios = {head: ours / sides[head].median("cpu") for head in heads}
            print("  ours / TRL:", ", ".join(f"{head} {ratio:.2f}" for head, ratio in ratios.items()))
        if arguments.release:
            print(f"  ours / release: {sides['ours'].median('cpu') / sides['release'].median('cpu'):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl-python", help="Python of an environment with TRL; see above")
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
            print("TRL's side is skipped: give --trl-python PATH (see --help for how to make it)")
        for name in [arguments.config] if arguments.config else configs:
            compare(name, configs[name], arguments)


if __name__ == "__main__":
    main()
