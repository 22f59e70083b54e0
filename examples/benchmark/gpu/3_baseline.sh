#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/3_baseline.sh [--device cpu]
#
# Measure the speed with default settings: amos_base with 64 sequences of 512 tokens, as written and compiled, with PyTorch's
# kernels and with the package's own; a profile of its step, beside the prediction of `amos bench --on-paper` for this GPU, with
# the gaps between its kernels; electra_base beside Hugging Face's in the same run; amos_base with as many sequences as the memory
# allows (256 above 100 GB, 128 from 70 GB). Writes 3_baseline.md, 3_baseline.log, trace.json.gz (chrome://tracing) and a JSON for
# each contest to OUT (default: a new folder in /tmp). The last lines say what was decided.
# LIMIT_SECONDS=560: time limit of the script; the most important runs come first.
# --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"

SIZE=base STEPS=10 WARMUP=3 COMPILE=(--compile) PRECISION=bf16 VOCABULARY=32768 KERNELS=40
if [ "$DEVICE" = cpu ]; then
    SIZE=tiny STEPS=1 WARMUP=1 SEQUENCES=(2 4) COMPILE=() PRECISION=float32 VOCABULARY=500 KERNELS=5
else
    GIGABYTES="$(python -c 'import torch; print(torch.cuda.get_device_properties(0).total_memory // 10**9)')"
    SEQUENCES=(16 64)
    [ "$GIGABYTES" -lt 70 ] || SEQUENCES=(64 128)
    [ "$GIGABYTES" -lt 100 ] || SEQUENCES=(64 256)
fi

# contest FILE RECIPE SEQUENCES [FLAGS OF AMOS BENCH]: print the page and the result, and move the JSON to OUT/FILE.
contest() {
    local file="$1" recipe="$2" sequences="$3" status=0
    shift 3
    amos bench "$recipe" --device "$DEVICE" --precision "$PRECISION" --steps "$STEPS" \
        --warmup "$WARMUP" --vocabulary-size "$VOCABULARY" --out "$SCRATCH/bench" "$@" --set "dataset.batch_size=$sequences" \
        >"$SCRATCH/bench.md" || status=$?
    # Lower its headings below the one of the step; remove the last line, which names temporary files.
    sed -e 's/^#/###/' -e "/^$(printf '%s' "$SCRATCH/bench" | sed 's/[\/&]/\\&/g')/d" "$SCRATCH/bench.md"
    if [ "$status" -eq 0 ]; then
        mv "$SCRATCH"/bench/*.json "$OUT/$file"
        python -I - "$OUT/$file" <<'PYTHON'
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    contest = json.load(file)
def described(row):
    faster = row["ours_is_faster_by"]
    share = "" if faster else f", {row['fraction_of_peak']:.0%} of the peak"
    ratio = f", of which ours is {faster['median']:.2f} times" if faster else ""
    return f"{row['name']} {row['tokens_per_second']['median']:,.0f} tokens/s{share}{ratio}"
rows = "; ".join(map(described, contest["contestants"]))
settings = contest["settings"]
kernels = contest["config"]["model"]["kernels"]
print(f"\nDecided: {settings['config']}, {contest['work']['sequences']} sequences, kernels={kernels}: {rows}")
PYTHON
    fi
    rm -rf "$SCRATCH/bench"
    return "$status"
}
export -f contest
export DEVICE PRECISION STEPS WARMUP VOCABULARY SCRATCH OUT

rm -f "$OUT"/electra_*.json "$OUT"/amos_*.json "$OUT/trace.json.gz"
step "amos_$SIZE, ${SEQUENCES[0]} sequences" 150 bash -c "set -euo pipefail; contest amos_${SEQUENCES[0]}.json amos_$SIZE ${SEQUENCES[0]} ${COMPILE[*]}"
step "where a step of amos_$SIZE spends its time" 120 python "$GPU_SCRIPTS/profile_step.py" "amos_$SIZE" --device "$DEVICE" \
    --precision "$PRECISION" --vocabulary-size "$VOCABULARY" --kernels "$KERNELS" --trace "$OUT/trace.json.gz" \
    --set "dataset.batch_size=${SEQUENCES[0]}"
# A CPU uses the same kernels with both settings.
[ "$DEVICE" = cpu ] ||
    step "amos_$SIZE, ${SEQUENCES[0]} sequences, model.kernels=triton" 150 bash -c "set -euo pipefail; contest amos_${SEQUENCES[0]}_triton.json amos_$SIZE ${SEQUENCES[0]} ${COMPILE[*]} --set model.kernels=triton"
step "electra_$SIZE beside Hugging Face" 220 bash -c "set -euo pipefail; contest electra_${SEQUENCES[0]}.json electra_$SIZE ${SEQUENCES[0]} --peer hf ${COMPILE[*]}"
step "amos_$SIZE, ${SEQUENCES[1]} sequences" 150 bash -c "set -euo pipefail; contest amos_${SEQUENCES[1]}.json amos_$SIZE ${SEQUENCES[1]}"
finish
