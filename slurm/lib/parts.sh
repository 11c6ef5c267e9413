# A job as a set of parts, each a background step: start them, wait for one, notice when another dies.
# Sets CAUSE and RC when the job has to end. Needs bash 4.4. Sourced after job.sh.
# shellcheck shell=bash disable=SC2034,SC2154

declare -A PART_PID=() PART_LOG=()
CAUSE='' RC=0 ASKED_TO_STOP='' DEADLINE=0
# Handlers only set a flag: more than that breaks `wait`.
trap 'ASKED_TO_STOP=USR1' USR1
trap 'ASKED_TO_STOP=TERM' TERM

# start PART LOG STEP_ARGUMENT...: a part, its output in LOG ($LOG/%N.log: one file for each node).
start() {
    local part=$1 log=$2
    shift 2
    STEP_EXEC=yes step "$@" >"$LOG/$part.srun.log" 2>&1 &
    PART_PID[$part]=$!
    PART_LOG[$part]=$log
}

running() {
    [ -n "${PART_PID[$1]:-}" ] && kill -0 "${PART_PID[$1]}" 2>/dev/null
}

# await PART: returns 0 when it has ended (RC: its exit code), 1 when the job has to end (CAUSE says why).
await() {
    local part
    while :; do
        if [ "$ASKED_TO_STOP" = TERM ]; then CAUSE=cancelled RC=$EXIT_CANCELLED; return 1; fi
        if [ "$ASKED_TO_STOP" = USR1 ]; then ask_driver_to_stop || return 1; fi
        if ((DEADLINE && SECONDS > DEADLINE)); then
            say "the driver did not stop in time: its progress since its last checkpoint is lost"
            CAUSE='time limit' RC=$EXIT_REQUEUE
            return 1
        fi
        for part in "${!PART_PID[@]}"; do
            if running "$part"; then continue; fi
            wait "${PART_PID[$part]}"
            RC=$?
            unset "PART_PID[$part]"
            if [ "$part" = "$1" ]; then return 0; fi
            say "$part ended with exit code $RC"
            CAUSE=$part
            return 1
        done
        sleep 1 &
        wait $!
    done
}

# run_driver SRUN_OPTION... -- COMMAND...: runs the driver and shows its log; returns as `await` does.
run_driver() {
    local follower rc all=" $*"
    touch "$LOG/driver.log"
    say "driver: ${all#* -- }"
    start driver "$LOG/driver.log" nemo-grpo --nodes=1 --ntasks=1 --output="$LOG/driver.log" "$@"
    tail -n +1 -F "$LOG/driver.log" 2>/dev/null &
    follower=$!
    await driver
    rc=$?
    sleep 1 # the last lines
    kill "$follower" 2>/dev/null
    return $rc
}

# The real cause of an end: Ray's own table lists a dead node as alive for up to a minute, so ask Slurm.
explain() {
    local n=${#NODES[@]}
    if ((RC == 0)) || [[ $CAUSE =~ ^(cancelled|time\ limit)$ ]]; then return; fi
    if [ "$CAUSE" != driver ]; then show_end "$CAUSE"; fi
    if ! timeout --kill-after=5 "${PROBE_SECONDS:-20}" srun --overlap --nodes="$n" --ntasks="$n" \
        --ntasks-per-node=1 true >/dev/null 2>&1; then
        say "a node of this job no longer answers"
        CAUSE=node RC=$EXIT_WORKER_LOST
        return
    fi
    case $CAUSE in
        ray-head) RC=$EXIT_HEAD_LOST ;;
        ray-worker) RC=$EXIT_WORKER_LOST ;;
        driver)
            if is_preempted; then # saved a checkpoint, or too early for one
                CAUSE=preempted RC=$EXIT_REQUEUE
            elif ((RC == EXIT_REQUEUE)) || ((DEADLINE && RC == 138)); then # 138: SIGUSR1 before it handled signals
                CAUSE='time limit' RC=$EXIT_REQUEUE
            elif ((RC == 137)) || grep -qi 'oom.kill' "$LOG"/*.log; then
                CAUSE=memory
            fi
            ;;
    esac
}

# Slurm needs this job's nodes. Before it takes them, after the partition's GraceTime, it sends SIGTERM to the steps.
is_preempted() {
    local when
    when=$(job_field PreemptTime)
    [[ $when =~ ^[0-9] ]] && ! [[ $when < $(job_field StartTime) ]] # not in an earlier attempt
}

# The time limit is near: pass the signal on, and wait until shortly before the limit at most.
ask_driver_to_stop() {
    local end
    ASKED_TO_STOP=''
    if ((DEADLINE)); then # sent by hand and by Slurm: a second signal would end the driver before it has saved
        say "SIGUSR1 again: the driver is already stopping"
        return
    fi
    if ! running driver; then
        say "SIGUSR1 before the driver runs"
        CAUSE='time limit' RC=$EXIT_REQUEUE
        return 1
    fi
    end=$(job_field EndTime) # empty if Slurm does not answer, which date would read as midnight
    end=$(date -d "${end:-Unknown}" +%s 2>/dev/null) || end=$(($(date +%s) + 300))
    DEADLINE=$((SECONDS + end - $(date +%s) - ${SPARE_SECONDS:-45}))
    say "SIGUSR1: the driver ${SAVES:+saves a checkpoint and }stops; it has $((DEADLINE - SECONDS)) s"
    kill -USR1 "${PART_PID[driver]}"
}

# The last lines of a part, from every file that it wrote.
show_end() {
    local file
    for file in ${PART_LOG[$1]:-} "$LOG/$1.srun.log"; do
        if [ -s "$file" ]; then
            say "the end of $file:"
            tail -n "${2:-20}" "$file"
        fi
    done
}

# Not `scancel --signal=KILL JOB`, which would also kill this script before it can requeue the job.
kill_steps() {
    local step_id
    for step_id in $(squeue --noheader --steps --jobs="$JOB" --format=%i 2>/dev/null); do
        case $step_id in
            *.batch | *.extern) ;;
            *) scancel "$step_id" 2>/dev/null ;;
        esac
    done
}

# Ends every step that still runs: SIGTERM, ten seconds, SIGKILL.
stop_parts() {
    local pids=() second
    touch "$LOG/ending" # for ray.sh
    scancel --signal=TERM "$JOB" 2>/dev/null
    for second in {1..20}; do
        mapfile -t pids < <(jobs -rp)
        if ((${#pids[@]} == 0)); then return; fi
        if ((second == 10)); then kill_steps; fi
        sleep 1
    done
    kill -KILL "${pids[@]}" 2>/dev/null
}
