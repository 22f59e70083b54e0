#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/5_train.sh DATA GLUE [--device cpu]
# OUT=FOLDER bash examples/benchmark/gpu/5_train.sh DATA --curve --device cpu
#
# Check that training works: the first updates of mlm_mini and amos_mini beside the curve of a CPU; MLM, ELECTRA and AMOS of small
# size at the same time on one GPU, in bf16, on the text in DATA; then two GLUE tasks with these models. DATA is the output of
# preprocess/pretraining/prepare.sh, GLUE that of preprocess/glue/prepare.sh with DATA/tokenizer and --max-train-rows 40000. Writes
# 5_train.md, 5_train.log, the curves of all three in one figure (curves.png), the scores of each (glue_mlm.json, ...) and the first
# updates (cuda_curve_mlm.jsonl, ...) to OUT (default: a new folder in /tmp). The last lines say what was decided.
# --curve: write the first updates alone, before, on a CPU (cpu_curve_mlm.jsonl, ...): five minutes of two cores.
# Settings, with their defaults:
#   CPU_CURVE=            OUT of --curve, to compare the first updates with
#   CURVE_UPDATES=200     their number, and
#   CURVE_SEQUENCES=32    sequences of 128 tokens of each, for --curve
#   MINUTES=4             duration of pretraining, all three together; it ends after these minutes or after UPDATES
#   UPDATES=4000          maximum updates of each, the end of the learning rate schedule
#   SETTINGS=             settings of all three and of the first updates, such as SETTINGS=task.precision=float32
#   TASKS=SST-2,QNLI      two GLUE tasks, one epoch each
#   MOST_ROWS=40000       refuse tasks with more training rows: 1,250 updates of 32 rows take about 35 seconds
#   LIMIT_SECONDS=560     time limit of the script
# --device cpu: a rehearsal at tiny size on a machine without a GPU; with --curve the whole curve.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"
[ "${#ARGUMENTS[@]}" -eq "$([ -n "$CURVE" ] && echo 1 || echo 2)" ] || fail "give DATA and GLUE, or DATA and --curve: see --help"
DATA="$(realpath -m "${ARGUMENTS[0]}")" GLUE="$(realpath -m "${ARGUMENTS[1]:-.}")"
[ -f "$DATA/dict.txt" ] || fail "DATA=${ARGUMENTS[0]} holds no dict.txt: give the output of preprocess/pretraining/prepare.sh"
[ -d "$GLUE" ] || fail "GLUE=${ARGUMENTS[1]} is not a folder: give the output of preprocess/glue/prepare.sh"
CPU_CURVE="${CPU_CURVE:-}" CURVE_UPDATES="${CURVE_UPDATES:-200}"

# The learning rate of a small model (ELECTRA-Small, thesis, Table 5.2); those of the recipe are for base models.
SIZE=small UPDATES="${UPDATES:-4000}" MINUTES="${MINUTES:-4}" TASKS="${TASKS:-SST-2,QNLI}" MOST_ROWS="${MOST_ROWS:-40000}"
GLUE_FLAGS="--precision bf16 --epochs 1 --lr 3e-4" PRECISION="task.precision=bf16"
TRAINING="common.log_interval=50 dataset.num_workers=1 lr_scheduler.warmup_updates=200 dataset.validate_interval_updates=500"
if [ "$DEVICE" = cpu ]; then
    SIZE=tiny UPDATES=4 GLUE_FLAGS="--cpu --epochs 1" PRECISION="common.cpu=true task.precision=float32"
    TRAINING="common.log_interval=2 dataset.num_workers=0 lr_scheduler.warmup_updates=2 dataset.validate_interval_updates=4 dataset.batch_size=4"
fi
CURVE_SETTINGS="optimization.max_update=$CURVE_UPDATES common.log_interval=5 lr_scheduler.warmup_updates=20 dataset.batch_size=${CURVE_SEQUENCES:-32}"
CURVE_SETTINGS+=" dataset.num_workers=0 dataset.disable_validation=true checkpoint.no_save=true"
CONFIG="$CHECKOUT/examples/pretraining/config"
export CHECKOUT SIZE UPDATES MINUTES TASKS GLUE_FLAGS TRAINING PRECISION CONFIG DATA GLUE SCRATCH OUT SETTINGS="${SETTINGS:-}"
export CURVE_SETTINGS DEVICE GPU_SCRIPTS

