"""Submission of a recipe as a Slurm job, and the job's status from Slurm and from its logs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import nemo_grpo
from nemo_grpo.launch.container import check_paths
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.recipe.own import FOLDER_NAME
from nemo_grpo.support import shipped
from nemo_grpo.support.errors import UserError, did_you_mean

SCRIPTS = {"cluster": "train.sbatch", "embedded": "embedded.sbatch"}
"""nemo_grpo.target -> the script that runs it."""

_UNKNOWN = "the plan would not know of it; use "
SET_BY_LAUNCH = {
    "nodes nodefile": f"{_UNKNOWN}cluster.num_nodes=",
    "gpus gpus-per-node gpus-per-socket gpus-per-task gres ntasks-per-gpu tres-per-task": (
        f"{_UNKNOWN}cluster.gpus_per_node="
    ),
    "time time-min": f"{_UNKNOWN}--time",
    "ntasks ntasks-per-core ntasks-per-node ntasks-per-socket": (
        "a job has one task on each node, which starts the others; leave it out"
    ),
    "array": "its jobs would train one run side by side; submit each with a nemo_grpo.run_name of its own",
    "job-name": "logs and status go by the run's name; use nemo_grpo.run_name=",
    "chdir": "the recipe's paths are relative to the folder of this command; change into another one first",
    "wrap": "the job has its own script; leave it out",
    "export export-file": "the job's variables would be lost; use export=ALL,NAME=VALUE or leave it out",
    "account": "use --account",
    "partition": "use --partition",
    "container container-image": "use --container",
    "container-mounts": "use --mounts",
    "signal": "at another signal, or as late, the job does not save before its time limit; use "
    "signal=B:USR1@SECONDS, or RB:USR1@SECONDS, with more than {spare_seconds} seconds",
}
"""Options of sbatch that contradict what a submission sets or plans -> reason and alternative."""
SIGNAL = re.compile(r"(?P<to>[RB]*):(SIG)?(USR1|10)(@(?P<lead>\d+))?", re.IGNORECASE)
"""sbatch's option --signal with SIGUSR1. With B only the script gets the signal, and passes it on to the
driver. Without B Slurm signals the job's steps, which ends Ray. With R the signal also comes before a
reservation takes the nodes."""
SIGNAL_LEAD = 60
"""Seconds before the time limit if --signal names none, sbatch's default."""


def spare_seconds() -> int:
    """Return how many seconds before the time limit a save must end, as slurm/lib/parts.sh computes it."""
    return int(os.environ.get("SPARE_SECONDS") or 45)


def lets_the_job_save(signal: str) -> bool:
    """Check that the job script receives this --signal, early enough before the time limit to save."""
    parsed = SIGNAL.fullmatch(signal)
    if parsed is None or "B" not in parsed["to"].upper():
        return False
    return int(parsed["lead"] or SIGNAL_LEAD) > spare_seconds()


def _names_no_gpu(value: str) -> bool:
    return "gpu" not in value


ALLOWED: dict[str, Callable[[str], bool]] = {
    "signal": lets_the_job_save,
    # 0 is needed on clusters whose Slurm does not manage GPUs.
    "gpus-per-node": lambda value: value == "0",
    "export": lambda value: value.split(",")[0] == "ALL",
    "gres": _names_no_gpu,
    "tres-per-task": _names_no_gpu,
}
"""Option of sbatch -> test for values that do not contradict the recipe or the job scripts."""
FLAGS = (
    "contiguous",
    "exclusive",
    "hold",
    "no-kill",
    "no-requeue",
    "overcommit",
    "oversubscribe",
    "reboot",
    "requeue",
    "spread-job",
    "use-min-nodes",
)
"""Options of sbatch without a value."""

INHERITED = ("CONTAINER", "MOUNTS", "PYTHON", "LOGS", "NEMO_GRPO_ROOT", "MAX_RETRIES")
"""Variables that the job scripts read and a job takes from the shell that submits it."""


