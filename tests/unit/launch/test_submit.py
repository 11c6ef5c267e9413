import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner
from unit.launch.shell import write_programs

from nemo_grpo.cli import app
from nemo_grpo.launch.submit import parse_time_limit, spare_seconds, status_of
from nemo_grpo.support.errors import UserError

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "recipes/cw_grpo/cw_grpo-qwen2.5-math-7b-instruct-1n8g.yaml"
QUICKSTART = ROOT / "recipes/quickstart.yaml"


def launch(*arguments, **environment):
    return CliRunner().invoke(app, ["launch", *map(str, arguments)], env=environment)


def test_dry_run_prints_the_command_with_the_recipes_nodes_gpus_and_name():
    options = ("--nodes", 2, "--time", "04:00:00", "--account", "A", "--container", "x.sqsh", "--dry-run")
    done = launch(CLUSTER, *options)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == (
        "CONTAINER=x.sqsh sbatch --job-name=cw_grpo-qwen2.5-math-7b-instruct-1n8g "
        f"--chdir={Path.cwd()} --nodes=2 --gpus-per-node=8 --time=04:00:00 --account=A "
        f"{ROOT}/slurm/train.sbatch {CLUSTER} cluster.num_nodes=2"
    )


def test_interpreter_of_this_machine_is_not_for_a_container(monkeypatch):
    monkeypatch.delenv("PYTHON", raising=False)
    assert launch(QUICKSTART, "--dry-run").stdout.startswith(f"PYTHON={sys.executable} sbatch ")
    assert launch(QUICKSTART, "--dry-run", CONTAINER="x.sqsh").stdout.startswith("CONTAINER=x.sqsh sbatch ")


def test_the_printed_command_is_complete_in_another_shell_and_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shell = {"CONTAINER": "", "MOUNTS": "/a b:/a", "PYTHON": "/opt/python", "LOGS": "/logs"}
    printed = shlex.split(launch(QUICKSTART, "--dry-run", **shell).stdout)
    assert printed[:3] == ["MOUNTS=/a b:/a", "PYTHON=/opt/python", "LOGS=/logs"]
    assert f"--chdir={tmp_path}" in printed


def test_a_shipped_recipe_is_read_from_beside_the_job_scripts(monkeypatch, tmp_path):
    """Of an installed package only that folder is mounted in the container."""
    jobs, own = tmp_path / "jobs", tmp_path / "own.yaml"
    assert CliRunner().invoke(app, ["slurm", "scripts", str(jobs)]).exit_code == 0
    own.write_text("defaults: nemo_grpo://quickstart.yaml\n")
    monkeypatch.setenv("NEMO_GRPO_ROOT", str(jobs))
    for given, file in [("quickstart", jobs / "recipes/quickstart.yaml"), (own, own)]:
        done = launch(given, "--container", "x.sqsh", "--dry-run")
        assert done.stdout.split()[-2:] == [f"{jobs}/slurm/embedded.sbatch", str(file)]
    base = jobs / "recipes/base/embedded.yaml"
    base.write_text(base.read_text() + "sif_dir: of_an_older_release\n")
    done = launch("quickstart", "--dry-run")
    assert "recipes/quickstart.yaml, which jobs read, is not this installation's" in str(done.exception)
    (jobs / "recipes/quickstart.yaml").unlink()
    done = launch("quickstart", "--dry-run")
    assert isinstance(done.exception, UserError)
    assert "recipes/quickstart.yaml is missing; `nemo-grpo slurm scripts DIR`" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("04:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400),
        ("2-00:00:10", 172810), ("100:00:00", 360000), ("UNLIMITED", None), ("-1", None),
        ("0", None), ("00:00:00", None), ("0-0", None),  # Slurm's other words for no limit
    ],
)  # fmt: skip
def test_time_is_read_as_slurm_reads_it(text, seconds):
    limit = parse_time_limit(text)
    assert (limit and limit.total_seconds()) == seconds


@pytest.mark.parametrize("text", ["4h", "90min", "tomorrow", "1:2:3:4", "", "-", "-5", "1-2:3:4:5"])
def test_another_time_is_refused_before_slurm_sees_it(text):
    done = launch(QUICKSTART, "--dry-run", "--time", text)
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith(f"--time={text}: Slurm reads")
    assert "such as 04:00:00" in str(done.exception)


