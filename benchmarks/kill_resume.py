"""Kill a training run with SIGKILL, resume it, again and again: nothing may be lost and nothing may differ.

A very small policy trains with a checkpoint after every step. One run is left alone. Others are killed, a
good half of the times while they save, and resumed until they end; then weights, optimizer state, metrics and
samples must equal the unbroken run's bit for bit. After every kill the newest checkpoint must be complete and
no older than one that was complete before. Runs are forks of this process, which has imported everything and
computes nothing, so a kill costs a second or two.

    PYTHONPATH=. python benchmarks/kill_resume.py [--kills 50] [--inside 20] [--seed 0] [--folder DIR]
                                                  [--async-save]

Exit code 0: everything held.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import safetensors.numpy
import torch
import torch.utils.tensorboard
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: F401
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from nemo_grpo.dotted import leaves
from nemo_grpo.engine import checkpoint as checkpoints
from nemo_grpo.engine.megatron import cpu
from nemo_grpo.engine.trainer import Trainer
from nemo_grpo.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[1]
# A warm start just long enough that rewards differ within groups: without signal nothing would be updated.
SMALL = [
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=10",
    "grpo.val_period=4",
    "grpo.max_val_samples=2",
    "grpo.val_num_generations_per_prompt=2",
    "policy.train_micro_batch_size=8",
    "policy.generation.max_new_tokens=28",
    "checkpointing.save_period=1",
    "nemo_grpo.rewards={format: 1.0, accuracy: 1.0}",
    "nemo_grpo.warm_start.num_steps=100",
    "nemo_grpo.warm_start.batch_size=16",
    "nemo_grpo.warm_start.intermediate_size=256",
]
POLL_SECONDS = 0.0005
SHARE_AIMED_AT_SAVES = 0.6
PATIENCE_SECONDS = 300
PR_SET_CHILD_SUBREAPER = 36
FORK = multiprocessing.get_context("fork")


class Broken(AssertionError):
    """Something that a kill must never cause; the message says what and where to look."""


# ------------------------------------------------------------------ one process of a run


def train(recipe: Recipe, resume: bool, log: Path, started_at: Connection) -> None:
    """What the forked process does: tell the step it starts from, then train to the end."""
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO)
    try:
        trainer = Trainer(recipe, resume=resume)
        started_at.send(trainer.state.step)
        trainer.train()
    except BaseException:
        traceback.print_exc()
        raise


@dataclass
class Attempt:
    """One process of a run, from start to its end or its death."""

    process: BaseProcess
    pipe: Connection
    log: Path
    begin: float

    @classmethod
    def start(cls, recipe: Recipe, *, resume: bool) -> Attempt:
        log = recipe.run_dir.with_suffix(".log")
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=train, args=(recipe, resume, log, there))
        process.start()
        there.close()
        return cls(process, here, log, time.monotonic())

    def moments(self) -> Iterator[float]:
        """Seconds since the start, as often as it can be looked at, while the process lives."""
        while self.process.is_alive():
            now = time.monotonic() - self.begin
            if now > PATIENCE_SECONDS:
                self.process.kill()
                raise Broken(f"a process has not ended after {PATIENCE_SECONDS} s; see {self.log}")
            yield now
            time.sleep(POLL_SECONDS)

    def started_from(self) -> int | None:
        """The step that it resumed from; None if it was killed before it got there."""
        try:
            return int(self.pipe.recv()) if self.pipe.poll() else None
        except EOFError:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def ended_well(self) -> bool:
        """True if it trained to the end, False if it was killed.

        Raises: Broken: it failed.
        """
        self.process.join()
        if self.process.exitcode not in (0, -9):
            lines = self.log.read_text().strip().splitlines()[-12:]
            raise Broken(f"exit code {self.process.exitcode} instead of training on:\n" + "\n".join(lines))
        return self.process.exitcode == 0


# ------------------------------------------------------------------ what lies in the checkpoint folder


def unfinished(folder: Path) -> dict[str, tuple[int, int]]:
    """Folders of saves under way or broken off, told from later ones of the same name by inode and time."""
    found = {}
    for path in folder.glob("tmp_*"):
        try:
            status = path.stat()
        except FileNotFoundError:  # renamed since the glob
            continue
        found[path.name] = (status.st_ino, status.st_mtime_ns)
    return found


def save_under_way(folder: Path, before: dict[str, tuple[int, int]]) -> Path | None:
    for name, identity in unfinished(folder).items():
        if name.startswith("tmp_step_") and before.get(name) != identity:
            return folder / name
    return None


def died_inside_save(folder: Path, before: dict[str, tuple[int, int]]) -> bool:
    """True if the kill left an unfinished save, or one whose checkpoint `latest` does not name yet."""
    if any(before.get(name) != identity for name, identity in unfinished(folder).items()):
        return True
    pointer = folder / checkpoints.LATEST
    complete = sorted(folder.glob("step_*"))
    return bool(complete) and (not pointer.exists() or pointer.read_text() != complete[-1].name)


def newest_step(folder: Path) -> int:
    """Step of the checkpoint that a resumed run must take, 0 without any.

    Raises: Broken: `latest` names a checkpoint that is not there, or that is not complete.
    """
    pointer = folder / checkpoints.LATEST
    if pointer.exists() and not (folder / pointer.read_text()).is_dir():
        raise Broken(f"{pointer} names {pointer.read_text()!r}, which is not there")
    newest = checkpoints.CheckpointStore(folder).latest()
    if newest is None:
        return 0
    check_complete(newest)
    return int(checkpoints.read_info(newest)["step"])


def check_complete(folder: Path) -> None:
    """Raises Broken unless the checkpoint has all its parts."""
    weights = folder / checkpoints.WEIGHTS
    needed = [
        folder / checkpoints.INFO,
        folder / checkpoints.TOKENIZER / "tokenizer.json",
        *(weights / name for name in ("metadata.json", ".metadata", "__0_0.distcp")),
    ]
    if missing := [str(path) for path in needed if not path.is_file() or path.stat().st_size == 0]:
        raise Broken(f"half a checkpoint: {', '.join(missing)} missing or empty")
    try:
        load_common_state_dict(str(weights))  # a file of its own before megatron-core 0.19
    except (OSError, CheckpointingException, CheckpointException) as error:
        raise Broken(f"half a checkpoint: {weights} does not load ({error})") from error


# ------------------------------------------------------------------ runs, whole and broken


@dataclass
class Tally:
    """What happened in all broken runs together.

    Attributes: before_ready: killed before the first step.  resumed: starts that took up the newest
                checkpoint.  writers_left: processes of broken-off saves that had not ended by themselves when
                their run was at its end.  different: what differed from the unbroken run, one sentence each.
    """

    kills: int = 0
    inside_save: int = 0
    before_ready: int = 0
    resumed: int = 0
    runs: int = 0
    writers_left: int = 0
    different: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pace:
    """Seconds in an undisturbed run: until the first step, from there to the end, for one save."""

    start: float
    steps: float
    save: float


def run_undisturbed(recipe: Recipe) -> Pace:
    """Train to the end and measure."""
    attempt = Attempt.start(recipe, resume=False)
    ready = saving_since = None
    now, saves = 0.0, []
    for now in attempt.moments():
        if ready is None and attempt.started_from() is not None:
            ready = now
        under_way = save_under_way(recipe.checkpoint_dir, {})
        if under_way is not None and saving_since is None:
            saving_since = now
        elif under_way is None and saving_since is not None:
            saves.append(now - saving_since)
            saving_since = None
    if not attempt.ended_well() or ready is None:
        raise Broken(f"the unbroken run did not end by itself; see {attempt.log}")
    return Pace(ready, now - ready, statistics.median(saves))


def kill_somewhere(attempt: Attempt, rng: random.Random, pace: Pace) -> None:
    """Kill between the start and some steps later."""
    moment = rng.uniform(0.2 * pace.start, pace.start + 0.4 * pace.steps)
    for now in attempt.moments():
        if now >= moment:
            attempt.kill()


def kill_in_save(attempt: Attempt, folder: Path, rng: random.Random, pace: Pace) -> None:
    """Kill at a random moment of the first, second or third save."""
    seen, countdown = unfinished(folder), rng.choice((1, 2, 3))
    into_save = rng.uniform(0, 0.9 * pace.save)
    saving: Path | None = None
    for _ in attempt.moments():
        if saving is not None and saving.exists():
            continue
        saving = save_under_way(folder, seen)
        countdown -= saving is not None
        if countdown == 0:
            time.sleep(into_save)
            attempt.kill()


def run_broken(recipe: Recipe, rng: random.Random, pace: Pace, tally: Tally, num_kills: int) -> None:
    """Kill and resume until ``tally`` has that many kills or the run came to its end; always let it end.

    Raises: Broken: a start failed, took up another checkpoint than the newest, or a checkpoint was lost.
    """
    folder, newest, finished = recipe.checkpoint_dir, 0, False
    while not finished:
        before = unfinished(folder)
        attempt = Attempt.start(recipe, resume=recipe.run_dir.exists())
        if tally.kills < num_kills:
            if rng.random() < SHARE_AIMED_AT_SAVES:
                kill_in_save(attempt, folder, rng, pace)
            else:
                kill_somewhere(attempt, rng, pace)
        finished = attempt.ended_well()
        began, older = attempt.started_from(), newest
        if began not in (None, older):
            raise Broken(f"started from step {began} although step {older} was complete; see {attempt.log}")
        newest = newest_step(folder)
        check_progress(folder, older, newest, before)
        tally.resumed += began is not None and older > 0
        if not finished:
            tally.kills += 1
            tally.before_ready += began is None
            tally.inside_save += died_inside_save(folder, before)
    tally.runs += 1
    tally.writers_left += end_orphans()


def adopt_orphans() -> None:
    """Become the parent of what killed runs leave running, instead of process 1; only Linux can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_orphans() -> int:
    """End what killed runs left running, and return how many these were."""
    orphans = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    for orphan in orphans:
        orphan.kill()
        orphan.wait()
    return len(orphans)


