"""slurm/lib and the settings that it reads: Slurm's programs are stubs."""

import pytest
from unit.launch.shell import ROOT, bash, write_programs

from nemo_grpo.launch.preflight import shell_settings
from nemo_grpo.recipe import load_recipe

SCONTROL = """
if [ "$2" = hostnames ]; then echo n1; else echo "JobState=RUNNING EndTime=$(date -d +50seconds +%FT%T)"; fi
"""
SRUN = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
SCRIPT = """
export PATH={logs}:$PATH ROOT={root} SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1
JOB_LOGS={logs} LOG={logs}
source {root}/slurm/lib/job.sh
source {root}/slurm/lib/parts.sh
"""
AWAIT = """
await driver
echo "$? ${CAUSE:-none} $RC"
kill $(jobs -rp) 2>/dev/null
exit 0
"""
READY = ": >$LOG/ready"
LISTENS = f"trap 'exit 75' USR1; {READY}; while :; do sleep 0.1; done"
LATE = f"trap 'trap - USR1; sleep 2; exit 75' USR1; {READY}; while :; do sleep 0.1; done"
IS_DEAF = f"trap '' USR1; {READY}; sleep 30"


def part(name, code):
    return f'start {name} {name}.log x -- bash -c "{code}"'


def signal(name, seconds=0, ready=True):
    """Send the job a signal: seconds after the driver is ready, or after now."""
    wait = "until [ -e $LOG/ready ]; do sleep 0.1; done; " if ready else ""
    return f"me=$$; ({wait}sleep {seconds}; kill -{name} $me) &"


def run(folder, body):
    write_programs(folder, scontrol=SCONTROL, srun=SRUN)
    return bash(SCRIPT.format(root=ROOT, logs=folder) + body)


ENDS = {
    "driver": ([part("driver", "exit 3")], "0 none 3"),
    "other part": ([part("driver", "sleep 30"), part("ray-worker", "exit 9")], "1 ray-worker 9"),
    "signal": ([part("driver", LISTENS), signal("USR1")], "0 none 75"),
    # 50 s until the limit, of which 49 are to spare: it has one
    "deaf driver": ([f"SPARE_SECONDS=49; {part('driver', IS_DEAF)}", signal("USR1")], "1 time limit 75"),
    # by hand, and again by Slurm: the driver of this case would not survive a second one
    "two signals": (
        ["SPARE_SECONDS=9", part("driver", LATE), signal("USR1"), signal("USR1", 1)],
        "0 none 75",
    ),
    # Slurm does not answer when asked for the limit
    "silent Slurm": (["scontrol() { :; }", part("driver", LISTENS), signal("USR1")], "0 none 75"),
    "signal before the driver": (
        [part("ray-head", "sleep 30"), signal("USR1", ready=False)],
        "1 time limit 75",
    ),
    "cancelled": ([part("driver", "sleep 30"), signal("TERM", ready=False)], "1 cancelled 143"),
}


@pytest.mark.parametrize(("body", "expected"), ENDS.values(), ids=ENDS)
def test_first_thing_that_ends_a_job_is_its_cause(tmp_path, body, expected):
    done = run(tmp_path, "\n".join(body) + AWAIT)
    assert done.stdout.splitlines()[-1] == expected, done.stdout + done.stderr


EXPLAIN = """
scontrol() {{ echo "JobState=RUNNING StartTime=2026-02-03T04:05:06 PreemptTime={preempted}"; }}
CAUSE={cause} RC={rc}
explain >&2
echo "$CAUSE $RC"
"""


@pytest.mark.parametrize(
    ("preempted", "cause", "rc", "expected"),
    [
        ("2026-02-03T04:15:00", "driver", 75, "preempted 75"),
        ("2026-02-03T04:15:00", "driver", 143, "preempted 75"),  # before it could save
        ("2026-02-03T04:15:00", "driver", 0, "driver 0"),
        ("2026-02-03T04:15:00", "ray-head", 1, "ray-head 70"),
        ("2026-02-03T04:00:00", "driver", 1, "driver 1"),  # in an attempt before
        ("None", "driver", 75, "time limit 75"),
        ("None", "driver", 143, "driver 143"),
    ],
)
def test_driver_that_ends_at_preemption_does_not_count_as_failure(tmp_path, preempted, cause, rc, expected):
    done = run(tmp_path, EXPLAIN.format(preempted=preempted, cause=cause, rc=rc))
    assert done.stdout == f"{expected}\n", done.stderr