def test_missing_data_are_named_and_nothing_is_submitted(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: name)
    dry = launch(CLUSTER, "--dry-run")
    assert dry.exit_code == 0
    assert "`nemo-grpo data prepare " in dry.stderr
    done = launch(CLUSTER)
    assert str(done.exception) == "the data are not ready, as said above; nothing was submitted"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((QUICKSTART, "--nodes", "2", "--dry-run"), "the embedded engine runs on one node"),
        ((CLUSTER, "policy.generation.vllm_cfg.gpu_memory_utilization=0.1", "--dry-run"), "the plan refuses"),
        ((CLUSTER, "--mounts", "/a:/a", "--dry-run"), "--mounts /a:/a: nothing is mounted without a"),
        ((CLUSTER, "--gpu", "h1000", "--dry-run"), "`nemo-grpo plan --hardware FILE` takes others"),
        ((QUICKSTART,), "sbatch is not on this machine"),
    ],
)
def test_what_cannot_run_is_not_submitted(arguments, part, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _name: None)
    done = launch(*arguments)
    assert isinstance(done.exception, UserError)
    assert part in str(done.exception)


@pytest.mark.parametrize(
    ("option", "part"),
    [
        *((name, "must be name=value, such as qos=high, or one of") for name in ("qos", "qos=", "wrap", "")),
        ("nodes=2", "--sbatch nodes=2: the plan would not know of it; use cluster.num_nodes="),
        *(
            (option, "use cluster.gpus_per_node=")
            for option in (
                *("--gpus-per-node=4", "gpus=1", "gpus-per-task=1", "gpus-per-socket=1", "ntasks-per-gpu=1"),
                *("gres=gpu:1", "gres=gpu", "gres=tmp:5,gpu:h100:2", "tres-per-task=gres/gpu:1"),
                "gpus-per-no=1",  # sbatch takes abbreviations
            )
        ),
        *(
            (f"ntasks{name}=8", "one task on each node")
            for name in ("", "-per-node", "-per-core", "-per-socket", "-per-nod")
        ),
        ("array=0-3", "train one run side by side"),
        ("job-name=../../x", "use nemo_grpo.run_name="),
        ("chdir=/tmp", "relative to the folder of this command"),
        *((option, "use --time") for option in ("time=00:01:00", "time-min=1")),
        *((f"export={value}", "use export=ALL") for value in ("NONE", "NIL", "PYTHON", "ALLOWED")),
        ("wrap=true", "its own script"),
        *(("partition=a", "use --partition"), ("account=a", "use --account")),
        ("container-image=x", "use --container"),
        *(
            (f"signal={signal}", "does not save before its time limit; use signal=B:USR1@SECONDS")
            for signal in (
                *("USR1@600", "SIGUSR1@300", "R:USR1@300"),  # to the steps, not to the script
                *("B:TERM@300", "B:USR2@300", "B:INT@300", "B:12@300"),
                *("B:USR1@30", "B:USR1@45", "B:USR1@x"),  # later than the last moment of a save
            )
        ),
        ("sig=B:TERM@300", "does not save before its time limit"),
    ],
)
def test_options_that_contradict_the_submission_are_refused(option, part):
    done = launch(CLUSTER, "--sbatch", option, "--dry-run")
    assert isinstance(done.exception, UserError), done.output
    assert part in str(done.exception)


@pytest.mark.parametrize(
    ("option", "passed"),
    [
        ("exclusive", "--exclusive"), ("--exclusive", "--exclusive"), ("exclusive=user", "--exclusive=user"),
        ("hold", "--hold"), ("qos=high", "--qos=high"), ("gres=tmpdisk:100", "--gres=tmpdisk:100"),
        ("export=ALL,A=1", "--export=ALL,A=1"), ("gpus-per-node=0", "--gpus-per-node=0"),
        ("signal=B:USR1@900", "--signal=B:USR1@900"), ("mem=64G", "--mem=64G"),
        ("signal=B:10@46", "--signal=B:10@46"), ("signal=RB:SIGUSR1@300", "--signal=RB:SIGUSR1@300"),
        ("signal=B:USR1", "--signal=B:USR1"), ("sig=B:USR1@900", "--signal=B:USR1@900"),
        ("gres-flags=x", "--gres-flags=x"),
    ],
)  # fmt: skip
def test_other_options_are_passed_on(option, passed):
    printed = shlex.split(launch(CLUSTER, "--sbatch", option, "--dry-run").stdout)
    assert printed.index(passed) < printed.index(f"{ROOT}/slurm/train.sbatch")


