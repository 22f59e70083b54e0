#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/4_kernels.sh [--device cpu]
#
# Find the fastest kernels for this GPU: the tiles, warps and stages of each Triton kernel of this package; attention of amos_base
# (64 sequences of 512 tokens, 12 heads of 64, bf16) by every backend, with and without dropout and the gradient of a learned
# bias; and the output layer in chunks of several sizes; a step of amos_base with the Triton kernels and what was found. The last
# lines say whether model.kernels=triton and model.compile should be the default. Writes 4_kernels.md, 4_kernels.log, sweep.jsonl,
# amos_64_triton.json and tuned_launches.json, which the package reads as amos_fairseq/functional/cuda/tuned_launches.json, to OUT
# (default: a new folder in /tmp). Settings, with their defaults:
#   SWEEP_SECONDS=190     time of the sweep; the page says how many launches were not run
#   BASELINE=OUT          folder with amos_64.json of 3_baseline.sh; without it the defaults are not decided
#   LIMIT_SECONDS=560     time limit of the script
# --device cpu: a rehearsal at tiny size on a machine without a GPU, in Triton's interpreter.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"
prepare_contests
SWEEP_SECONDS="${SWEEP_SECONDS:-190}" BASELINE="${BASELINE:-$OUT}" WITH_TRITON="amos_${SEQUENCES[0]}_triton.json"
INTERPRETED=()
[ "$DEVICE" = cuda ] || INTERPRETED=(env TRITON_INTERPRET=1)

# sweep UNTIL: start sweep.py again behind a launch that has ended CUDA in its process (exit status 75).
sweep() {
    local starts=0 status=75
    while [ "$status" -eq 75 ] && [ "$starts" -lt 20 ]; do
        status=0 starts=$((starts + 1))
        "${@:2}" python "$GPU_SCRIPTS/sweep.py" sweep --device "$DEVICE" --out "$OUT" --until "$1" || status=$?
    done
    return "$status"
}
# with_table: the contest with a copy of the package that has tuned_launches.json.
with_table() {
    cp -r "$CHECKOUT/amos_fairseq" "$CHECKOUT/amos_start.py" "$SCRATCH"
    [ ! -f "$OUT/tuned_launches.json" ] || cp "$OUT/tuned_launches.json" "$SCRATCH/amos_fairseq/functional/cuda/"
    export PYTHONPATH="$SCRATCH${PYTHONPATH:+:$PYTHONPATH}"
    env -C / python -c 'import sys, amos_fairseq; sys.exit(0 if amos_fairseq.__file__.startswith(sys.argv[1]) else "the copy is not used")' "$SCRATCH/"
    contest "$@"
}
export -f sweep with_table
export CHECKOUT GPU_SCRIPTS

rm -f "$OUT/sweep.jsonl" "$OUT/tuned_launches.json" "$OUT"/amos_*_triton.json
step "tiles, warps and stages" "$((SWEEP_SECONDS + 60))" bash -c 'set -euo pipefail; sweep "$@"' sweep \
    "$(($(date +%s) + SWEEP_SECONDS))" ${INTERPRETED[@]+"${INTERPRETED[@]}"}
# A CPU trains with the same kernels as with model.kernels=fast.
step "amos_$SIZE, ${SEQUENCES[0]} sequences, model.kernels=triton with these launches" 130 bash -c 'set -euo pipefail; with_table "$@"' contest \
    "$WITH_TRITON" "amos_$SIZE" "${SEQUENCES[0]}" ${COMPILE[@]+"${COMPILE[@]}"} --set model.kernels=triton
step "defaults" 60 python "$GPU_SCRIPTS/decide_kernels.py" "$BASELINE/amos_${SEQUENCES[0]}.json" "$OUT/$WITH_TRITON"
step "attention" 150 python "$GPU_SCRIPTS/kernels.py" attention --device "$DEVICE"
step "output layer" 90 python "$GPU_SCRIPTS/kernels.py" output_layer --device "$DEVICE"
finish