def check_progress(folder: Path, older: int, newest: int, before: dict[str, tuple[int, int]]) -> None:
    """Raises Broken if a complete checkpoint was lost, or a save left what an earlier kill had broken off."""
    if newest < older:
        raise Broken(f"the newest checkpoint in {folder} was of step {older}, after a kill it is of {newest}")
    stale = {name for name, identity in unfinished(folder).items() if before.get(name) == identity}
    if newest > older and stale:
        raise Broken(f"{sorted(stale)} still lie in {folder} after the save of step {newest}")


# ------------------------------------------------------------------ the comparison


def differences(run: Path, whole: Path) -> list[str]:
    """What a finished run has otherwise than the unbroken one, apart from times; empty: nothing."""
    found = []
    expected, got = (safetensors.numpy.load_file(r / "hf/model.safetensors") for r in (whole, run))
    if {k: v.tobytes() for k, v in expected.items()} != {k: v.tobytes() for k, v in got.items()}:
        found.append("weights differ")
    if final_state(run) != final_state(whole):
        found.append("the last checkpoint (model, optimizer, schedule) differs")
    for name in ("metrics.jsonl", "samples.jsonl"):
        expected_rows, got_rows = without_time(whole / name), without_time(run / name)
        if expected_rows != got_rows:
            steps = [[row["step"] for row in rows] for rows in (got_rows, expected_rows)]
            found.append(f"{name} differs: steps {steps[0]}, unbroken {steps[1]}")
    found += [f"{path} is left" for path in run.rglob("tmp_*")]
    for checkpoint in (run / "checkpoints").glob("step_*"):
        try:
            check_complete(checkpoint)
        except Broken as error:
            found.append(str(error))
    return [f"{run.name}: {sentence}" for sentence in found]


