"""slurm/*.sbatch and pipeline.sh from first line to last. Slurm's programs and Python are stubs."""

import os
import shlex
from pathlib import Path

import pytest
from unit.launch.shell import ROOT, bash, write_programs

STUBS = {
    # scontrol show hostnames | show job NUMBER -o; the last task of an array has a line for every task
    "scontrol": """
if [ "$2" = hostnames ]; then echo n1; exit; fi
for _ in 1 2; do echo "JobId=7 JobName=x Command=$SCRIPT a b=c WorkDir=/w StdOut=/w/o JobState=RUNNING"; done
""",
    "srun": """
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
""",
    "squeue": 'echo "$QUEUE"',
    "scancel": 'echo "scancel $*" >>"$CALLS"',
    "sbatch": """
echo "sbatch $*" >>"$CALLS"
case $* in *"$REFUSED"*) exit 1 ;; esac
echo "11;cluster"
""",
    "python": """
case $* in
    *"launch settings"*) cat "$SETTINGS" ;;
    *) printf '%s\\n' "$*" >>"$CALLS" ;;
esac
""",
}


@pytest.fixture
def place(tmp_path):
    """A repository with a space in its name, stubs, a run with one checkpoint, settings that name it."""
    write_programs(tmp_path / "bin", **STUBS)
    (tmp_path / "my repo").mkdir()
    (tmp_path / "my repo/slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "disk/step_000020").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "settings").write_text(
        f"RUN_DIR={tmp_path}/run CHECKPOINT_DIR={tmp_path}/run/checkpoints MODEL=base LORA=\n"
        "TARGET=embedded NUM_NODES=1 GPUS_PER_NODE=1 SAVES=yes\n"
    )
    (tmp_path / "calls").touch()
    return tmp_path


def environment(place, script, variables):
    """Of a job of this script, the stubs first on the path."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PATH": f"{place}/bin:{os.environ['PATH']}",
        "PYTHON": str(place / "bin/python"),
        "SCRIPT": str(place / "my repo/slurm" / script),
        "CALLS": str(place / "calls"),
        "SETTINGS": str(place / "settings"),
        "REFUSED": "nothing",
        "QUEUE": "",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": script,
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_SUBMIT_DIR": str(place),
        **variables,
    }


def run(place, script, *arguments, code=0, **variables):
    command = shlex.join([str(place / "my repo/slurm" / script), *arguments])
    done = bash(f"bash {command}", check=False, cwd=place, env=environment(place, script, variables))
    assert done.returncode == code, done.stdout + done.stderr
    return done


def calls(place):
    return (place / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("job", "folder"),
    [
        ("eval.sbatch", "eval"), ("gpg-7b_x", "gpg-7b_x"), ("../../x", "_._.._x"), ("..", "_."),
        ("/tmp/x y", "_tmp_x_y"), (".x", "_x"),
    ],
)  # fmt: skip
def test_logs_of_a_job_lie_in_a_folder_of_the_logs(place, job, folder):
    run(place, "eval.sbatch", "run/hf", "aime24", SLURM_JOB_NAME=job)
    assert [path.name for path in (place / "logs").iterdir()] == [folder]
    assert (place / "logs" / folder / "latest").resolve() == place / "logs" / folder / "7/attempt-0"


def test_last_array_task_finds_a_repository_path_with_a_space(place):
    run(place, "eval.sbatch", "run/hf", "aime24,math500", **array(1, 0, 1))
    assert calls(place) == [evaluation("math500")]


def array(task, first, last, step=1, count=None):
    """Return Slurm's variables of one task of an array."""
    count = (last - first) // step + 1 if count is None else count
    values = {"ID": task, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    variables = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}
    return {"SLURM_ARRAY_JOB_ID": "7", **variables}


def evaluation(name):
    return f"-m nemo_grpo.cli eval --model run/hf --out run/eval/{name} --benchmarks {name}"


def test_evaluation_without_an_array_takes_every_benchmark(place):
    done = run(place, "eval.sbatch", "run/hf", " aime24, math500", "--k", "4")
    assert calls(place) == [f"{evaluation(name)} --k 4" for name in ("aime24", "math500")]
    assert "no task" not in done.stdout


def test_a_benchmark_that_fails_does_not_keep_the_next_from_its_result(place):
    fails = """
printf '%s\\n' "$*" >>"$CALLS"
case $* in *aime24*) exit 3 ;; esac
"""
    write_programs(place / "bin", python=fails)
    run(place, "eval.sbatch", "run/hf", "aime24,math500", code=3)
    assert calls(place) == [evaluation("aime24"), evaluation("math500")]