def test_last_moment_of_a_save_is_the_job_scripts(monkeypatch):
    assert "${SPARE_SECONDS:-45}" in (ROOT / "slurm/lib/parts.sh").read_text()
    monkeypatch.delenv("SPARE_SECONDS", raising=False)
    assert spare_seconds() == 45
    done = launch(CLUSTER, "--sbatch", "signal=B:USR1@90", "--dry-run", SPARE_SECONDS="120")
    assert "with more than 120 seconds" in str(done.exception)


def test_signal_that_sbatch_takes_from_the_shell_is_checked_and_planned():
    done = launch(QUICKSTART, "--dry-run", "--time", "01:00:00", SBATCH_SIGNAL="B:USR1@900")
    assert "--signal=B:USR1@900" in done.stdout
    short = launch(QUICKSTART, "--dry-run", "--time", "00:15:00", SBATCH_SIGNAL="B:USR1@900")
    assert "900 s before the limit" in str(short.exception)
    refused = launch(QUICKSTART, "--dry-run", SBATCH_SIGNAL="USR1@900")
    assert "signal=USR1@900: " in str(refused.exception)


def test_submission_of_a_run_that_saves_nothing_says_what_a_time_limit_costs():
    off = launch(CLUSTER, "checkpointing.enabled=false", "--time", "04:00:00", "--dry-run")
    assert off.stderr.count("nothing is saved, and a job that reaches its time limit loses everything") == 1
    assert "the job is told to stop" in off.stderr
    assert "told to save" not in off.stderr
    on = launch(CLUSTER, "--time", "04:00:00", "--dry-run")
    assert "nothing is saved" not in on.stderr
    assert "the job is told to save and stop" in on.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--container", "/a b/x.sqsh"), "no space in an image's path"),
        (("--container", "x.sqsh", "--logs", "/tmp/a b"), "no space, comma or colon in a path"),
        (("--container", "x.sqsh", "--logs", "/tmp/a,b"), "no space, comma or colon in a path"),
        (("--container", "x.sqsh", "--logs", "/tmp/a:b"), "no space, comma or colon in a path"),
        (("--container", "x.sqsh", "--mounts", "/a b:/a"), "'/a b:/a' is not FROM:TO"),
        (("--container", "x.sqsh", "--mounts", "/a,b:/a"), "'/a' is not FROM:TO"),
        (("--container", "x.sqsh", "--mounts", "/a:b:/a:b"), "'/a:b:/a:b' is not FROM:TO"),
        (("--container", "x.sqsh", "nemo_grpo.run_name=a,b"), "no space, comma or colon in a path"),
    ],
)
def test_paths_that_pyxis_reads_as_others_are_refused(options, said):
    done = launch(QUICKSTART, *options, "--dry-run")
    assert isinstance(done.exception, UserError), done.output
    assert said in str(done.exception)
    without = [part for part in options if part not in ("--container", "x.sqsh", "/a b/x.sqsh")]
    if "--mounts" not in without:
        assert launch(QUICKSTART, *without, "--dry-run").exit_code == 0, "nothing is mounted"


def test_files_that_the_container_does_not_see_are_named(tmp_path, monkeypatch):
    """A recipe of NeMo-RL reaches its files through a link; the home folder is not mounted."""
    elsewhere, here = tmp_path / "clone", tmp_path / "work"
    for folder in (elsewhere, here):
        folder.mkdir()
    base = elsewhere / "base.yaml"
    base.write_text("defaults: nemo_grpo://cluster-quickstart.yaml\ngrpo: {seed: 7}\n")
    (here / "RL").symlink_to(elsewhere)
    (here / "mine.yaml").write_text("defaults: RL/base.yaml\npolicy: {model_name: Qwen/Qwen2.5-0.5B}\n")
    monkeypatch.chdir(here)
    monkeypatch.delenv("HF_HOME", raising=False)
    command = ("mine.yaml", "--container", "x.sqsh", "--dry-run")
    bare = launch(*command).stderr
    assert f"container: recipe {base} is not mounted: add --mounts {elsewhere}:{elsewhere}" in bare
    assert "export HF_HOME=DIR" in bare
    mounts = f"{elsewhere}:{elsewhere},/lustre:/lustre"
    mounted = launch(*command, "--mounts", mounts, HF_HOME="/lustre/hf").stderr
    assert "container: " not in mounted
    moved = launch(*command, "--mounts", f"{elsewhere}:/other").stderr
    assert f"recipe {base} is not mounted" in moved, "the recipe is read at its own path"
    assert "container: " not in launch("mine.yaml", "--dry-run").stderr


