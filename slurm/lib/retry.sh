# Whether a job that ended is requeued. Sourced after job.sh; needs CHECKPOINT_DIR for `latest_step`.
#
# One line for each attempt in attempts.tsv: attempt, time, cause, exit code, checkpoint at start, at end, decision.
# - Never: the job is being cancelled, its input was refused, the preflight failed.
# - Time limit, preemption with time to save: always, unless two attempts in a row saved nothing.
# - A lost node, head or worker, memory, a failing driver: at most MAX_RETRIES times in the job's life, and not when
#   the driver failed at the same checkpoint as in the attempt before, or before the first checkpoint.
# shellcheck shell=bash disable=SC2034,SC2154

MAX_RETRIES=${MAX_RETRIES:-3}
readonly NO_FAILURE='^(time limit|preempted)$'

# Number of the newest complete checkpoint, 0 if there is none.
latest_step() {
    local newest
    newest=$(find "${CHECKPOINT_DIR:-/nonexistent}/" -mindepth 1 -maxdepth 1 -regex '.*/step_[0-9]+' -printf '%f\n' \
        2>/dev/null | sed 's/^step_0*//' | sort -n | tail -n 1) # the slash: the folder may be a link
    echo "${newest:-0}"
}

attempts() {
    cat "$JOB_LOGS/attempts.tsv" 2>/dev/null
}

record() { # CAUSE RC STEP_AT_START STEP_AT_END DECISION
    printf '%s\t%(%FT%T)T\t%s\t%s\t%s\t%s\t%s\n' "$ATTEMPT" -1 "$@" >>"$JOB_LOGS/attempts.tsv"
}

# Failures before this attempt: Slurm counts all restarts, also those that it made by itself after a node failed.
failures_so_far() {
    echo $((ATTEMPT - $(attempts | cut -f 3 | grep -cE "$NO_FAILURE")))
}

# decide CAUSE RC STEP_AT_START STEP_AT_END: sets DECISION (retry or stop), WHY, and EXIT_WITH if it stops.
decide() {
    local cause=$1 rc=$2 before=$3 now=$4 last_cause last_step state
    DECISION=stop EXIT_WITH=$rc
    state=$(job_field JobState)
    IFS=$'\t' read -r _ _ last_cause _ _ last_step _ < <(attempts | tail -n 1)
    if [ "$cause" = cancelled ] || [ "${state:-RUNNING}" != RUNNING ]; then
        WHY="Slurm says that this job is ${state:-cancelled}" EXIT_WITH=$EXIT_CANCELLED
    elif ((rc == EXIT_REFUSED || rc == EXIT_PREFLIGHT)); then
        WHY="the input was refused: correct it and submit again"
    elif [[ $cause =~ $NO_FAILURE ]]; then
        if ((now == before)) && [[ $last_cause =~ $NO_FAILURE ]] && [ "$last_step" = "$now" ]; then
            WHY="two attempts in a row ended without a new checkpoint: save more often or ask for more time"
            EXIT_WITH=$EXIT_NO_PROGRESS
        else
            DECISION=retry WHY="continue from checkpoint $now"
        fi
    elif (($(failures_so_far) >= MAX_RETRIES)); then
        WHY="failure $(($(failures_so_far) + 1)), MAX_RETRIES=$MAX_RETRIES"
    elif [ "$cause" = driver ] && ((now == 0)); then
        WHY="the driver failed before its first checkpoint"
    elif [[ $cause =~ ^(driver|memory)$ ]] && [ "$last_cause" = "$cause" ] && [ "$last_step" = "$now" ]; then
        WHY="it failed after checkpoint $now in the attempt before, too: the same again would not help"
    else
        DECISION=retry WHY="continue from checkpoint $now, retry $(($(failures_so_far) + 1)) of $MAX_RETRIES"
    fi
}

# A job that Slurm itself has requeued once too often.
check_restarts() {
    if (($(failures_so_far) > MAX_RETRIES)); then
        say "this job was requeued $(failures_so_far) times after failures, MAX_RETRIES=$MAX_RETRIES: giving up"
        exit "$EXIT_WORKER_LOST"
    fi
}

# finish CAUSE RC STEP_AT_START: records the attempt, then requeues (and does not return) or exits.
finish() {
    local cause=$1 rc=$2 before=$3 now
    now=$(latest_step)
    if ((rc == 0)); then
        record finished 0 "$before" "$now" stop
        say "finished"
        exit 0
    fi
    decide "$cause" "$rc" "$before" "$now"
    record "$cause" "$rc" "$before" "$now" "$DECISION"
    say "ended by: $cause, exit code $rc, newest checkpoint $now; $DECISION: $WHY"
    if [ "$DECISION" = retry ]; then requeue "$cause"; fi
    exit "$EXIT_WITH"
}

# Back into the queue. With a dead node Slurm has to do that itself: a job that requeues while a node of its own is
# dying may lose its GPUs (seen with 22.05), and Slurm will requeue it as soon as it has given the node up.
requeue() {
    if [ "$1" = node ]; then
        say "waiting for Slurm to give the node up and to requeue this job"
        sleep "${NODE_WAIT:-420}" &
        wait $!
        if [ "${ASKED_TO_STOP:-}" = TERM ]; then
            say "cancelled while it waited"
            exit "$EXIT_CANCELLED"
        fi
    fi
    scontrol requeue "$JOB" && { sleep 60 & wait $!; }
}