ATTEMPT = """
scontrol() {{ if [ "$2" = hostnames ]; then echo n1; else echo "JobId=7 JobState={state} X=1"; fi; }}
ROOT={root} SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_RESTART_COUNT={attempt} JOB_LOGS={logs} {variables}
source {root}/slurm/lib/job.sh
source {root}/slurm/lib/retry.sh
{command}
"""


def in_attempt(folder, command, attempt=0, state="RUNNING", variables="", check=True):
    names = {"root": ROOT, "logs": folder, "state": state, "attempt": attempt, "variables": variables}
    return bash(ATTEMPT.format(command=command, **names), check=check)


def decide(folder, arguments, past=(), state="RUNNING", variables=""):
    """Decision and exit code for cause, code, step at start, step at end, after attempts of the past."""
    rows = [
        f"{i}\ttime\t{cause}\t{code}\t{start}\t{end}\tretry\n"
        for i, (cause, code, start, end) in enumerate(past)
    ]
    (folder / "attempts.tsv").write_text("".join(rows))
    command = f'decide {arguments}; echo "$DECISION $EXIT_WITH"'
    decision, code = in_attempt(folder, command, len(past), state, variables).stdout.split()
    return decision, int(code)


@pytest.mark.parametrize(
    ("arguments", "past", "expected"),
    [
        ("'time limit' 75 0 40", [], ("retry", 75)),
        ("'time limit' 75 40 80", [("time limit", 75, 0, 40)], ("retry", 75)),
        (
            "'time limit' 75 40 40",
            [("time limit", 75, 0, 40)],
            ("stop", 74),
        ),  # nothing saved in a whole attempt
        ("driver 1 0 0", [], ("stop", 1)),  # it never saved anything: the mistake is in the recipe or code
        ("driver 1 0 40", [], ("retry", 1)),
        ("driver 1 40 40", [("driver", 1, 0, 40)], ("stop", 1)),  # the same again
        ("driver 1 40 60", [("driver", 1, 0, 40)], ("retry", 1)),
        ("memory 137 0 0", [], ("retry", 137)),
        ("memory 137 0 0", [("memory", 137, 0, 0)], ("stop", 137)),
        ("ray-worker 71 0 0", [], ("retry", 71)),
        ("ray-worker 71 0 0", [("ray-worker", 71, 0, 0)] * 2, ("retry", 71)),
        ("ray-worker 71 0 0", [("ray-worker", 71, 0, 0)] * 3, ("stop", 71)),  # MAX_RETRIES is 3
        ("node 71 0 40", [("time limit", 75, 0, 40)] * 9, ("retry", 71)),  # time limits are not failures
        ("node 71 0 40", [("preempted", 75, 0, 40)] * 9, ("retry", 71)),  # nor are preemptions
        ("preempted 75 0 0", [], ("retry", 75)),
        ("preempted 75 40 80", [("preempted", 75, 0, 40)] * 9, ("retry", 75)),
        ("preempted 75 40 40", [("time limit", 75, 0, 40)], ("stop", 74)),
        ("preflight 69 0 0", [], ("stop", 69)),
        ("driver 2 40 40", [], ("stop", 2)),
    ],
)
def test_ended_attempt_is_retried_only_if_that_can_help(tmp_path, arguments, past, expected):
    assert decide(tmp_path, arguments, past) == expected


@pytest.mark.parametrize(
    ("arguments", "state", "expected"),
    [
        ("cancelled 143 0 40", "RUNNING", ("stop", 143)),
        ("cancelled 143 0 40", "", ("stop", 143)),
        ("'time limit' 75 0 40", "CANCELLED", ("stop", 143)),
        ("'time limit' 75 0 40", "", ("retry", 75)),  # Slurm's silence is no cancellation
    ],
)
def test_cancelled_job_is_never_retried(tmp_path, arguments, state, expected):
    assert decide(tmp_path, arguments, state=state) == expected


def test_restarts_by_slurm_itself_count_as_failures(tmp_path):
    rows = [("time limit", 75, 0, 40)]
    variables = "SLURM_RESTART_COUNT=4"  # three more than this table knows of
    assert decide(tmp_path, "node 71 40 40", rows, variables=variables) == ("stop", 71)


