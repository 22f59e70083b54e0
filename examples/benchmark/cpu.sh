#!/usr/bin/env bash
# bash examples/benchmark/cpu.sh [OUT_DIR] [FLAGS OF BENCH.PY]
#
# Measure ELECTRA and AMOS on a CPU in float32 and bf16, with sequences of 128 tokens, beside Hugging Face's
# ELECTRA and the reference implementation in the same run. Run nothing else meanwhile.
# OUT_DIR: folder of the pages and JSON files (default: bench_out). Settings, with their defaults:
#   SEQUENCES=16   sequences in a step; the recipes have 128
#   SIZE=small     of the two recipes: tiny, small, base or large
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/environment.sh
source "$HERE/../environment.sh"
case "${1:-}" in
    -h | --help)
        help_of "${BASH_SOURCE[0]}"
        exit
        ;;
    -*) fail "$1 is in the place of OUT_DIR: see --help" ;;
esac
OUT="${1:-bench_out}"
SEQUENCES="${SEQUENCES:-16}"
SIZE="${SIZE:-small}"
shift || true
prepare_environment
mkdir -p "$OUT"

for precision in float32 bf16; do
    for recipe in "electra_$SIZE" "amos_$SIZE"; do
        name="$OUT/${recipe}_$precision"
        python "$HERE/bench.py" "$recipe" --device cpu --precision "$precision" --json "$name.json" \
            --set "dataset.batch_size=$SEQUENCES" --peer hf reference "$@" | tee "$name.md"
    done
done
