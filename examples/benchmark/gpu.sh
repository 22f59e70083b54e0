#!/usr/bin/env bash
# bash examples/benchmark/gpu.sh [OUT_DIR]
#
# Base models on one GPU in bf16, blocks of 512 and of 128 tokens, beside Hugging Face's ELECTRA in the same run; the most
# telling runs first. What the limit leaves no time for is named and not run.
# OUT_DIR: where the dated pages go (default: examples/benchmark/results). Settings, with their defaults:
#   LIMIT_SECONDS=570       everything together, the environment not counted
#   TOKENS_PER_STEP=32768   sequences times their length
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/environment.sh
source "$HERE/../environment.sh"
case "${1:-}" in
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    -*) fail "$1 stands where OUT_DIR belongs: see --help" ;;
esac
OUT="${1:-$HERE/results}"
LIMIT_SECONDS="${LIMIT_SECONDS:-570}"
TOKENS_PER_STEP="${TOKENS_PER_STEP:-32768}"
prepare_environment

started=$SECONDS
failed=0
left_out=()

# bench RECIPE LENGTH [FLAGS OF AMOS BENCH]
bench() {
    local recipe="$1" length="$2" remaining=$((LIMIT_SECONDS - (SECONDS - started)))
    shift 2
    if [ "$remaining" -lt 30 ]; then
        left_out+=("$recipe at $length tokens${*:+ ($*)}")
        return
    fi
    echo "== $recipe, $length tokens${*:+, $*} ($remaining s left)" >&2
    timeout "$remaining" python -m amos_fairseq.cli.main bench "$recipe" --device cuda --precision bf16 --out "$OUT" \
        --set "task.tokens_per_sample=$length" "dataset.batch_size=$((TOKENS_PER_STEP / length))" "$@" || {
        echo "amos_fairseq: error: $recipe at $length tokens did not finish (status $?)" >&2
        failed=1
    }
}

bench amos_base 512 --peer hf reference --pieces
bench electra_base 512 --peer hf hf_naive reference --pieces
bench mlm_base 512 --peer hf
bench electra_base 128 --peer hf
bench amos_base 128 --peer hf
bench mlm_base 128 --peer hf
bench amos_base 512 --peer hf --compile
bench electra_base 512 --peer hf --compile

for run in ${left_out[@]+"${left_out[@]}"}; do
    echo "not run, no time left: $run" >&2
done
exit "$failed"
