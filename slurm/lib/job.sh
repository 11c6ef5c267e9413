# Shared by all jobs: exit codes, messages, the log folder, steps on nodes. Sourced after $ROOT is set.
# shellcheck shell=bash disable=SC2034,SC2154

# Otherwise a job ends with the exit code of its driver.
readonly EXIT_REFUSED=2 EXIT_PREFLIGHT=69 EXIT_HEAD_LOST=70 EXIT_WORKER_LOST=71 EXIT_NODE_MISSING=72
readonly EXIT_NO_PROGRESS=74 EXIT_REQUEUE=75 EXIT_CANCELLED=143

ATTEMPT=${SLURM_RESTART_COUNT:-0}
# This job for Slurm's programs, to which the number alone may mean every task of an array.
JOB=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Inside a job, srun -N1 would start as many tasks as the job has.
unset SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_NPROCS
# sbatch --export=NONE, the custom of some clusters, would also hide this job's own variables from its steps.
export SLURM_EXPORT_ENV=ALL

say() {
    printf '[%(%F %T)T attempt %s] %s\n' -1 "$ATTEMPT" "$*"
}

# A field of this job from Slurm: job_field JobState
job_field() {
    scontrol show job "$JOB" -o 2>/dev/null | tr ' ' '\n' | sed -n "s/^$1=//p" | head -n 1
}

# Makes logs/NAME/JOB/attempt-N, points logs/NAME/latest to it, sets JOB_LOGS and LOG.
open_logs() {
    local all=${LOGS:-$SLURM_SUBMIT_DIR/logs}/$1
    JOB_LOGS=$all/$SLURM_JOB_ID
    LOG=$JOB_LOGS/attempt-$ATTEMPT
    check_mounts
    mkdir -p "$LOG" || exit 1
    ln -sfn "$SLURM_JOB_ID/attempt-$ATTEMPT" "$all/latest"
    ln -sfn "$(job_field StdOut)" "$JOB_LOGS/job.log"
    say "job $SLURM_JOB_ID on ${NODES[*]}, logs in $LOG"
}

# Refuses paths that srun would hand to Pyxis wrongly: it splits mounts at commas and colons, and breaks at a space
# (NVIDIA/pyxis issue 133). `nemo-grpo launch` refuses them before submission.
check_mounts() {
    local path
    if [ -z "${CONTAINER:-}" ]; then return; fi
    for path in "$ROOT" "$PWD" "$JOB_LOGS"; do
        if [[ $path == *[[:space:],:]* ]]; then
            say "$path is mounted in the container, and Pyxis takes no space, comma or colon in a path: rename it"
            exit "$EXIT_REFUSED"
        fi
    done
    if [[ $CONTAINER${MOUNTS:-} == *[[:space:]]* ]]; then
        say "CONTAINER=$CONTAINER MOUNTS=${MOUNTS:-}: Pyxis takes no space in them: rename the folder"
        exit "$EXIT_REFUSED"
    fi
}

# The name of a job's logs, one folder: its own, or, if it was not given one, the recipe's.
log_name() {
    local name=$SLURM_JOB_NAME
    case $name in *.sbatch) name=$(basename "${1%.yaml}") ;; esac
    if [ -n "${RUN_OF_ARRAY:-}" ]; then name=$RUN_OF_ARRAY; fi
    name=${name//[^[:alnum:]_.,=+@-]/_}
    printf '%s\n' "${name/#./_}"
}

# In an array, RECIPE may be a list, one recipe a line: sets RECIPE to this task's, and RUN_OF_ARRAY to its name.
recipe_of_task() {
    local list=$RECIPE
    case $RECIPE in *.txt) ;; *) return ;; esac
    RECIPE=$(sed -n "$((${SLURM_ARRAY_TASK_ID:-0} + 1))p" "$list")
    RUN_OF_ARRAY=$(basename "${RECIPE%.yaml}")
    if [ -z "$RECIPE" ]; then
        say "$list has no recipe for array task ${SLURM_ARRAY_TASK_ID:-0}"
        exit "$EXIT_REFUSED"
    fi
}

# CPUs that every node of this job has: "64(x2),48" -> 48.
num_cpus() {
    local fewest
    fewest=$(tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-1}}" | sed 's/(.*//' | sort -n | head -n 1)
    printf '%s\n' "${fewest:-1}"
}

# An address by which other nodes reach this one. Debian's /etc/hosts gives a host's own name to 127.0.1.1.
address_of() {
    { getent ahostsv4 "$1"; hostname -I | tr ' ' '\n'; } 2>/dev/null | awk '$1 ~ /^[0-9.]+$/ && !/^127\./ { print $1; exit }'
}

# The first node's address for the other nodes; 1 if it has none.
head_address() {
    local ip
    ip=$(address_of "${NODES[0]}")
    if [ -z "$ip" ] && ((${#NODES[@]} == 1)); then ip=127.0.0.1; fi
    if [ -z "$ip" ]; then
        say "${NODES[0]} has no IPv4 address that other nodes can reach: neither getent nor hostname -I lists one" >&2
        return 1
    fi
    printf '%s\n' "$ip"
}

answers() {
    (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null
}

# free_port ADDRESS: the first free one of this job's five ports: below Linux's ephemeral ports, above those of Ray's
# workers; 1 if all are taken.
free_port() {
    local port first=$((20000 + SLURM_JOB_ID % 2000 * 5))
    for port in $(seq "$first" $((first + 4))); do
        if ! answers "$1" "$port"; then
            printf '%s\n' "$port"
            return
        fi
    done
    say "all of the ports $first-$((first + 4)) of ${NODES[0]} are taken" >&2
    return 1
}

# step NAME SRUN_OPTION... -- COMMAND...: runs COMMAND on nodes of this job, in CONTAINER if that is set.
# Steps share the nodes' CPUs and GPUs. NAME is the container's: the steps of a node with one NAME share it.
# STEP_LIMIT: its limit in seconds. STEP_EXEC: exec in place of this shell, so that signals reach srun.
STEP_LIMIT='' STEP_EXEC=''
step() {
    local name=$1 options=(--overlap --kill-on-bad-exit=1 --cpus-per-task="$(num_cpus)")
    shift
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    if [ -n "${CONTAINER:-}" ]; then
        options+=(--container-image="$CONTAINER" --container-name="$name" --no-container-mount-home)
        options+=(--container-mounts="$ROOT:$ROOT,$PWD:$PWD,$JOB_LOGS:$JOB_LOGS${MOUNTS:+,$MOUNTS}")
        options+=(--container-workdir="$PWD")
    fi
    ${STEP_EXEC:+exec} ${STEP_LIMIT:+timeout --kill-after=5 "$STEP_LIMIT"} srun "${options[@]}" "$@"
}

# run_settings RECIPE OVERRIDE...: sets RUN_DIR, CHECKPOINT_DIR, MODEL, LORA and others, see nemo_grpo/launch/preflight.py.
run_settings() {
    step nemo-grpo --nodes=1 --ntasks=1 -- "$PYTHON" -m nemo_grpo.cli launch settings "$@" >"$LOG/settings.sh" || return
    # shellcheck source=/dev/null
    source "$LOG/settings.sh"
}

# The interpreter on the nodes: PYTHON, else the container's, else the repository's .venv.
if [ -n "${PYTHON:-}" ]; then
    :
elif [ -n "${CONTAINER:-}" ] || [ ! -x "$ROOT/.venv/bin/python" ]; then
    PYTHON=python
else
    PYTHON=$ROOT/.venv/bin/python
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
