#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/3_baseline.sh [--device cpu]
#
# Measure the speed with default settings: amos_base with 64 sequences of 512 tokens, as written and compiled; a profile of
# its step, beside the prediction of `amos bench --on-paper` for this GPU, with the gaps between its kernels; electra_base beside
# Hugging Face's in the same run; amos_base with as many sequences as the memory allows (256 above 100 GB, 128 from 70 GB). Writes 3_baseline.md, 3_baseline.log, trace.json.gz (chrome://tracing) and a JSON for
# each contest to OUT (default: a new folder in /tmp). The last lines say what was decided.
# LIMIT_SECONDS=560: time limit of the script; the most important runs come first.
# --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"
prepare_contests

# Not the contests of 4_kernels.sh.
rm -f "$OUT"/electra_*.json "$OUT"/amos_{?,??,???}.json "$OUT/trace.json.gz"
step "amos_$SIZE, ${SEQUENCES[0]} sequences" 150 bash -c "set -euo pipefail; contest amos_${SEQUENCES[0]}.json amos_$SIZE ${SEQUENCES[0]} ${COMPILE[*]}"
step "where a step of amos_$SIZE spends its time" 120 python "$GPU_SCRIPTS/profile_step.py" "amos_$SIZE" --device "$DEVICE" \
    --precision "$PRECISION" --vocabulary-size "$VOCABULARY" --kernels "$KERNELS" --trace "$OUT/trace.json.gz" \
    --set "dataset.batch_size=${SEQUENCES[0]}"
step "electra_$SIZE beside Hugging Face" 220 bash -c "set -euo pipefail; contest electra_${SEQUENCES[0]}.json electra_$SIZE ${SEQUENCES[0]} --peer hf ${COMPILE[*]}"
step "amos_$SIZE, ${SEQUENCES[1]} sequences" 150 bash -c "set -euo pipefail; contest amos_${SEQUENCES[1]}.json amos_$SIZE ${SEQUENCES[1]}"
finish