def test_submission_names_the_job_and_how_to_follow_it(monkeypatch):
    accepts, refuses = (0, "41;cluster\n", ""), (1, "", "sbatch: error: invalid partition\n specified: x\n")
    sbatch = Mock(return_value=subprocess.CompletedProcess([], *accepts))
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.run", sbatch)
    done = launch(QUICKSTART)
    assert sbatch.call_args.args[0][:2] == ["sbatch", "--parsable"]
    assert done.stdout.splitlines() == [
        "job 41 (quickstart)",
        "  status  nemo-grpo launch status quickstart",
        "  follow  tail -F logs/quickstart/latest/driver.log",
        "  cancel  scancel 41",
    ]
    for arguments, environment in (("--logs", "/my logs"), {}), ((), {"LOGS": "/my logs"}):
        lines = launch(QUICKSTART, *arguments, **environment).stdout.splitlines()
        assert shlex.split(lines[1])[-2:] == ["--logs", "/my logs"]
        assert shlex.split(lines[2])[-1] == "/my logs/quickstart/latest/driver.log"
    sbatch.return_value = subprocess.CompletedProcess([], *refuses)
    done = launch(QUICKSTART, "--partition", "x")
    assert str(done.exception) == "sbatch refuses: sbatch: error: invalid partition specified: x"


@pytest.fixture
def logs(tmp_path):
    """logs/run/41 with two attempts, the second running; checkpoints at steps 5 and 20."""
    for number in (0, 1):
        (tmp_path / f"logs/run/41/attempt-{number}").mkdir(parents=True)
    for step in ("000005", "000020"):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
    latest = tmp_path / "logs/run/41/attempt-1"
    (latest / "driver.log").write_text("one\ntwo\nthree\n")
    (latest / "settings.sh").write_text(f"RUN_DIR=x\nCHECKPOINT_DIR={tmp_path}/checkpoints\n")
    (tmp_path / "logs/run/41/attempts.tsv").write_text(
        "0\t2026-01-02T03:04:05\ttime limit\t75\t0\t5\tretry\n"
    )
    (tmp_path / "logs/run/latest").symlink_to("41/attempt-1")
    return tmp_path / "logs"


@pytest.mark.parametrize("run", ["run", "41"])
def test_status_shows_attempts_newest_checkpoint_and_last_lines(run, logs):
    done = launch("status", run, "--logs", logs, "--lines", 2, PATH="/nonexistent")
    assert done.stdout.splitlines() == [
        "job 41: Slurm does not know it",
        "  attempt 0, ended 2026-01-02T03:04:05: time limit, exit code 75, checkpoints 0 -> 5, retry",
        "  newest checkpoint: step 20",
        f"  logs: {logs}/run/41/attempt-1",
        "  | two",
        "  | three",
    ]


def test_status_of_an_unknown_run_names_the_nearest(logs):
    with pytest.raises(UserError, match="did you mean 'run'"):
        status_of("rum", logs)
    for name in ("../../x", "a/b", "..", ""):
        with pytest.raises(UserError, match="is no name of a run"):
            status_of(name, logs)


@pytest.mark.parametrize(
    ("queue", "run", "job"),
    [
        ("42|run\n7|other", "run", "42"),  # newer than the logs
        ("42|run\n43|run", "42", "42"),
        ("42|new", "new", "42"),  # no logs yet
        ("42|new", "42", "42"),
        ("41|run\n40|run", "run", "41"),
    ],
)
def test_status_of_a_job_that_waits_is_slurms(queue, run, job, logs, monkeypatch):
    reasons = "JobState=PENDING Reason=Resources"
    programs = {"squeue": f"echo '{queue}'", "scontrol": f'[ "$3" = {job} ] && echo "JobId={job} {reasons}"'}
    write_programs(logs.parent / "bin", **programs)
    monkeypatch.setenv("PATH", f"{logs.parent}/bin:/usr/bin:/bin")
    said = launch("status", run, LOGS=str(logs)).stdout.splitlines()
    assert said[0] == f"job {job}: JobState PENDING, Reason Resources"
    assert ("  logs: none yet" in said) == (job == "42")
