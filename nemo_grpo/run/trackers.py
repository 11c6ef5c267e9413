"""tensorboard, wandb and mlflow, as NeMo-RL's ``logger`` section names them.

Without a login or a server they write into the run's folder: ``tensorboard/``, ``wandb/``, ``mlflow.db``.
A tracker that fails, also while it is opened, is left out from then on; metrics.jsonl has everything.
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
"""Seconds that wandb may take to reach its server; then it writes only to disk."""
PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Packages of each tracker; mlflow needs two more for its database."""
IN_EVERY_STEP = ("time/step", "time/validation")
"""Metrics of which every row has at least one."""
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")
"""Characters that mlflow refuses in a metric's name, such as the @ of pass@8."""

Ended = Literal["FINISHED", "KILLED", "FAILED"]
"""End of a run's process, in mlflow's words: at its last step, asked to stop, by an error."""


class Tracker:
    """Takes a run's metrics; its failure does not end the run."""

    def __init__(self, name: str, begin: Callable[[], Any]) -> None:
        """Open the tracker.

        Args:
            name: for the log.
            begin: opens a `TensorBoard`, `WandB` or `MLflow`.
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
        """Do something with the tracker; after a failure nothing any more."""
        if self.failed:
            return None
        try:
            return work()
        # Any error: servers, networks and three packages have many, and none is worth a run.
        except Exception as error:
            self.failed = True
            log.warning("%s gets no more metrics of this run: %s", self.name, error)


def check_trackers(recipe: Recipe) -> None:
    """Refuse trackers whose package is missing."""
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
    """Open the recipe's trackers; a resumed run continues its entries there.

    Args:
        folder: the run's.
        from_step: last step that stays; -1: the run begins.
    """
    kinds: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
    for name, kind in kinds.items():
        if getattr(recipe.logger, f"{name}_enabled"):
            yield Tracker(name, partial(kind, recipe, folder, from_step))


class TensorBoard:
    """Event files in ``tensorboard/``."""

    def __init__(self, _recipe: Recipe, folder: Path, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the checkpoint are trained, and logged, again.
        self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=from_step + 1)

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self.events.add_scalar(name, value, step)

    def close(self, _ended: Ended) -> None:
        self.events.close()


class WandB:
    """``logger.wandb``: project, name, and anything else that `wandb.init` takes."""

    def __init__(self, recipe: Recipe, folder: Path, _from_step: int) -> None:
        import wandb

        # log_* are options of NeMo-RL's own, which wandb does not know.
        section = {key: value for key, value in recipe.logger.wandb.items() if not key.startswith("log_")}
        settings = wandb.Settings(init_timeout=INIT_SECONDS, console="off", silent=True)
        mode = os.environ.get("WANDB_MODE")
        if not mode:
            mode = "online" if _has_login() else "offline"
        arguments: dict[str, Any] = {
            "project": "nemo_grpo",
            "name": recipe.nemo_grpo.run_name,
            "id": _recorded_id(folder / "wandb-run-id", lambda: uuid.uuid4().hex[:8]),
            "resume": "allow",
            "dir": str(folder),
            "config": recipe.to_dict(),
            "settings": settings,
            "mode": mode,
        } | section
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
    """``logger.mlflow``: experiment_name, run_name, tracking_uri."""

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
        # A run that is continued has ended before.
        self.client.update_run(self.run, status="RUNNING")
        logged_steps = [
            metric.step for key in IN_EVERY_STEP for metric in self.client.get_metric_history(self.run, key)
        ]
        self.last_step = max(logged_steps, default=-1)

    def log(self, row: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        # Logged before a kill. mlflow cannot remove points, so the first ones stay.
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
    """Return the text in a file, made the first time: a resumed run continues the same entry."""
    if not file.exists():
        file.write_text(make())
    return file.read_text()
