#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/2_baseline.sh [--device cpu]
#
# Measure the speed with default settings: amos_base with 64 and 256 sequences of 512 tokens, as written and compiled, with
# PyTorch's kernels and with the package's own; electra_base beside Hugging Face's in the same run; the 40 most expensive kernels
# of a step, and its parts beside the prediction of `amos bench --on-paper`. Writes 2_baseline.md, 2_baseline.log and a JSON for
# each contest to OUT (default: a new folder in /tmp). LIMIT_SECONDS=560: time limit of the script; the most important runs come
# first. --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"

SIZE=base STEPS=10 WARMUP=3 SEQUENCES=(64 256) COMPILE=(--compile) PRECISION=bf16 VOCABULARY=32768 KERNELS=40
if [ "$DEVICE" = cpu ]; then
    SIZE=tiny STEPS=1 WARMUP=1 SEQUENCES=(2 4) COMPILE=() PRECISION=float32 VOCABULARY=500 KERNELS=5
fi

# contest FILE RECIPE SEQUENCES [FLAGS OF AMOS BENCH]: print the page and move the JSON to OUT/FILE.
contest() {
    local file="$1" recipe="$2" sequences="$3" status=0
    shift 3
    amos bench "$recipe" --device "$DEVICE" --precision "$PRECISION" --steps "$STEPS" \
        --warmup "$WARMUP" --vocabulary-size "$VOCABULARY" --out "$SCRATCH/bench" "$@" --set "dataset.batch_size=$sequences" \
        >"$SCRATCH/bench.md" || status=$?
    # Lower its headings below the one of the step; remove the last line, which names temporary files.
    sed -e 's/^#/###/' -e "/^$(printf '%s' "$SCRATCH/bench" | sed 's/[\/&]/\\&/g')/d" "$SCRATCH/bench.md"
    [ "$status" -ne 0 ] || mv "$SCRATCH"/bench/*.json "$OUT/$file"
    rm -rf "$SCRATCH/bench"
    return "$status"
}
export -f contest
export DEVICE PRECISION STEPS WARMUP VOCABULARY SCRATCH OUT

rm -f "$OUT"/electra_*.json "$OUT"/amos_*.json
step "amos_$SIZE, ${SEQUENCES[0]} sequences" 150 bash -c "set -euo pipefail; contest amos_${SEQUENCES[0]}.json amos_$SIZE ${SEQUENCES[0]} ${COMPILE[*]}"
step "electra_$SIZE beside Hugging Face" 220 bash -c "set -euo pipefail; contest electra_${SEQUENCES[0]}.json electra_$SIZE ${SEQUENCES[0]} --peer hf ${COMPILE[*]}"
step "where a step of amos_$SIZE spends its time" 120 python "$GPU_SCRIPTS/profile_step.py" "amos_$SIZE" --device "$DEVICE" \
    --precision "$PRECISION" --vocabulary-size "$VOCABULARY" --kernels "$KERNELS" --set "dataset.batch_size=${SEQUENCES[0]}"
step "amos_$SIZE, ${SEQUENCES[1]} sequences" 150 bash -c "set -euo pipefail; contest amos_${SEQUENCES[1]}.json amos_$SIZE ${SEQUENCES[1]} ${COMPILE[*]}"
step "amos_$SIZE, ${SEQUENCES[0]} sequences, model.kernels=triton" 150 bash -c "set -euo pipefail; contest amos_${SEQUENCES[0]}_triton.json amos_$SIZE ${SEQUENCES[0]} ${COMPILE[*]} --set model.kernels=triton"
finish