@dataclass(frozen=True)
class Submission:
    """An sbatch command and the variables added to its environment."""

    command: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        """Write a command line for any shell and folder, including the variables that the job inherits."""
        variables = {name: os.environ[name] for name in INHERITED if os.environ.get(name)}
        variables |= self.environment
        assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        return " ".join([*assignments, shlex.join(self.command)])


def scripts_folder() -> Path:
    """Find the folder of the job scripts: in NEMO_GRPO_ROOT, or else in this clone of the repository."""
    root = Path(os.environ.get("NEMO_GRPO_ROOT") or Path(nemo_grpo.__file__).parents[1]).absolute()
    if not (root / "slurm").is_dir():
        raise UserError(
            f"NEMO_GRPO_ROOT: {root} has no job scripts; `nemo-grpo slurm scripts DIR` writes them for an "
            "installation without the repository; then export NEMO_GRPO_ROOT=DIR"
        )
    return root / "slurm"


def recipe_for_job(name: Path) -> Path:
    """Find the recipe file that the job will read. For a shipped recipe it is the job scripts' copy."""
    file = shipped.recipe_file(name)
    package = shipped.folder("recipes").resolve()
    if not file.resolve().is_relative_to(package):
        return file.absolute()
    # A container does not see the folder in which pip installed the package.
    copy = scripts_folder().parent / "recipes" / file.resolve().relative_to(package)
    if not copy.is_file():
        raise UserError(
            f"NEMO_GRPO_ROOT: {copy} is missing; `nemo-grpo slurm scripts DIR` writes the recipes, too; then "
            "export NEMO_GRPO_ROOT=DIR"
        )
    if load_tree(copy) != load_tree(file):
        raise UserError(
            f"NEMO_GRPO_ROOT: {copy}, which jobs read, is not this installation's recipe; write the folder "
            "anew with `nemo-grpo slurm scripts DIR`"
        )
    return copy


def prepare(
    recipe: Recipe,
    path: Path,
    overrides: Sequence[str],
    options: Mapping[str, str | None],
    environment: Mapping[str, str | None],
) -> Submission:
    """Build the command that submits a recipe. The recipe gives the nodes, GPUs and name of the job.

    Args:
        recipe: the loaded recipe.
        path: file of the recipe.
        overrides: overrides of the recipe; the job loads it with the same ones.
        options: long options of sbatch. None leaves an option out, "" is for an option without a value.
        environment: variables of the job scripts, such as CONTAINER. None keeps this shell's value.
    """
    target = recipe.nemo_grpo.target
    cluster = recipe.cluster
    if target == "embedded" and cluster.num_nodes > 1:
        raise UserError(
            f"cluster.num_nodes={cluster.num_nodes}: the embedded engine runs on one node; set "
            "nemo_grpo.target=cluster, or cluster.num_nodes=1"
        )
    all_options = {
        "job-name": recipe.nemo_grpo.run_name,
        # The recipe's relative paths start in the folder where the user typed the command.
        "chdir": str(Path.cwd()),
        "nodes": str(cluster.num_nodes),
    }
    if target == "cluster" or recipe.nemo_grpo.engine.device == "cuda":
        all_options["gpus-per-node"] = str(cluster.gpus_per_node)
    all_options |= {name: value for name, value in options.items() if value is not None}
    # For sbatch, SBATCH_SIGNAL overrides the #SBATCH line of the script. So its value is checked like that of
    # an option.
    inherited_signal = os.environ.get("SBATCH_SIGNAL")
    if inherited_signal and "signal" not in all_options:
        name, value = sbatch_option(f"signal={inherited_signal}")
        all_options[name] = value
    words = [f"--{name}={value}" if value else f"--{name}" for name, value in all_options.items()]
    command = ("sbatch", *words, str(scripts_folder() / SCRIPTS[target]), str(path), *overrides)
    added = {name: value for name, value in environment.items() if value is not None}
    job_variables = {**os.environ, **added}
    check_paths(scripts_folder().parent, job_variables, recipe.nemo_grpo.run_name)
    # A container has its own Python. Without one, the job uses the Python that runs this command.
    if not job_variables.get("CONTAINER") and "PYTHON" not in os.environ:
        added["PYTHON"] = sys.executable
    return Submission(command, added)