# for_each FUNCTION OBJECTIVE...: run one process for each objective; all must succeed.
for_each() {
    local call="$1" objective status=0 children=()
    shift
    for objective in "$@"; do
        "$call" "$objective" >"$SCRATCH/$objective.$call.log" 2>&1 &
        children+=("$!")
    done
    for objective in "${children[@]}"; do
        wait "$objective" || status=1
    done
    for objective in "$@"; do
        { echo "---- $call $objective"; tail -n 200 "$SCRATCH/$objective.$call.log"; } >&2
    done
    return "$status"
}
# train RECIPE SAVE_DIR SETTINGS...
train() {
    local recipe="$1" save_dir="$2"
    shift 2
    # shellcheck disable=SC2086
    fairseq-hydra-train --config-dir "$CONFIG" --config-name "$recipe" "task.data=$DATA" "checkpoint.save_dir=$save_dir" \
        "common.user_dir=$CHECKOUT/amos_fairseq" distributed_training.distributed_world_size=1 $PRECISION "$@"
}
first_updates() {
    # shellcheck disable=SC2086
    train "$1_mini" "$SCRATCH/curve_$1" $CURVE_SETTINGS $SETTINGS
}
# first_curves [--beside CPU_CURVE]
first_curves() {
    for_each first_updates mlm amos
    python "$GPU_SCRIPTS/training_curves.py" save "$SCRATCH" "$OUT" "$DATA" --settings "$CURVE_SETTINGS" --device "$DEVICE" "$@"
}
pretrain() {
    # shellcheck disable=SC2086
    train "$1_$SIZE" "$SCRATCH/$1" "optimization.max_update=$UPDATES" \
        "optimization.stop_time_hours=$(awk "BEGIN { print $MINUTES / 60 }")" $TRAINING $SETTINGS
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
    python "$GPU_SCRIPTS/training_curves.py" learned "$DATA" "${runs[@]}"
    printf '\nThe last lines of each training and validation log; curves.png shows all of them.\n\n```\n'
    for objective in "${runs[@]}"; do
        tail -n 2 "$objective/metrics.jsonl"
    done
    printf '```\n'
}
scores() {
    local objective
    for objective in mlm electra amos; do
        printf '\n### %s\n\n' "$objective"
        cat "$SCRATCH/glue_$objective/glue.md" || true
    done
    python -I - "$OUT"/glue_{mlm,electra,amos}.json <<'PYTHON'
import json, pathlib, sys
answers = []
for file in map(pathlib.Path, sys.argv[1:]):
    tasks = json.loads(file.read_text())["tasks"] if file.exists() else {}
    medians = (f"{task} {own['scores'][own['main_score']]['median']:.1f}" for task, own in tasks.items())
    answers.append(f"{file.stem.removeprefix('glue_')} " + (", ".join(medians) or "failed"))
# Shares of the most frequent class in the official dev sets.
print(f"\nDecided: dev scores, where a constant answer has 50.9 (SST-2), 50.5 (QNLI): {'; '.join(answers)}")
PYTHON
}
# Prints the first task with more training rows than MOST_ROWS.
task_with_too_many_rows() {
    python -I - "$GLUE" "$TASKS" "$MOST_ROWS" <<'PYTHON'
import json, pathlib, sys
folder, tasks, most = sys.argv[1:]
for task in tasks.split(","):
    file = pathlib.Path(folder, task, "task.json")
    rows = json.loads(file.read_text())["splits"]["train"]["rows"] if file.exists() else 0
    if rows > int(most):
        print(f"{task} has {rows:,} training rows")
        break
PYTHON
}
export -f for_each train first_updates first_curves pretrain fine_tune curves scores

rm -f "$OUT/${DEVICE}"_curve_*.jsonl
if [ -n "$CURVE" ]; then
    step "the first updates" "$LIMIT_SECONDS" bash -c "set -euo pipefail; first_curves"
    finish
fi
TOO_MANY="$(task_with_too_many_rows)"
[ -z "$TOO_MANY" ] || fail "$TOO_MANY, more than MOST_ROWS=$MOST_ROWS: prepare it with --max-train-rows $MOST_ROWS, or set MOST_ROWS"
rm -f "$OUT"/glue_*.json "$OUT/curves.png"
if [ -n "$CPU_CURVE" ]; then
    FIRST="$CPU_CURVE/cpu_curve_mlm.jsonl"
    [ -f "$FIRST" ] || fail "CPU_CURVE=$CPU_CURVE holds no cpu_curve_mlm.jsonl: 5_train.sh DATA --curve --device cpu writes it"
    CURVE_SETTINGS="$(python -I -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["settings"])' "$FIRST")"
    step "the first updates beside those of a CPU" 120 bash -c 'set -euo pipefail; first_curves --beside "$0"' "$CPU_CURVE"
else
    decide "the first updates were not compared with a CPU: --curve writes what CPU_CURVE names"
fi
step "pretraining" "$(awk "BEGIN { print int($MINUTES * 60) + 90 }")" bash -c "set -euo pipefail; for_each pretrain mlm electra amos"
step "curves" 60 bash -c "set -euo pipefail; curves"
step "fine-tuning" 200 bash -c "set -euo pipefail; for_each fine_tune mlm electra amos"
step "scores" 45 bash -c "set -euo pipefail; scores"
finish
