#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/4_kernels.sh [--device cpu]
#
# Find the fastest kernels for this GPU: the tiles, warps and stages of each Triton kernel of this package; attention of amos_base
# (64 sequences of 512 tokens, 12 heads of 64, bf16) by every backend, with and without dropout and the gradient of a learned
# bias; and the output layer in chunks of several sizes. The last lines say whether model.kernels=triton and model.compile should
# be the default. Writes 4_kernels.md, 4_kernels.log, sweep.json and tuned_launches.json, which the package reads as
# amos_fairseq/functional/cuda/tuned_launches.json, to OUT (default: a new folder in /tmp). Settings, with their defaults:
#   SWEEP_SECONDS=230     time of the sweep; the page says how many launches were not run
#   BASELINE=OUT          folder with the JSON files of 3_baseline.sh, which decide if they are there
#   LIMIT_SECONDS=560     time limit of the script
# --device cpu: a rehearsal at tiny size on a machine without a GPU, in Triton's interpreter.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"
SWEEP_SECONDS="${SWEEP_SECONDS:-230}" BASELINE="${BASELINE:-$OUT}"
INTERPRETED=()
[ "$DEVICE" = cuda ] || INTERPRETED=(env TRITON_INTERPRET=1)

rm -f "$OUT/sweep.json" "$OUT/tuned_launches.json"
step "tiles, warps and stages" "$((SWEEP_SECONDS + 60))" ${INTERPRETED[@]+"${INTERPRETED[@]}"} python "$GPU_SCRIPTS/sweep.py" sweep \
    --device "$DEVICE" --out "$OUT" --scratch "$SCRATCH" --seconds "$SWEEP_SECONDS"
step "defaults" 90 python "$GPU_SCRIPTS/decide_kernels.py" --device "$DEVICE" --out "$OUT" --baseline "$BASELINE"
step "attention" 150 python "$GPU_SCRIPTS/kernels.py" attention --device "$DEVICE"
step "output layer" 90 python "$GPU_SCRIPTS/kernels.py" output_layer --device "$DEVICE"
finish