def final_state(run: Path) -> dict[str, str]:
    """The last checkpoint by its content: SHA-256 of each tensor, and the rest (schedule, counters) as text.

    Not by its files: pickled objects may be shared or copied, so the same content has several byte forms.
    """
    weights = run / "checkpoints" / (run / "checkpoints/latest").read_text() / checkpoints.WEIGHTS
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(weights), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return {name: _content(value) for name, value in leaves(state)} | {
        "common": repr(load_common_state_dict(str(weights)))
    }


def _content(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().view(torch.uint8) if value.ndim else value.reshape(1).view(torch.uint8)
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw.numpy().data).hexdigest()}"
    return repr(value)


def without_time(log: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in rows]


def updates(run: Path) -> int:
    """Steps that changed the weights: with none of them equality would prove nothing."""
    return sum(float(row.get("grad_norm") or 0) > 0 for row in without_time(run / "metrics.jsonl"))


# ------------------------------------------------------------------ the command


def recipe_of(folder: Path, name: str, further: Sequence[str]) -> Recipe:
    places = [
        f"nemo_grpo.runs_dir={folder}",
        f"nemo_grpo.run_name={name}",
        f"nemo_grpo.warm_start.cache_dir={folder / 'cache'}",
    ]
    return load_recipe(ROOT / "recipes/quickstart.yaml", [*SMALL, *places, *further])