def test_max_retries_zero_means_never(tmp_path):
    assert decide(tmp_path, "ray-worker 71 0 40", variables="MAX_RETRIES=0") == ("stop", 71)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["step_000005", "step_000120", "tmp_step_000130", "latest"], 120),
        (["step_8", "step_10"], 10),
        (["step_8", "step_10.good", "step_11-old"], 8),  # copies that somebody made
        ([], 0),
    ],
)
def test_newest_checkpoint_is_the_complete_one_with_the_highest_step(tmp_path, names, expected):
    for name in names:
        (tmp_path / "disk" / name).mkdir(parents=True)
    (tmp_path / "checkpoints").symlink_to("disk")  # on another disk than the run
    done = in_attempt(tmp_path, "latest_step", variables=f"CHECKPOINT_DIR={tmp_path}/checkpoints")
    assert done.stdout == f"{expected}\n"


def test_job_cancelled_while_slurm_gives_a_node_up_stays_cancelled(tmp_path):
    stubs = 'sleep() { :; }; scontrol() { echo "scontrol $*"; }'
    done = in_attempt(tmp_path, f"{stubs}; ASKED_TO_STOP=TERM NODE_WAIT=0; requeue node", check=False)
    assert done.returncode == 143
    assert "scontrol requeue" not in done.stdout


STEP = """
scontrol() {{ echo n1; }}
srun() {{ printf '%s\\n' "$@"; }}
ROOT=/repo SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_CPUS_ON_NODE=96 JOB_LOGS=/logs {variables}
source {root}/slurm/lib/job.sh
step nemo-grpo --nodes=2 -- "$PYTHON" -m x "a b"
"""


def srun(folder, variables=""):
    return bash(STEP.format(root=ROOT, variables=variables), cwd=folder).stdout.splitlines()


def test_step_shares_the_nodes_and_passes_words_unbroken(tmp_path):
    arguments = srun(tmp_path, "PYTHON=/env/python")
    options = "--overlap --kill-on-bad-exit=1 --cpus-per-task=96 --nodes=2"
    assert arguments == [*options.split(), "/env/python", "-m", "x", "a b"]


def test_step_in_a_container_sees_repository_submission_folder_logs_and_mounts(tmp_path):
    arguments = srun(tmp_path, "CONTAINER=nemo.sqsh MOUNTS=/data:/data")
    assert "--container-image=nemo.sqsh" in arguments
    assert "--container-name=nemo-grpo" in arguments
    assert f"--container-mounts=/repo:/repo,{tmp_path}:{tmp_path},/logs:/logs,/data:/data" in arguments
    assert f"--container-workdir={tmp_path}" in arguments
    assert arguments[-4:] == ["python", "-m", "x", "a b"]


def test_step_asks_for_cpus_that_every_node_has(tmp_path):
    assert "--cpus-per-task=48" in srun(tmp_path, "SLURM_JOB_CPUS_PER_NODE='64(x2),48'")
    assert "--cpus-per-task=64" in srun(tmp_path, "SLURM_JOB_CPUS_PER_NODE='64(x3)'")


def test_step_has_the_jobs_variables_also_under_export_none(tmp_path):
    variables = """PYTHON=python SLURM_EXPORT_ENV=NONE
        srun() { echo "$SLURM_EXPORT_ENV"; }"""
    assert srun(tmp_path, variables) == ["ALL"]


def sourced(settings, name):
    return bash(f'{settings}printf %s "${name}"').stdout


def test_settings_survive_a_shell_whatever_the_names(tmp_path):
    recipe = load_recipe(
        "quickstart", ["nemo_grpo.run_name=r", f"nemo_grpo.runs_dir={tmp_path}/it's $(a) run"]
    )
    settings = shell_settings(recipe)
    assert sourced(settings, "RUN_DIR") == f"{tmp_path}/it's $(a) run/r"
    assert sourced(settings, "CHECKPOINT_DIR") == f"{tmp_path}/it's $(a) run/r/checkpoints"
    assert sourced(settings, "GPUS_PER_NODE") == "1"
    assert sourced(settings, "TARGET") == "embedded"


@pytest.mark.parametrize("name", ["Qwen/not-on-this-machine", "no such/model name"])
def test_model_that_is_not_here_keeps_its_name(name, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    overrides = [f"policy.model_name={name}"]
    assert sourced(shell_settings(load_recipe("quickstart", overrides)), "MODEL") == name
