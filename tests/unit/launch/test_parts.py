"""slurm/lib/parts.sh: what is noticed while a job's parts run. srun and scontrol are stubs."""

import pytest
from unit.launch.shell import ROOT, bash, write_programs

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
    """A part that runs a piece of bash."""
    return f'start {name} {name}.log x -- bash -c "{code}"'


def signal(name, seconds=0, ready=True):
    """Send the job a signal: seconds after the driver is ready, or after now."""
    wait = "until [ -e $LOG/ready ]; do sleep 0.1; done; " if ready else ""
    return f"me=$$; ({wait}sleep {seconds}; kill -{name} $me) &"


def run(folder, body):
    """Run a piece of bash in a job, Slurm's programs stubs."""
    write_programs(folder, scontrol=SCONTROL, srun=SRUN)
    return bash(SCRIPT.format(root=ROOT, logs=folder) + body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ((part("driver", "exit 3"),), "0 none 3"),
        ((part("driver", "sleep 30"), part("ray-worker", "exit 9")), "1 ray-worker 9"),
        ((part("driver", LISTENS), signal("USR1")), "0 none 75"),
        # 50 s until the limit, of which 49 are to spare: it has one
        ((f"SPARE_SECONDS=49; {part('driver', IS_DEAF)}", signal("USR1")), "1 time limit 75"),
        # by hand, and again by Slurm: the driver of this case would not survive a second one
        (("SPARE_SECONDS=9", part("driver", LATE), signal("USR1"), signal("USR1", 1)), "0 none 75"),
        # Slurm does not answer when asked for the limit
        (("scontrol() { :; }", part("driver", LISTENS), signal("USR1")), "0 none 75"),
        ((part("ray-head", "sleep 30"), signal("USR1", ready=False)), "1 time limit 75"),
        ((part("driver", "sleep 30"), signal("TERM", ready=False)), "1 cancelled 143"),
    ],
    ids=(
        "driver",
        "other part",
        "signal",
        "deaf driver",
        "two signals",
        "silent Slurm",
        "signal before the driver",
        "cancelled",
    ),
)
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
