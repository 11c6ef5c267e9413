"""Start of a run, which is the same for every trainer of NeMo-RL.

`start` makes a `Started`. From it the `set_up` of `sync`, `sft` or `single_controller` makes a `Training`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.nemo_rl_batches import set_names, set_up_data
from nemo_grpo.nemorl.pretrained import load_tokenizer, model_config
from nemo_grpo.nemorl.task_data import TaskProblems, read_problems
from nemo_grpo.nemorl.workarounds.async_save import check_async_save
from nemo_grpo.nemorl.workarounds.killed_conversion import remove_remains
from nemo_grpo.nemorl.workarounds.lost_optimizer import resume_with_optimizer
from nemo_grpo.nemorl.workarounds.ray_address import check_ray_address
from nemo_grpo.nemorl.workarounds.tensor_pickles import keep_tensor_pickles_plain
from nemo_grpo.run.recipe_checks import check_recipe
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import VALIDATION_SET

if TYPE_CHECKING:
    from nemo_grpo.nemorl.checkpoints import SideFiles
    from nemo_grpo.nemorl.compat import Parts
    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.nemorl.nemo_rl_batches import Data
    from nemo_grpo.recipe import Recipe

log = logging.getLogger(__name__)

TRANSFER_QUEUE = "transfer_queue"
"""Module of the data plane, which NeMo-RL imports only once all workers are up."""


class Started(NamedTuple):
    """Objects of a run that exist before NeMo-RL's workers start.

    Attributes:
        problems: the task's; None for NeMo-RL's own data.
        hf_config: transformers' configuration of the model.
        processor: None without images.
        tokenizer: the model's.
    """

    problems: TaskProblems | None
    hf_config: Any
    processor: Any
    tokenizer: Any

    @property
    def encoder(self) -> Any:
        """The processor with images, else the tokenizer."""
        return self.processor or self.tokenizer


@dataclass(frozen=True, kw_only=True)
class Training:
    """A trainer of NeMo-RL that is ready to run.

    Attributes:
        parts: the objects of NeMo-RL's set-up, some of them replaced by ours.
        train: runs the trainer to its end.
        environments: {task: actor} of training and of validation.
        side_files: files that go into every checkpoint.
        last_step: step at which training is complete.
        validation_sets: name of each validation problem's set; empty if the trainer makes no rollouts.
        watches_itself: the trainer notices by itself that it makes no progress.
    """

    parts: Parts
    train: Callable[[], None]
    environments: list[Any]
    side_files: SideFiles
    last_step: int
    validation_sets: Sequence[str] = ()
    watches_itself: bool = False


def start(run: ClusterRun) -> Started:
    """Check all that needs no worker, read the task's files, connect to Ray, load the tokenizer."""
    recipe = run.recipe
    config = run.master_config
    check_recipe(recipe, continues=True).refuse()
    share_sources()
    problems = None
    if recipe.nemo_grpo.task is not None:
        problems = read_problems(run)
    check_async_save(run)
    check_data_plane(recipe)
    keep_tensor_pickles_plain()
    hf_config = model_config(run)
    remove_remains(config.policy)
    resume_with_optimizer(recipe)
    next_folder = compat.import_name("nemo_rl.utils.logger:get_next_experiment_dir")
    config.logger["log_dir"] = next_folder(config.logger["log_dir"])
    check_ray_address()
    compat.import_name("nemo_rl.distributed.virtual_cluster:init_ray")()
    processor, tokenizer = load_tokenizer(run)
    return Started(problems, hf_config, processor, tokenizer)


def share_sources() -> None:
    """Let Ray's workers import this package: they inherit the driver's environment, not its `sys.path`."""
    root = Path(__file__).parents[2]
    if root.name in ("site-packages", "dist-packages"):
        raise UserError(
            f"PYTHONPATH: nemo_grpo was imported from {root}, whose other packages would shadow the "
            "workers' own; put the repository, or what `nemo-grpo slurm scripts DIR` writes, on PYTHONPATH, "
            "where every node sees it"
        )
    paths = [str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))


def check_data_plane(recipe: Recipe) -> None:
    """Check now that the driver has TransferQueue: NeMo-RL imports it only when all workers are up."""
    if not recipe.uses_data_plane:
        return
    if importlib.util.find_spec(TRANSFER_QUEUE) is None:
        raise UserError(
            f"data_plane.enabled=true: the driver's Python has no {TRANSFER_QUEUE}; install TransferQueue, "
            "which NeMo-RL's pyproject.toml pins, or set it to false"
        )
    if not recipe.loss_fn.is_stock and recipe.nemo_grpo.engine.diagnostics_period > 0:
        log.info("data_plane.enabled=true: conversations do not reach the driver; no diagnostics.jsonl")


def rollout_data(run: ClusterRun, started: Started) -> Data:
    """Make the data sets, and start the environments: the task's, or NeMo-RL's own."""
    if started.problems is None:
        return set_up_data(run, started.encoder)
    # Not at the top: the module imports Ray and NeMo-RL.
    from nemo_grpo.nemorl.environments import setup_data

    return setup_data(run, started.problems, started.encoder)


def trained_environments(run: ClusterRun, data: Data, parts: Parts) -> list[Any]:
    """Return [{task: environment} of training, {task: environment} of validation]."""
    if run.recipe.env.should_use_nemo_gym:
        # NeMo-RL's `setup` has started NeMo-Gym's servers, which serve training and validation.
        return [{"nemo_gym": parts.nemo_gym}] * 2
    _, _, training, validation = data
    return [training, validation]


def validation_sets(run: ClusterRun, started: Started, data: Data) -> list[str]:
    """Name the set of each validation problem; [] if NeMo-RL's own data have only one set."""
    held_out = () if started.problems is None else started.problems.held_out
    names = [problem.metadata.get(VALIDATION_SET, "") for problem in held_out]
    return names or set_names(run, data[1])
