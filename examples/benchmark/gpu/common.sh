# Sourced by the scripts of this folder: flags, environment, the folder $OUT, and independent steps.
# shellcheck shell=bash

GPU_SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/environment.sh
source "$GPU_SCRIPTS/../../environment.sh"
# Minimum seconds left to start a step: Python and its imports take about 20.
LEAST_SECONDS=30

# begin SCRIPT [ARGUMENTS OF THE SCRIPT]: parse the flags, prepare the environment and $OUT, set DEVICE and ARGUMENTS.
# EXTRA=test: also install the requirements of the tests. --curve, of 5_train.sh alone, sets CURVE=yes.
begin() {
    local script="$1"
    NAME="$(basename "$script" .sh)"
    DEVICE=cuda ARGUMENTS=() CURVE=""
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
            -h | --help)
                help_of "$script"
                exit
                ;;
            --device)
                case "${2:-}" in cpu | cuda) DEVICE="$2" ;; *) fail "--device ${2:-} is not known: give cpu or cuda" ;; esac
                shift
                ;;
            -*)
                [ "$NAME $1" = "5_train --curve" ] || fail "$1 is not a flag of $NAME.sh: see --help"
                CURVE=yes
                ;;
            *) ARGUMENTS+=("$1") ;;
        esac
        shift
    done
    LIMIT_SECONDS="${LIMIT_SECONDS:-560}"
    prepare_environment "${EXTRA:-}"
    # The time of a first installation does not count.
    STARTED=0
    [ "${AMOS_ENVIRONMENT:-}" = active ] || STARTED=$SECONDS
    if [ "$DEVICE" = cuda ]; then
        (cd "$CHECKOUT" && python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 9)') || {
            [ $? -eq 9 ] || fail "PyTorch cannot be imported (see above)"
            fail "PyTorch finds no CUDA device: run this on a machine with a GPU, or rehearse it with --device cpu"
        }
    fi
    OUT="${OUT:-${TMPDIR:-/tmp}/amos_gpu_$(date +%Y%m%d_%H%M%S)}"
    mkdir -p "$OUT" || fail "OUT=$OUT cannot be made: give another folder"
    OUT="$(cd "$OUT" && pwd)"
    SCRATCH="$(mktemp -d)"
    trap 'rm -rf "$SCRATCH"' EXIT
    PAGE="$OUT/$NAME.md" LOG="$OUT/$NAME.log" FAILED=0
    rm -f "$PAGE"
    : >"$LOG"
    : >"$SCRATCH/results"
    : >"$SCRATCH/pages"
    : >"$SCRATCH/decided"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$([ "$DEVICE" = cpu ] && echo 1 || echo 8)}" PYTHONUNBUFFERED=1
    echo "== $NAME on $DEVICE; results in $OUT" >&2
}

# begin_with_tests SCRIPT [ARGUMENTS]: begin, and set TESTS, the command for the fast tests of tests/gpu; -k selects some.
begin_with_tests() {
    [ "${AMOS_ENVIRONMENT:-}" = active ] || EXTRA=test
    begin "$@"
    (cd "$CHECKOUT" && python -c 'import pytest, xdist') 2>>"$LOG" || fail "this environment has no pytest or no pytest-xdist: install both"
    # After an interrupt pytest still prints the failures. Several processes compile kernels.
    TESTS=(env -C "$CHECKOUT" timeout -s INT -k 20 220 python -m pytest tests/gpu -q -rf -p no:cacheprovider --tb=short --color=no -m "not slow")
    [ "$DEVICE" = cpu ] || TESTS+=(-n 8)
}

# prepare_contests: set what `contest` and the scripts that call it need: the size, the flags, and two numbers of sequences.
prepare_contests() {
    SIZE=base STEPS=10 WARMUP=3 COMPILE=(--compile) PRECISION=bf16 VOCABULARY=32768 KERNELS=40
    if [ "$DEVICE" = cpu ]; then
        SIZE=tiny STEPS=1 WARMUP=1 SEQUENCES=(2 4) COMPILE=() PRECISION=float32 VOCABULARY=500 KERNELS=5
    else
        GIGABYTES="$(python -c 'import torch; print(torch.cuda.get_device_properties(0).total_memory // 10**9)')"
        SEQUENCES=(16 64)
        [ "$GIGABYTES" -lt 70 ] || SEQUENCES=(64 128)
        [ "$GIGABYTES" -lt 100 ] || SEQUENCES=(64 256)
    fi
    export -f contest
    export DEVICE PRECISION STEPS WARMUP VOCABULARY SCRATCH OUT
}

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

