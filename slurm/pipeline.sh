#!/bin/bash
# Submits training, conversion and evaluation, each to start after the previous one succeeded.
#
#   slurm/pipeline.sh recipes/x.yaml aime24,math500 [key=value ...]
#
# More options for sbatch: TRAIN_OPTIONS, CONVERT_OPTIONS, EVAL_OPTIONS, such as TRAIN_OPTIONS="--time=04:00:00 -A me".
# More options for nemo-grpo eval: EVAL_ARGUMENTS. DRY_RUN=1 prints the commands.
set -euo pipefail
usage="usage: slurm/pipeline.sh RECIPE BENCHMARK,BENCHMARK... [key=value ...]"
recipe=${1:?$usage}
benchmarks=${2:?$usage}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=python

settings=$(PYTHONPATH=$here/.. "$python" -m nemo_grpo.cli launch settings "$recipe" "$@")
eval "$settings"
name=$(basename "$RUN_DIR")
if [ -z "$SAVES" ]; then
    echo "error: checkpointing.enabled=false: nothing is saved, so there would be nothing to convert; set it to true" >&2
    exit 2
fi
# Unknown and unprepared benchmarks are refused now, not after the training.
# shellcheck disable=SC2086  # options are words
PYTHONPATH=$here/.. "$python" -m nemo_grpo.cli eval --check --model "$RUN_DIR/hf-latest" --benchmarks "$benchmarks" \
    --recipe "$recipe" ${EVAL_ARGUMENTS:-} "$@"
IFS=, read -ra list <<<"$benchmarks"

# A pipeline is submitted as a whole or not at all: two jobs of one run must not train side by side.
submitted=()
withdraw() {
    if ((${#submitted[@]})); then
        scancel "${submitted[@]}" || true
        echo "error: a stage was refused; cancelled those before it: ${submitted[*]}" >&2
    fi
}

# submit AFTER SBATCH_ARGUMENT...: prints the job's number.
submit() {
    local after=$1
    shift
    local command=(sbatch --parsable ${after:+"--dependency=afterok:$after" --kill-on-invalid-dep=yes} "$@")
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' "${command[@]}" >&2
        echo >&2
        echo "${after:-}N"
    else
        "${command[@]}" | cut -d ';' -f 1 # NUMBER;CLUSTER
    fi
}
trap withdraw ERR

# shellcheck disable=SC2206  # options are words
case $TARGET in
    cluster) train=(--nodes="$NUM_NODES" --gpus-per-node="$GPUS_PER_NODE" ${TRAIN_OPTIONS:-} "$here/train.sbatch") ;;
    *) train=(${TRAIN_OPTIONS:-} "$here/embedded.sbatch") ;;
esac
trained=$(submit '' --job-name="$name" "${train[@]}" "$recipe" "$@")
submitted+=("$trained")
# shellcheck disable=SC2086  # options are words
converted=$(submit "$trained" --job-name="$name-convert" ${CONVERT_OPTIONS:-} "$here/convert.sbatch" "$recipe" "$@")
submitted+=("$converted")
# shellcheck disable=SC2086
evaluated=$(submit "$converted" --job-name="$name-eval" --array=0-$((${#list[@]} - 1)) ${EVAL_OPTIONS:-} \
    "$here/eval.sbatch" "$RUN_DIR/hf-latest" "$benchmarks" --recipe "$recipe" ${EVAL_ARGUMENTS:-} "$@")
echo "train $trained, convert $converted, evaluate $evaluated"