def kill_and_resume(folder: Path, num_kills: int, seed: int, further: Sequence[str]) -> dict[str, Any]:
    """The whole measurement, as the row that is printed; ``further``: overrides of the recipe.

    Raises: Broken: see `run_broken`; or too few steps had signal.
    """
    begin = time.monotonic()
    rng, tally, whole = random.Random(seed), Tally(), recipe_of(folder, "whole", further)
    run_undisturbed(recipe_of(folder, "first", further))  # makes the warm start, no part of the pace
    pace = run_undisturbed(whole)
    if updates(whole.run_dir) < whole.grpo.max_num_steps // 2:
        raise Broken(f"only {updates(whole.run_dir)} steps of {whole.run_dir} changed the weights")
    tally.different += differences(folder / "first", whole.run_dir)
    while tally.kills < num_kills:
        recipe = recipe_of(folder, f"broken-{tally.runs:02d}", further)
        run_broken(recipe, rng, pace, tally, num_kills)
        tally.different += differences(recipe.run_dir, whole.run_dir)
    return asdict(tally) | asdict(pace) | {"seconds": time.monotonic() - begin}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inside", type=int, default=20, help="least number of kills inside a save")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the runs; default: one that is removed at the end")
    parser.add_argument("--async-save", action="store_true", help="save while training goes on")
    parser.add_argument("--json", type=Path, help="also write the row there")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kill-resume-"))
    folder.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    cpu.install()  # as late imports: before the forks
    further = ["policy.megatron_cfg.checkpoint.async_save=true"] if arguments.async_save else []
    row = kill_and_resume(folder.resolve(), arguments.kills, arguments.seed, further)
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=2))
    equal = "no" if row["different"] else "yes"
    print("kills | inside save | before the first step | resumed | runs | bit-equal | seconds")
    print("---|---|---|---|---|---|---")
    counts = (row[name] for name in ("kills", "inside_save", "before_ready", "resumed", "runs"))
    print(*counts, equal, f"{row['seconds']:.0f}", sep=" | ")
    pace = f"{row['start']:.2f} s to start, {row['steps']:.2f} s for the steps, {row['save']:.3f} s a save"
    print(f"undisturbed: {pace}")
    print(f"processes of broken-off saves that did not end by themselves: {row['writers_left']}")
    print("\n".join(row["different"]))
    enough = row["inside_save"] >= arguments.inside
    if not enough:
        found = f"only {row['inside_save']} kills inside a save"
        print(f"{found}, {arguments.inside} wanted: give another --seed")
    if equal == "yes" and arguments.folder is None:
        shutil.rmtree(folder)
    return 0 if equal == "yes" and enough else 1


if __name__ == "__main__":
    sys.exit(main())
