"""Jobs of the test cluster."""

import time
from dataclasses import dataclass
from pathlib import Path

from cluster import ROOT, Cluster, wait_for

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}


@dataclass
class Job:
    """A submitted job; ``folder`` is where it was submitted from."""

    cluster: Cluster
    folder: Path
    number: str
    name: str

    def field(self, name):
        """A field of scontrol show job."""
        for _ in range(5):  # the controller may be busy
            shown = self.cluster.run("scontrol", "show", "job", self.number, "-o", check=False).stdout.split()
            if shown:
                break
            time.sleep(0.5)
        return next(item.removeprefix(f"{name}=") for item in shown if item.startswith(f"{name}="))

    @property
    def state(self):
        return self.field("JobState")

    @property
    def exit_code(self):
        return int(self.field("ExitCode").split(":")[0])

    @property
    def output(self):
        """What the job's script has written."""
        path = self.folder / f"slurm-{self.number}.out"
        return path.read_text() if path.exists() else ""

    @property
    def logs(self):
        """logs/NAME/JOB."""
        return self.folder / "logs" / self.name / self.number

    def attempts(self):
        """Rows of attempts.tsv: attempt, time, cause, exit code, step at start, at end, decision."""
        path = self.logs / "attempts.tsv"
        return [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition, seconds, what):
        try:
            wait_for(condition, seconds, what)
        except AssertionError as error:
            end = self.output[-3000:]
            raise AssertionError(f"{error}; {self.state}; its output ends with\n{end}") from None

    def wait_for_output(self, text, seconds):
        what = f"{text!r} in the output"
        self.wait_for(lambda: text in self.output or self.state in ENDED, seconds, what)
        assert text in self.output, f"{self.state} without {text!r} in its output:\n{self.output[-3000:]}"

    def wait(self, seconds):
        """Wait for the end; returns the state."""
        self.wait_for(lambda: self.state in ENDED and not self._completing(), seconds, "the end of the job")
        return self.state

    def _completing(self):
        return bool(self.cluster.run("squeue", "-h", "-j", self.number, check=False).stdout.strip())

    def signal(self, number):
        """To the job's script, as Slurm does before the time limit."""
        self.cluster.run("scancel", "--batch", f"--signal={number.name[3:]}", self.number)

    def cancel(self):
        self.cluster.run("scancel", self.number)


def preempt(cluster, folder, node):
    """A job of higher priority that wants the whole node for a moment."""
    wants = ("--partition=urgent", "--exclusive", f"--nodelist={node}", "--time=5", "--wrap=sleep 2")
    done = cluster.run("sbatch", "--parsable", "--job-name=urgent", *wants, cwd=folder)
    return Job(cluster, folder, done.stdout.strip(), "urgent")


def submit(cluster, folder, *arguments, script="train.sbatch", name="job", **env):
    """sbatch OPTION... slurm/SCRIPT ARGUMENT...; options are the arguments that begin with a dash."""
    options = [a for a in arguments if a.startswith("-")]
    rest = [a for a in arguments if not a.startswith("-")]
    command = ["sbatch", "--parsable", f"--job-name={name}", *options, str(ROOT / "slurm" / script), *rest]
    return Job(cluster, folder, cluster.run(*command, cwd=folder, **env).stdout.strip(), name)


def submit_pipeline(cluster, folder, recipe, name, *overrides, **env):
    """slurm/pipeline.sh: the jobs that train the recipe as ``name``, convert and evaluate on its problems."""
    command = [ROOT / "slurm/pipeline.sh", recipe, "recipe", *overrides, f"nemo_grpo.run_name={name}"]
    env = {"CONVERT_OPTIONS": "--cpus-per-task=2", "EVAL_OPTIONS": "--cpus-per-task=2", **env}
    words = cluster.run(*map(str, command), cwd=folder, **env).stdout.replace(",", "").split()
    numbers = dict(zip(words[-6::2], words[-5::2], strict=True))
    names = {"train": name, "convert": f"{name}-convert", "evaluate": f"{name}-eval"}
    return [Job(cluster, folder, numbers[stage], names[stage]) for stage in names]
