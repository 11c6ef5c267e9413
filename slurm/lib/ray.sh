# A Ray cluster that lives in this allocation and nowhere else. Sourced after job.sh and parts.sh.
# shellcheck shell=bash disable=SC2034,SC2154

RAY_TEMP=/tmp/ray-$SLURM_JOB_ID
# The secret of this job: without it nobody can talk to its cluster (Ray 2.52 or newer).
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# `ray start --block` ends at once on SIGTERM; NeMo-RL's container brings its own environment for workers.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_USAGE_STATS_ENABLED=0

choose_address() {
    RAY_IP=$(head_address) || finish ray-head "$EXIT_HEAD_LOST" "$STEP_AT_START"
    RAY_PORT=$(free_port "$RAY_IP") || finish ray-head "$EXIT_HEAD_LOST" "$STEP_AT_START"
    export RAY_ADDRESS=$RAY_IP:$RAY_PORT
}

# ray_node OPTION...: the command of one Ray node. It registers under its Slurm name, as a resource.
# When Slurm preempts a job all its steps get SIGTERM, and the driver needs Ray for its last checkpoint: so Ray has its
# own process group (set -m) and is ended by `stop_parts`, or with its shell however that ends (pdeathsig).
# Ray gives a node 15 s for its agents and 30 s in all. This cannot be configured, and a busy or cold file system takes
# longer. Before the driver runs, another try loses nothing.
ray_node() {
    local log
    printf -v log '%q' "$LOG"
    # shellcheck disable=SC2016  # expands on the node
    printf '%s' "LOG=$log; " 'set -m; with=; if setpriv --pdeathsig KILL true 2>/dev/null; then with="setpriv --pdeathsig KILL"; fi
        is_late() { [ -e "$LOG/driver.log" ] || [ -e "$LOG/ending" ]; }
        ' "trap 'if [ -e \"\$LOG/ending\" ]; then kill -TERM -- -\$ray; fi' TERM
        " 'for try in 1 2 3; do
            $with ' "$PYTHON -m ray.scripts.scripts start $* --num-gpus=$GPUS_PER_NODE --block" \
        "${RAY_CPUS:+ --num-cpus=$RAY_CPUS}${RAY_OBJECT_STORE_BYTES:+ --object-store-memory=$RAY_OBJECT_STORE_BYTES}" \
        ' --resources="{\"slurm-node-$SLURMD_NODENAME\": 1}" &
            ray=$!
            while :; do wait $ray; rc=$?; if ! kill -0 $ray 2>/dev/null; then break; fi; done
            if is_late; then break; fi
            echo "ray start ended with exit code $rc in try $try of 3"
            sleep 2
            if is_late; then break; fi
        done
        exit $rc'
}

# Starts head and workers; returns when the head listens, 1 when the job has to end.
start_ray() {
    local n=${#NODES[@]} until=$((SECONDS + ${RAY_SECONDS:-600}))
    choose_address
    start ray-head "$LOG/ray-head.log" nemo-grpo --nodes=1 --ntasks=1 --nodelist="${NODES[0]}" \
        --output="$LOG/ray-head.log" -- bash -c \
        "$(ray_node --head --node-ip-address="$RAY_IP" --port="$RAY_PORT" --include-dashboard=false \
            --temp-dir="$RAY_TEMP")"
    until answers "$RAY_IP" "$RAY_PORT"; do
        if ! running ray-head || ((SECONDS > until)); then
            say "the Ray head does not listen on $RAY_ADDRESS"
            CAUSE=ray-head RC=$EXIT_HEAD_LOST
            return 1
        fi
        sleep 0.5
    done
    say "Ray head on $RAY_ADDRESS"
    if ((n == 1)); then return; fi
    start ray-worker "$LOG/ray-worker-*.log" nemo-grpo --nodes=$((n - 1)) --ntasks=$((n - 1)) --ntasks-per-node=1 \
        --exclude="${NODES[0]}" --output="$LOG/ray-worker-%N.log" -- bash -c "$(ray_node --address="$RAY_ADDRESS")"
}

# Waits until every node has registered all its GPUs; 1 when the job has to end. A head that listens may still end and
# be started again, see ray_node: then whoever asks it loses it, and another one asks.
await_gpus() {
    local node until=$((SECONDS + ${RAY_SECONDS:-600}))
    while :; do
        start ray-ready "$LOG/ray-ready.log" nemo-grpo --nodes=1 --ntasks=1 --nodelist="${NODES[0]}" \
            --output="$LOG/ray-ready.log" -- \
            "$PYTHON" "$ROOT/slurm/lib/ray_ready.py" --missing "$LOG/missing" --seconds $((until - SECONDS)) \
            --gpus-per-node "$GPUS_PER_NODE" "${NODES[@]}"
        await ray-ready || return 1
        cat "$LOG/ray-ready.log"
        if ((RC == 0)); then return; fi
        if [ -s "$LOG/missing" ] || ((SECONDS >= until)); then break; fi
        say "Ray could not be asked for its nodes; asking again"
    done
    if [ -s "$LOG/missing" ]; then
        while read -r node; do
            say "missing: $node; the end of its log:"
            tail -n 20 "$LOG/ray-worker-$node.log" "$LOG/ray-worker.srun.log" 2>/dev/null
        done <"$LOG/missing"
        CAUSE='missing node' RC=$EXIT_NODE_MISSING
    else
        CAUSE=ray-head RC=$EXIT_HEAD_LOST
    fi
    return 1
}

# Removes Ray's folder from every node; after a failure its logs are kept in LOG/ray-session/NODE.
clear_ray() {
    local keep=$1 n=${#NODES[@]} logs command="rm -rf $RAY_TEMP"
    if [ "$keep" = keep ]; then
        printf -v logs '%q' "$LOG/ray-session"
        command="to=$logs/\$SLURMD_NODENAME; mkdir -p \"\$to\"; cp -r $RAY_TEMP/session_latest/logs/. \"\$to\"
            $command"
    fi
    STEP_LIMIT=20 step nemo-grpo --nodes="$n" --ntasks="$n" --ntasks-per-node=1 --output="$LOG/clear.log" -- \
        bash -c "$command" 2>>"$LOG/clear.log"
}
