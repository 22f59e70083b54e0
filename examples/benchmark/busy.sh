#!/usr/bin/env bash
# bash examples/benchmark/busy.sh [RECIPE] [FLAGS OF BENCH.PY]
#
# Measure what amos_fairseq/process.py changes on a CPU: tokens/s and the peak memory of the process, with the defaults of
# OpenMP and glibc (stock) and with sleeping threads and kept memory (ours), alone and beside one busy program per core. Run
# nothing else meanwhile. RECIPE: default electra_small. Setting, with its default:
#   SEQUENCES=16   sequences in a step
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/environment.sh
source "$HERE/../environment.sh"
case "${1:-}" in
    -h | --help)
        help_of "${BASH_SOURCE[0]}"
        exit
        ;;
esac
RECIPE="${1:-electra_small}"
shift || true
prepare_environment
unset OMP_WAIT_POLICY GLIBC_TUNABLES
OUT="$(mktemp -d)"
BUSY=()
trap '[ "${#BUSY[@]}" -eq 0 ] || kill "${BUSY[@]}"; rm -rf "$OUT"' EXIT

# measure NAME [VARIABLE=VALUE...]: one line of the table.
measure() {
    local name="$1" speed memory
    shift
    env "$@" python -I -c '
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
sys.exit(code)' \
        python "$HERE/bench.py" "$RECIPE" --device cpu --set "dataset.batch_size=${SEQUENCES:-16}" \
        ${FLAGS[@]+"${FLAGS[@]}"} >"$OUT/page"
    memory="$(tail -n 1 "$OUT/page")"
    speed="$(grep '^| ours ' "$OUT/page" | cut -d '|' -f 3,4)"
    echo "| $name |$speed| $memory MiB |"
}

FLAGS=("$@")
echo "| $RECIPE | tokens/s | smallest to largest | peak memory of the process |"
echo "|---|---|---|---|"
for load in alone busy; do
    if [ "$load" = busy ]; then
        for _ in $(seq "$(getconf _NPROCESSORS_ONLN)"); do
            sh -c 'while :; do :; done' &
            BUSY+=("$!")
        done
    fi
    # A tunable that changes nothing here: the package does not set its own values if the user has set any.
    measure "stock_$load" OMP_WAIT_POLICY=active GLIBC_TUNABLES=glibc.malloc.check=0
    measure "passive_$load" GLIBC_TUNABLES=glibc.malloc.check=0
    measure "ours_$load"
done