def sbatch_option(option: str) -> tuple[str, str]:
    """Split an sbatch option, ``name=value`` or one of `FLAGS`, into its name and value ("" for a flag).

    Raises:
        UserError: the option is malformed, or contradicts the recipe or the job scripts.
    """
    name, equals, value = option.lstrip("-").partition("=")
    is_complete = bool(value) if equals else name in FLAGS
    if not is_complete:
        raise UserError(
            f"--sbatch {option!r} must be name=value, such as qos=high, or one of {', '.join(FLAGS)}"
        )
    reasons = {}
    for names, reason in SET_BY_LAUNCH.items():
        for contradicting_name in names.split():
            reasons[contradicting_name] = reason
    full_names = [name]
    if name not in reasons:
        # sbatch also accepts abbreviated names, so an abbreviation of a refused option is refused.
        full_names = [full_name for full_name in reasons if full_name.startswith(name)]
    if not full_names:
        return name, value
    full_name = full_names[0]
    if full_name not in ALLOWED or not ALLOWED[full_name](value):
        reason = reasons[full_name].format(spare_seconds=spare_seconds())
        raise UserError(f"--sbatch {option}: {reason}")
    return full_name, value


def signal_lead(target: str, signal: str | None) -> int:
    """Find how many seconds before its time limit a job is told to save and stop.

    Args:
        target: nemo_grpo.target, which decides the job script.
        signal: value of sbatch's --signal, accepted by `lets_the_job_save`; None if it is not given.
    """
    # sbatch's order of precedence: the option, the variable SBATCH_SIGNAL, the #SBATCH line of the script.
    if not signal:
        signal = os.environ.get("SBATCH_SIGNAL")
    if not signal:
        script = (scripts_folder() / SCRIPTS[target]).read_text()
        signal = script.partition("#SBATCH --signal=")[2]
    parsed = SIGNAL.match(signal)
    if parsed is None or parsed["lead"] is None:
        return SIGNAL_LEAD
    return int(parsed["lead"])


def submit(submission: Submission) -> str:
    """Run sbatch; returns the job's number."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on this machine; use a login node, or see the command by --dry-run")
    command = [submission.command[0], "--parsable", *submission.command[1:]]
    environment = {**os.environ, **submission.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"sbatch refuses: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout.strip().split(";")[0]


UNLIMITED = ("infinite", "unlimited", "-1")


def parse_time_limit(text: str) -> timedelta | None:
    """Read a time limit as ``sbatch --time`` does. Returns None for no limit, which zero also means in Slurm.

    Forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
    days-hours:minutes:seconds, infinite, unlimited.
    """
    if text.lower() in UNLIMITED:
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    units: tuple[str, ...] = ("minutes", "seconds")
    # The first number counts hours after a number of days, or if there are three numbers. Otherwise it counts
    # minutes, so that 4:00 is four minutes.
    if dash or len(parts) == 3:
        units = ("hours", "minutes", "seconds")
    numbers = [days, *parts] if dash else parts
    if len(parts) > len(units) or not all(map(str.isdecimal, numbers)):
        raise UserError(
            f"--time={text}: Slurm reads minutes, hours:minutes:seconds or days-hours:minutes:seconds, such "
            "as 04:00:00"
        )
    # Slurm allows the last units to be omitted, so there may be fewer numbers than units.
    by_unit = {unit: int(part) for unit, part in zip(units, parts, strict=False)}
    limit = timedelta(days=int(days or 0), **by_unit)
    return limit or None


FIELDS = ("JobState", "Reason", "RunTime", "TimeLimit", "NodeList", "Restarts", "ExitCode")
ATTEMPT = "  attempt {}, ended {}: {}, exit code {}, checkpoints {} -> {}, {}"
"""A row of attempts.tsv, whose columns slurm/lib/retry.sh writes."""


def status_of(run: str, logs: Path, num_lines: int = 5) -> list[str]:
    """Describe the newest job of a run: Slurm's state, attempts, newest checkpoint, end of the log.

    Args:
        run: name of the run, or number of the job.
        logs: folder of all logs.
        num_lines: number of last lines to show of the driver's log.
    """
    if not re.fullmatch(FOLDER_NAME, run, re.ASCII):
        raise UserError(f"{run!r} is no name of a run, and no number of a job")
    folder = _find(run, logs)
    queued = _queued(run)
    job = folder.parent.name if folder else ""
    # Slurm numbers its jobs in order. A queued job that is newer than the newest logs has not started yet.
    if queued and int(queued) > int(job or 0):
        return [_state_of(queued), "  logs: none yet"]
    if folder is None:
        runs_with_logs = [path.parent.name for path in logs.glob("*/latest")]
        raise UserError(
            f"no job of {run!r} has logs in {logs}, nor is one queued; name the folder by --logs"
            f"{did_you_mean(run, runs_with_logs)}"
        )
    return [_state_of(job), *_attempts(folder), *_newest_step(folder), *_end_of_log(folder, num_lines)]


def _find(run: str, logs: Path) -> Path | None:
    """Find the log folder of a run's newest attempt."""
    if run.isdigit():
        attempts = [path for path in logs.glob(f"*/{run}/attempt-*") if path.is_dir()]
        if attempts:
            return max(attempts, key=lambda path: int(path.name.removeprefix("attempt-")))
    latest = logs / run / "latest"
    return latest.resolve() if latest.is_dir() else None