@pytest.mark.parametrize(
    ("benchmarks", "variables", "said"),
    [
        ("a,b", array(0, 0, 0), "this array has no task for b: use --array=0-1"),
        ("a,b,c", array(0, 0, 1), "this array has no task for c: use --array=0-2"),
        ("a,b", array(1, 1, 2), "this array has no task for a: use --array=0-1"),
        ("a,b,c", array(0, 0, 2, step=2), "this array has no task for b: use --array=0-2"),
        ("a,b,c", array(0, 0, 2, count=2), "this array has 2 tasks for 3 benchmarks: use --array=0-2"),
    ],
)
def test_benchmarks_without_a_task_of_the_array_are_named(place, benchmarks, variables, said):
    done = run(place, "eval.sbatch", "run/hf", benchmarks, **variables)
    assert said in done.stdout
    assert len(calls(place)) == 1


def test_array_task_without_a_benchmark_is_refused(place):
    done = run(place, "eval.sbatch", "run/hf", "a,b", code=2, **array(2, 0, 2))
    assert "array task 2, but only 2 benchmarks: use --array=0-1" in done.stdout
    assert calls(place) == []


def test_conversion_follows_a_link_to_the_checkpoints(place):
    run(place, "convert.sbatch", "x.yaml")
    words = calls(place)[0].split()
    assert words[words.index("--megatron-checkpoint") + 1] == f"{place}/run/checkpoints/step_000020"


def test_conversion_of_another_job_is_resumed(place):
    run(place, "convert.sbatch", "x.yaml")
    words = calls(place)[0].split()
    assert "--resume" in words
    assert "--force" not in words


@pytest.mark.parametrize("made", ["hf-step_000020", ".hf-step_000020.partial"])
def test_model_of_an_older_checkpoint_of_the_same_step_is_converted_again(place, made):
    (place / "run" / made).mkdir()
    os.utime(place / "run" / made, (1, 1))
    run(place, "convert.sbatch", "x.yaml")
    assert "--force" in calls(place)[0].split()
    assert "--resume" not in calls(place)[0].split()


def test_every_kept_checkpoint_is_converted_or_the_one_that_is_named(place):
    for name in ("step_9", "step_100", "tmp_step_101"):
        (place / "disk" / name).mkdir()
    run(place, "convert.sbatch", "x.yaml", STEP="20")
    assert [line.split()[4].rpartition("/")[2] for line in calls(place)] == ["step_000020"]
    assert (place / "run/hf-latest").readlink() == Path("hf-step_000020")
    (place / "calls").write_text("")
    (place / "run/hf-step_000020").mkdir()
    run(place, "convert.sbatch", "x.yaml", STEP="20")
    assert calls(place) == [], "the model is there"
    (place / "run/hf-step_000020").rmdir()
    run(place, "convert.sbatch", "x.yaml")
    converted = [line.split()[4].rpartition("/")[2] for line in calls(place)]
    assert converted == ["step_9", "step_000020", "step_100"]
    assert (place / "run/hf-latest").readlink() == Path("hf-step_100")


def test_pipeline_chains_its_jobs(place):
    assert run(place, "pipeline.sh", "x.yaml", "aime24").stdout == "train 11, convert 11, evaluate 11\n"
    assert "--dependency=afterok:11 " in calls(place)[2], "the number alone, without the cluster's name"


def test_pipeline_cancels_its_jobs_when_a_stage_is_refused(place):
    done = run(place, "pipeline.sh", "x.yaml", "aime24", code=1, REFUSED="convert.sbatch")
    assert calls(place)[-1] == "scancel 11"
    assert "cancelled those before it: 11" in done.stderr


def test_pipeline_checks_its_benchmarks_before_the_first_job(place):
    run(place, "pipeline.sh", "x.yaml", "aime24,nosuch", "a=1", EVAL_ARGUMENTS="--k 4")
    model = f"{place}/run/hf-latest"
    checked = f"eval --check --model {model} --benchmarks aime24,nosuch --recipe x.yaml --k 4 a=1"
    assert calls(place)[0] == f"-m nemo_grpo.cli {checked}"
    refuses = 'case $* in *"launch settings"*) cat "$SETTINGS" ;; *) exit 2 ;; esac'
    write_programs(place / "bin", python=refuses)
    (place / "calls").write_text("")
    run(place, "pipeline.sh", "x.yaml", "aime24,nosuch", code=2)
    assert calls(place) == [], "nothing is submitted"


def test_pipeline_of_a_run_that_saves_nothing_is_refused(place):
    settings = (place / "settings").read_text().replace("SAVES=yes", "SAVES=")
    (place / "settings").write_text(settings)
    done = run(place, "pipeline.sh", "x.yaml", "aime24", code=2)
    assert "nothing is saved, so there would be nothing to convert" in done.stderr
    assert calls(place) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CONTAINER", "/images/a b.sqsh"), ("MOUNTS", "/a b:/a"), ("LOGS", "/tmp/a,b"), ("LOGS", "/tmp/a:b"),
        ("LOGS", "/tmp/a b"),
    ],
)  # fmt: skip
def test_job_refuses_paths_that_its_container_would_not_get(place, name, value):
    repository = place / "repo"
    (place / "my repo").rename(repository)
    variables = {"CONTAINER": "x.sqsh", "NEMO_GRPO_ROOT": str(repository), name: value}
    command = shlex.join([str(repository / "slurm/eval.sbatch"), "run/hf", "aime24"])
    names = environment(place, "eval.sbatch", variables)
    done = bash(f"bash {command}", check=False, cwd=place, env=names)
    assert done.returncode == 2
    assert "Pyxis takes no space" in done.stdout
    assert calls(place) == []


