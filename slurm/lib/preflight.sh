# All checks before the training: a table that needs no GPU, then one all-reduce over all ranks. Sourced after job.sh.
# shellcheck shell=bash disable=SC2034,SC2154

# preflight RECIPE OVERRIDE...: ends the job if it may not start; else sets from the recipe:
# RUN_DIR, CHECKPOINT_DIR, GPUS_PER_NODE.
preflight() {
    # One task on each node; a node that fails must not end the others before they report.
    EVERY_NODE=(--nodes="${#NODES[@]}" --ntasks="${#NODES[@]}" --ntasks-per-node=1 --kill-on-bad-exit=0)
    mkdir -p "$LOG/nodes"
    STEP_LIMIT=${PREFLIGHT_SECONDS:-300} step nemo-grpo "${EVERY_NODE[@]}" --label --output="$LOG/nodes.log" -- \
        "$PYTHON" "$ROOT/nemo_grpo/launch/node_facts.py" "$LOG/nodes"
    judge preflight.log nodes.log "$@" --facts "$LOG/nodes" --settings "$LOG/settings.sh"
    # shellcheck source=/dev/null
    source "$LOG/settings.sh"
    claim_run
    if [ -n "${SAVES:-}" ]; then check_checkpoint_folder; fi
    check_ranks "$@"
}

# judge TABLE STEP_LOG ARGUMENT...: writes and shows the table of `nemo-grpo preflight ARGUMENT...`. If it refuses, the
# end of the step's log is shown, too, and the job ends.
judge() {
    local table=$LOG/$1 step_log=$LOG/$2 rc
    shift 2
    step nemo-grpo --nodes=1 --ntasks=1 --nodelist="${NODES[0]}" --output="$table" -- \
        "$PYTHON" -m nemo_grpo.cli preflight "$@" --nodes "$(IFS=,; echo "${NODES[*]}")"
    rc=$?
    cat "$table"
    if ((rc)); then
        if [ -s "$step_log" ]; then tail -n 20 "$step_log"; fi
        if ((rc != EXIT_REFUSED && rc != EXIT_PREFLIGHT)); then
            say "the preflight itself failed with exit code $rc"
            rc=$EXIT_PREFLIGHT
        fi
        finish preflight "$rc" 0
    fi
}

# One process for each GPU: imports what the training needs, and takes part in one all-reduce. A rank that fails ends
# the others, which would wait for it; ranks that hang are ended by the limit.
check_ranks() {
    local address port modules=$RANK_MODULES
    # Nobody knows what another driver imports.
    if [ -n "${DRIVER:-}" ]; then modules=torch; fi
    mkdir -p "$LOG/ranks"
    address=$(head_address) || finish preflight "$EXIT_PREFLIGHT" 0
    port=$(free_port "$address") || finish preflight "$EXIT_PREFLIGHT" 0
    # More ranks than CPUs are no reason to refuse: --overcommit. Ranks of one node are consecutive: block.
    # shellcheck disable=SC2086  # modules are words
    STEP_LIMIT=${PREFLIGHT_SECONDS:-300} MASTER_ADDR=$address MASTER_PORT=$port step nemo-grpo \
        --nodes="${#NODES[@]}" --ntasks=$((${#NODES[@]} * GPUS_PER_NODE)) --ntasks-per-node="$GPUS_PER_NODE" \
        --overcommit --distribution=block --label --output="$LOG/ranks.log" -- \
        "$PYTHON" "$ROOT/nemo_grpo/launch/rank_process.py" "$LOG/ranks" $modules
    judge all-reduce.log ranks.log "$@" --ranks "$LOG/ranks"
}

# Two jobs in one run's folder would overwrite each other's checkpoints. Not a lock, which a dead node would keep.
claim_run() {
    local owner states=RUNNING,SUSPENDED
    owner=$(cat "$RUN_DIR/.slurm-job" 2>/dev/null)
    if [ -n "$owner" ] && [ "$owner" != "$JOB" ] &&
        [ -n "$(squeue --noheader --jobs="$owner" --states="$states" --format=%i 2>/dev/null)" ]; then
        say "job $owner trains in $RUN_DIR: wait for it, cancel it, or submit with --dependency=afterany:$owner"
        finish preflight "$EXIT_PREFLIGHT" 0
    fi
    mkdir -p "$RUN_DIR" && echo "$JOB" >"$RUN_DIR/.slurm-job"
}

# Every node (in the container, if any) and this script must see the same folder: files saved elsewhere are lost when
# the job ends.
check_checkpoint_folder() {
    local node second missing=() sign=$CHECKPOINT_DIR/.seen-$SLURM_JOB_ID
    # shellcheck disable=SC2016  # expands on the nodes
    STEP_LIMIT=${PREFLIGHT_SECONDS:-300} step nemo-grpo "${EVERY_NODE[@]}" --output="$LOG/folder.log" -- \
        bash -c 'mkdir -p "$1" && touch "$2-$SLURMD_NODENAME"' - "$CHECKPOINT_DIR" "$sign"
    for second in {1..5}; do # NFS
        missing=()
        for node in "${NODES[@]}"; do
            if [ ! -e "$sign-$node" ]; then missing+=("$node"); fi
        done
        if ((${#missing[@]} == 0)); then break; fi
        sleep 1
    done
    rm -f "$sign"-*
    if ((${#missing[@]})); then
        cat "$LOG/folder.log"
        say "$CHECKPOINT_DIR: this script does not see what ${missing[*]} writes there, so checkpoints would be lost;" \
            "choose a folder that all nodes share, mounted at the same path in a container (MOUNTS)"
        finish preflight "$EXIT_PREFLIGHT" 0
    fi
}
