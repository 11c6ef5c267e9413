"""slurm/lib/retry.sh: which ended attempts go back into the queue. Slurm's scontrol is a stub."""

import pytest
from unit.launch.shell import ROOT, bash

SCRIPT = """
scontrol() {{ if [ "$2" = hostnames ]; then echo n1; else echo "JobId=7 JobState={state} X=1"; fi; }}
ROOT={root} SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_RESTART_COUNT={attempt} JOB_LOGS={logs} {variables}
source {root}/slurm/lib/job.sh
source {root}/slurm/lib/retry.sh
{command}
"""


def run(folder, command, attempt=0, state="RUNNING", variables="", check=True):
    """What a command prints in attempt N of a job."""
    names = {"root": ROOT, "logs": folder, "state": state, "attempt": attempt, "variables": variables}
    return bash(SCRIPT.format(command=command, **names), check=check)


def decide(folder, arguments, past=(), state="RUNNING", variables=""):
    """Decision and exit code for cause, code, step at start, step at end, after attempts of the past."""
    rows = [
        f"{i}\ttime\t{cause}\t{code}\t{start}\t{end}\tretry\n"
        for i, (cause, code, start, end) in enumerate(past)
    ]
    (folder / "attempts.tsv").write_text("".join(rows))
    command = f'decide {arguments}; echo "$DECISION $EXIT_WITH"'
    decision, code = run(folder, command, len(past), state, variables).stdout.split()
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


def test_cancelled_job_is_never_retried(tmp_path):
    assert decide(tmp_path, "cancelled 143 0 40") == ("stop", 143)
    assert decide(tmp_path, "'time limit' 75 0 40", state="CANCELLED") == ("stop", 143)


def test_silence_of_slurm_is_no_cancellation(tmp_path):
    assert decide(tmp_path, "'time limit' 75 0 40", state="") == ("retry", 75)
    assert decide(tmp_path, "cancelled 143 0 40", state="") == ("stop", 143)


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
    done = run(tmp_path, "latest_step", variables=f"CHECKPOINT_DIR={tmp_path}/checkpoints")
    assert done.stdout == f"{expected}\n"


def test_job_cancelled_while_slurm_gives_a_node_up_stays_cancelled(tmp_path):
    stubs = 'sleep() { :; }; scontrol() { echo "scontrol $*"; }'
    done = run(tmp_path, f"{stubs}; ASKED_TO_STOP=TERM NODE_WAIT=0; requeue node", check=False)
    assert done.returncode == 143
    assert "scontrol requeue" not in done.stdout
