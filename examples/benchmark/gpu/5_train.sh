#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/4_train.sh DATA GLUE [--device cpu]
#
# Check that training works: MLM, ELECTRA and AMOS of small size at the same time on one GPU, in bf16, on the text in DATA; then
# two GLUE tasks with these models. DATA is the output of preprocess/pretraining/prepare.sh, GLUE that of preprocess/glue/prepare.sh
# with DATA/tokenizer. Writes 4_train.md, 4_train.log, the curves of all three in one figure (curves.png) and the scores of
# each (glue_mlm.json, ...) to OUT (default: a new folder in /tmp). Settings, with their defaults:
#   MINUTES=4.5           duration of pretraining, all three together; it ends after these minutes or after UPDATES
#   UPDATES=4000          maximum updates of each, the end of the learning rate schedule
#   SETTINGS=             settings of all three, such as SETTINGS="model.kernels=reference common.seed=2"
#   TASKS=MRPC,RTE        two GLUE tasks
#   LIMIT_SECONDS=560     time limit of the script
# --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"
[ "${#ARGUMENTS[@]}" -eq 2 ] || fail "give DATA and GLUE: see --help"
DATA="$(realpath -m "${ARGUMENTS[0]}")" GLUE="$(realpath -m "${ARGUMENTS[1]}")"
[ -f "$DATA/dict.txt" ] || fail "DATA=${ARGUMENTS[0]} holds no dict.txt: give the output of preprocess/pretraining/prepare.sh"
[ -d "$GLUE" ] || fail "GLUE=${ARGUMENTS[1]} is not a folder: give the output of preprocess/glue/prepare.sh"

SIZE=small UPDATES="${UPDATES:-4000}" MINUTES="${MINUTES:-4.5}" TASKS="${TASKS:-MRPC,RTE}" GLUE_FLAGS=--bf16
TRAINING="common.bf16=true dataset.num_workers=1 lr_scheduler.warmup_updates=200 dataset.validate_interval_updates=500"
if [ "$DEVICE" = cpu ]; then
    SIZE=tiny UPDATES=4 GLUE_FLAGS="--cpu --epochs 1"
    TRAINING="common.cpu=true dataset.num_workers=0 lr_scheduler.warmup_updates=2 dataset.validate_interval_updates=4 dataset.batch_size=4"
fi
CONFIG="$CHECKOUT/examples/pretraining/config"
export CHECKOUT SIZE UPDATES MINUTES TASKS GLUE_FLAGS TRAINING CONFIG DATA GLUE SCRATCH OUT SETTINGS="${SETTINGS:-}"

# Run one process for each objective; all must succeed.
for_each_objective() {
    local objective status=0 children=()
    for objective in mlm electra amos; do
        "$1" "$objective" >"$SCRATCH/$objective.$1.log" 2>&1 &
        children+=("$!")
    done
    for objective in "${children[@]}"; do
        wait "$objective" || status=1
    done
    for objective in mlm electra amos; do
        { echo "---- $1 $objective"; tail -n 200 "$SCRATCH/$objective.$1.log"; } >&2
    done
    return "$status"
}
pretrain() {
    # shellcheck disable=SC2086
    fairseq-hydra-train --config-dir "$CONFIG" --config-name "$1_$SIZE" "task.data=$DATA" \
        "checkpoint.save_dir=$SCRATCH/$1" "optimization.max_update=$UPDATES" "optimization.stop_time_hours=$(awk "BEGIN { print $MINUTES / 60 }")" \
        common.log_interval=50 "common.user_dir=$CHECKOUT/amos_fairseq" distributed_training.distributed_world_size=1 $TRAINING $SETTINGS
}
fine_tune() {
    # shellcheck disable=SC2086
    amos glue --checkpoint "$SCRATCH/$1" --data "$GLUE" --out "$SCRATCH/glue_$1" --tasks "$TASKS" --seeds 1 $GLUE_FLAGS
    cp "$SCRATCH/glue_$1/glue.json" "$OUT/glue_$1.json"
}
curves() {
    local objective runs=()
    for objective in mlm electra amos; do
        [ ! -f "$SCRATCH/$objective/metrics.jsonl" ] || runs+=("$SCRATCH/$objective")
    done
    amos plot "${runs[@]}" --out "$SCRATCH/plots" >&2
    cp "$SCRATCH/plots/overview.png" "$OUT/curves.png"
    printf 'The last lines of each training and validation log; curves.png shows all of them.\n\n```\n'
    for objective in "${runs[@]}"; do
        tail -n 2 "$objective/metrics.jsonl"
    done
    printf '```\n'
}
scores() {
    local objective
    for objective in mlm electra amos; do
        printf '\n### %s\n\n' "$objective"
        cat "$SCRATCH/glue_$objective/glue.md"
    done
}
export -f for_each_objective pretrain fine_tune curves scores

rm -f "$OUT"/glue_*.json "$OUT/curves.png"
step "pretraining" 420 bash -c "set -euo pipefail; for_each_objective pretrain"
step "curves" 60 bash -c "set -euo pipefail; curves"
step "fine-tuning" 250 bash -c "set -euo pipefail; for_each_objective fine_tune"
step "scores" 30 bash -c "set -euo pipefail; scores"
finish