LIST = """
source "$ROOT/slurm/lib/job.sh"
RECIPE=$PWD/list.txt
recipe_of_task
echo "$JOB $RECIPE $(log_name "$RECIPE")"
"""


def test_task_of_an_array_takes_its_recipe_of_the_list(place):
    """The number of an array's last task is the array's, which to Slurm means every task."""
    (place / "list.txt").write_text("/out/recipes/a=1-s0.yaml\n/out/recipes/b-s0.yaml\n")
    names = environment(place, "train.sbatch", {"ROOT": str(ROOT), "SLURM_JOB_NAME": "out"})
    for task, expected in (
        (0, "7_0 /out/recipes/a=1-s0.yaml a=1-s0"),
        (1, "7_1 /out/recipes/b-s0.yaml b-s0"),
    ):
        variables = names | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}
        assert bash(LIST, cwd=place, env=variables).stdout == f"{expected}\n"
    missing = bash(LIST, cwd=place, env=variables | {"SLURM_ARRAY_TASK_ID": "2"}, check=False)
    assert missing.returncode == 2
    assert "list.txt has no recipe for array task 2" in missing.stdout
    alone = bash(LIST.replace("list.txt", "x.yaml"), cwd=place, env=names).stdout
    assert alone == f"7 {place}/x.yaml out\n"


PREFLIGHT = """
set -u
source "$ROOT/slurm/lib/job.sh"
source "$ROOT/slurm/lib/retry.sh"
source "$ROOT/slurm/lib/preflight.sh"
{before}
LOG=$PWD JOB_LOGS=$PWD RUN_DIR=$PWD/run CHECKPOINT_DIR=$PWD/run/checkpoints
{check}
echo passed
"""


def check(place, check, before="", **variables):
    names = environment(place, "train.sbatch", {"ROOT": str(ROOT), "SLURMD_NODENAME": "n1", **variables})
    return bash(PREFLIGHT.format(before=before, check=check), check=False, cwd=place, env=names)


def test_second_job_in_a_run_folder_is_refused_while_the_first_runs(place):
    (place / "run/.slurm-job").write_text("5\n")
    refused = check(place, "claim_run", QUEUE="5")
    assert refused.returncode == 69
    assert "job 5 trains in" in refused.stdout
    assert "passed" in check(place, "claim_run", QUEUE="").stdout
    assert (place / "run/.slurm-job").read_text() == "7\n"
    assert "passed" in check(place, "claim_run", QUEUE="7").stdout  # an attempt after


def test_node_local_checkpoint_folder_is_refused(place):
    assert "passed" in check(place, "check_checkpoint_folder").stdout
    assert sorted(path.name for path in (place / "disk").iterdir()) == ["step_000020"]
    refused = check(place, "check_checkpoint_folder", "NODES=(n1 n2); sleep() { :; }")  # n2: elsewhere
    assert refused.returncode == 69
    assert "this script does not see what n2 writes there" in refused.stdout


ADDRESS = """
getent() {{ printf '%s STREAM n1\\n' {known}; }}
hostname() {{ echo "{own}"; }}
scontrol() {{ echo n1; }}
SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1
source "$ROOT/slurm/lib/job.sh"
address_of n1
"""


@pytest.mark.parametrize(
    ("known", "own", "expected"),
    [
        ("10.0.0.5", "", "10.0.0.5\n"),
        ("127.0.1.1", "10.0.0.6 2001:db8::1 ", "10.0.0.6\n"),  # Debian's own name
        ("127.0.1.1", "", ""),
    ],
)
def test_address_of_the_ray_head_is_one_that_other_nodes_reach(known, own, expected):
    script = ADDRESS.format(known=known, own=own)
    assert bash(script, env=os.environ | {"ROOT": str(ROOT)}).stdout == expected


def test_the_folder_of_logs_is_not_run_on_the_nodes(tmp_path):
    log = tmp_path / "it's $(touch ran)"
    log.mkdir()
    (log / "driver.log").touch()  # Ray is not started a second time
    settings = f"LOG={shlex.quote(str(log))} PYTHON=false GPUS_PER_NODE=1 SLURMD_NODENAME=n1"
    node = f'{settings}; . "{ROOT}/slurm/lib/ray.sh"; bash -c "$(ray_node --head)"'
    done = bash(node, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert not (tmp_path / "ran").exists()
