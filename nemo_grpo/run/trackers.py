"""The trackers tensorboard, wandb and mlflow, which NeMo-RL's section ``logger`` turns on.

Without a login or a server they write into the run's folder: ``tensorboard/``, ``wandb/``, ``mlflow.db``.
A tracker that fails gets no more metrics, and the run goes on: metrics.jsonl has all of them.
"""

import importlib.util
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nemo_grpo.recipe import Recipe
from nemo_grpo.support.errors import UserError

log = logging.getLogger(__name__)

INIT_SECONDS = 30
"""Seconds that wandb may take to reach its server. After that it writes only to disk."""
PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Packages of each tracker; mlflow needs two more for its database."""
IN_EVERY_STEP = ("time/step", "time/validation")
"""Metrics that tell the logged steps: every row has at least one of them."""
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")
"""Characters that mlflow refuses in a metric's name, such as the @ of pass@8."""

Ended = Literal["FINISHED", "KILLED", "FAILED"]
"""End of a run's process, in mlflow's words: after the last step, by a signal, or with an error."""


class Tracker:
    """Logs a run's metrics to one tracker. If the tracker fails, the run goes on without it."""

    def __init__(self, name: str, begin: Callable[[], Any]) -> None:
        """Open the tracker.

        Args:
            name: Name of the tracker, for log messages.
            begin: Function that opens a `TensorBoard`, `WandB` or `MLflow`.
        """
        self.name = name
        self.failed = False
        self.kind = self._try(begin)

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Log a step's metrics."""
        self._try(lambda: self.kind.log(row, step))

    def close(self, ended: Ended) -> None:
        """Flush, and tell the tracker how the run ended."""
        self._try(lambda: self.kind.close(ended))

    def _try(self, work: Callable[[], Any]) -> Any:
        """Call a function, unless the tracker has failed before. A failure is logged once."""
        if self.failed:
            return None
        try:
            return work()
        # Every error is caught: servers, networks and three packages raise many kinds, and none of them is
        # worth the loss of a run.
        except Exception as error:
            self.failed = True
            log.warning("%s gets no more metrics of this run: %s", self.name, error)


def check_trackers(recipe: Recipe) -> None:
    """Refuse a recipe that turns on a tracker whose package is not installed."""
    for name, packages in PACKAGES.items():
        if not getattr(recipe.logger, f"{name}_enabled"):
            continue
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"logger.{name}_enabled=true: {sys.executable} has no {package}; pip install "
                    f"'nemo-grpo[trackers]', or set it to false"
                )


def open_trackers(recipe: Recipe, folder: Path, from_step: int) -> Iterator[Tracker]:
    """Open the trackers that the recipe turns on. A resumed run continues its entry in each tracker.

    Args:
        recipe: Recipe of the run.
        folder: Folder of the run.
        from_step: Step of the checkpoint that the run continues from; -1 without a checkpoint.
    """
    kinds: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
    for name, kind in kinds.items():
        if getattr(recipe.logger, f"{name}_enabled"):
            yield Tracker(name, partial(kind, recipe, folder, from_step))


class TensorBoard:
    """Writes event files into the run's folder ``tensorboard/``."""

    def __init__(self, _recipe: Recipe, folder: Path, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the checkpoint are trained again, so TensorBoard must drop their first values.
        self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=from_step + 1)

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self.events.add_scalar(name, value, step)

    def close(self, _ended: Ended) -> None:
        self.events.close()


class WandB:
    """Logs to Weights & Biases. Keys of ``logger.wandb``, such as project, are arguments of `wandb.init`."""

    def __init__(self, recipe: Recipe, folder: Path, _from_step: int) -> None:
        import wandb

        # NeMo-RL has options of its own in this section, log_*, which `wandb.init` does not know.
        section = {key: value for key, value in recipe.logger.wandb.items() if not key.startswith("log_")}
        settings = wandb.Settings(init_timeout=INIT_SECONDS, console="off", silent=True)
        mode = os.environ.get("WANDB_MODE")
        if not mode:
            mode = "online" if _has_login() else "offline"
        defaults: dict[str, Any] = {
            "project": "nemo_grpo",
            "name": recipe.nemo_grpo.run_name,
            "id": _recorded_id(folder / "wandb-run-id", lambda: uuid.uuid4().hex[:8]),
            "resume": "allow",
            "dir": str(folder),
            "config": recipe.to_dict(),
            "settings": settings,
            "mode": mode,
        }
        arguments = defaults | section
        try:
            self.run = wandb.init(**arguments)
        except wandb.errors.CommError as error:
            log.warning(
                "wandb writes to %s alone (%s); send it later by `wandb sync`", folder / "wandb", error
            )
            self.run = wandb.init(**arguments | {"mode": "offline"})

    def log(self, row: Mapping[str, float], step: int) -> None:
        self.run.log(dict(row), step=step)

    def close(self, ended: Ended) -> None:
        self.run.finish(exit_code=0 if ended == "FINISHED" else 1)


class MLflow:
    """Logs to mlflow. The section ``logger.mlflow`` may set experiment_name, run_name and tracking_uri."""

    def __init__(self, recipe: Recipe, folder: Path, _from_step: int) -> None:
        from mlflow import MlflowClient

        section = recipe.logger.mlflow
        uri = section.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self.client = MlflowClient(uri)
        name = section.get("experiment_name") or "nemo_grpo"
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        run_name = section.get("run_name") or recipe.nemo_grpo.run_name
        self.run = _recorded_id(
            folder / "mlflow-run-id",
            lambda: self.client.create_run(experiment_id, run_name=run_name).info.run_id,
        )
        # A resumed run already has the status of its first end.
        self.client.update_run(self.run, status="RUNNING")
        logged_steps = [
            metric.step for key in IN_EVERY_STEP for metric in self.client.get_metric_history(self.run, key)
        ]
        self.last_step = max(logged_steps, default=-1)

    def log(self, row: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        # This step was logged before the run was killed, and is trained again. mlflow cannot remove points,
        # so the first ones stay.
        if step <= self.last_step:
            return
        now = int(time.time() * 1000)
        metrics = [Metric(_NOT_IN_A_NAME.sub("_", name), value, now, step) for name, value in row.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def close(self, ended: Ended) -> None:
        self.client.set_terminated(self.run, ended)


def _has_login() -> bool:
    """True if wandb can log in: by an API key in the environment, or an entry in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return "api.wandb.ai" in netrc.read_text()
    except OSError:
        return False


def _recorded_id(file: Path, make: Callable[[], str]) -> str:
    """Return the id in a file. The first call makes the id, so a resumed run continues the same entry."""
    if not file.exists():
        file.write_text(make())
    return file.read_text()