# decide_whether_right WHAT: whether every step so far has passed and was finished; a rehearsal does not say it.
decide_whether_right() {
    local answer=yes
    ! grep -q "not finished" "$SCRATCH/decided" || answer="yes, as far as it was finished"
    [ "$FAILED" -eq 0 ] || answer="NO, see the table of steps"
    [ "$DEVICE" = cuda ] || answer="not known: $([ "$FAILED" -eq 0 ] && echo rehearsed || echo "the rehearsal FAILED")"
    decide "$1 are right on this machine: $answer"
}

# decide TEXT: add a line to what the script decided.
decide() {
    printf '%s\n' "$1" >>"$SCRATCH/decided"
}

# step NAME MAX_SECONDS COMMAND...: its standard output becomes a part of the page, stderr goes to the log. A step that
# fails or has no time left is listed in the table of results, and the next one runs. Lines "Decided: TEXT" of its output are
# what it decided; of a step without any, its result is. A step that failed has one line.
step() {
    local name="$1" most="$2" remaining=$((LIMIT_SECONDS - (SECONDS - STARTED))) began=$SECONDS status=0 result=passed child
    shift 2
    if [ "$remaining" -lt "$LEAST_SECONDS" ]; then
        printf '| %s | | not run: no time left |\n' "$name" >>"$SCRATCH/results"
        decide "$name: not run"
        FAILED=1
        return
    fi
    [ "$remaining" -lt "$most" ] || remaining="$most"
    echo "-- $name (at most $remaining s)" | tee -a "$LOG" >&2
    # In the background, so that Ctrl-C and SIGTERM are handled while it runs.
    timeout -k 15 "$remaining" "$@" >"$SCRATCH/page" 2>>"$LOG" &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null; wait "$child" || true; exit 130' INT TERM
    wait "$child" || status=$?
    trap - INT TERM
    printf '\n## %s\n\n' "$name" >>"$SCRATCH/pages"
    cat "$SCRATCH/page" >>"$SCRATCH/pages"
    if [ "$status" -ne 0 ]; then
        result="FAILED (exit status $status)"
        case "$status" in 124 | 137) result="FAILED (stopped after $remaining s)" ;; esac
        FAILED=1
        { printf '\nIt failed. The end of its log:\n\n```\n'; tail -n 15 "$LOG"; printf '```\n'; } >>"$SCRATCH/pages"
    fi
    printf '| %s | %d | %s |\n' "$name" "$((SECONDS - began))" "$result" >>"$SCRATCH/results"
    if ! grep -q '^Decided: ' "$SCRATCH/page"; then
        decide "$name: $result"
    elif [ "$status" -ne 0 ]; then
        decide "$name: $result$(sed -n 's/^Decided: /; /p' "$SCRATCH/page" | tr -d '\n')"
    else
        sed -n 's/^Decided: //p' "$SCRATCH/page" >>"$SCRATCH/decided"
    fi
    write_page
}

# Called after every step, so that an interrupted run leaves its results.
write_page() {
    {
        printf '# %s, %s, %s\n\n' "$NAME" "$DEVICE" "$(date -u '+%Y-%m-%d %H:%M UTC')"
        [ "$DEVICE" = cuda ] || [ -n "$CURVE" ] || printf 'A rehearsal at tiny size: it shows that the script runs; its numbers have no meaning.\n\n'
        printf '| step | seconds | result |\n|---|---:|---|\n'
        cat "$SCRATCH/results" "$SCRATCH/pages"
        print_decisions '- '
    } >"$PAGE.part"
    mv "$PAGE.part" "$PAGE"
}

# print_decisions PREFIX: the last lines of the page and of the terminal, at most ten.
print_decisions() {
    printf '\nDecided:\n\n'
    sed "s/^/$1/" "$SCRATCH/decided"
}

finish() {
    write_page
    {
        cat "$SCRATCH/results"
        echo "$PAGE"
        print_decisions '  ' | sed '/^$/d'
    } >&2
    exit "$FAILED"
}