def _queued(run: str) -> str | None:
    """Find the newest job of that name or number in Slurm's queue."""
    queue = _slurm("squeue", "--me", "--noheader", "--format=%A|%j")
    jobs = []
    for line in queue.splitlines():
        job, name = line.split("|", 1)
        if run in (job, name):
            jobs.append(job)
    return max(jobs, key=int, default=None)


def _state_of(job: str) -> str:
    """Describe a job on one line with fields of `scontrol show job`."""
    fields = []
    for line in _slurm("scontrol", "show", "job", job, "-o").splitlines():
        # An array shares its number with its last task. For that number Slurm shows all tasks of the array.
        if not line.startswith(f"JobId={job} "):
            continue
        for item in line.split():
            key, _, value = item.partition("=")
            if key in FIELDS and value not in ("", "None"):
                fields.append(f"{key} {value}")
    if not fields:
        fields.append("Slurm does not know it")
    return f"job {job}: {', '.join(fields)}"


def _attempts(folder: Path) -> Iterator[str]:
    table = folder.parent / "attempts.tsv"
    if not table.exists():
        return
    for row in table.read_text().splitlines():
        yield ATTEMPT.format(*row.split("\t"))


def _newest_step(folder: Path) -> Iterator[str]:
    """Name the newest checkpoint. Before the preflight has written settings.sh its folder is unknown."""
    settings = folder / "settings.sh"
    if not settings.exists():
        return
    assignment = re.search(r"^CHECKPOINT_DIR=(.*)$", settings.read_text(), re.M)
    if assignment is None:
        return
    checkpoints = Path(shlex.split(assignment[1])[0])
    names = [path.name.removeprefix("step_") for path in checkpoints.glob("step_*")]
    step = max((int(name) for name in names if name.isdigit()), default=0)
    newest = f"step {step}" if step else "none"
    yield f"  newest checkpoint: {newest}"


def _end_of_log(folder: Path, num_lines: int) -> Iterator[str]:
    yield f"  logs: {folder}"
    driver = folder / "driver.log"
    if not driver.exists():
        return
    lines = driver.read_text(errors="replace").splitlines()
    for line in lines[-num_lines:]:
        yield f"  | {line}"


def _slurm(*command: str) -> str:
    """Return the output of a Slurm program, or "" if Slurm is not installed or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
