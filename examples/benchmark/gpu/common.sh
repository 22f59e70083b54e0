# Sourced by the scripts of this folder: flags, environment, the folder $OUT, and steps that do not stop each other.
# shellcheck shell=bash

GPU_SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/environment.sh
source "$GPU_SCRIPTS/../../environment.sh"

# begin SCRIPT [ARGUMENTS OF THE SCRIPT]: reads the flags, prepares the environment and $OUT. Sets DEVICE and ARGUMENTS.
begin() {
    local script="$1"
    NAME="$(basename "$script" .sh)"
    DEVICE=cuda ARGUMENTS=()
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
            -h | --help)
                sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$script"
                exit
                ;;
            --device)
                case "${2:-}" in cpu | cuda) DEVICE="$2" ;; *) fail "--device ${2:-} is not known: give cpu or cuda" ;; esac
                shift
                ;;
            -*) fail "$1 is not a flag of $NAME.sh: see --help" ;;
            *) ARGUMENTS+=("$1") ;;
        esac
        shift
    done
    LIMIT_SECONDS="${LIMIT_SECONDS:-570}"
    prepare_environment
    if [ "$DEVICE" = cuda ]; then
        python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
            fail "PyTorch finds no CUDA device: run this on a machine with a GPU, or rehearse it with --device cpu"
    fi
    OUT="${OUT:-${TMPDIR:-/tmp}/amos_gpu_$(date +%Y%m%d_%H%M%S)}"
    mkdir -p "$OUT" || fail "OUT=$OUT cannot be made: give another folder"
    OUT="$(cd "$OUT" && pwd)"
    SCRATCH="$(mktemp -d)"
    trap 'rm -rf "$SCRATCH"' EXIT
    PAGE="$OUT/$NAME.md" LOG="$OUT/$NAME.log" STARTED=$SECONDS FAILED=0
    : >"$LOG"
    : >"$SCRATCH/results"
    : >"$SCRATCH/pages"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$([ "$DEVICE" = cpu ] && echo 1 || echo 8)}" PYTHONUNBUFFERED=1
    echo "== $NAME on $DEVICE; results in $OUT" >&2
}

# step NAME COMMAND...: its standard output becomes a part of the page, the rest goes to the log. A step that fails, or for
# which no time is left, is named at the end, and the next one runs.
step() {
    local name="$1" remaining=$((LIMIT_SECONDS - (SECONDS - STARTED))) began=$SECONDS status=0 result=passed
    shift
    if [ "$remaining" -lt 10 ]; then
        printf '| %s | | not run: no time left |\n' "$name" >>"$SCRATCH/results"
        FAILED=1
        return
    fi
    echo "-- $name ($remaining s left)" | tee -a "$LOG" >&2
    timeout -k 10 "$remaining" "$@" >"$SCRATCH/page" 2>>"$LOG" || status=$?
    if [ "$status" -ne 0 ]; then
        result="FAILED (exit status $status)"
        [ "$status" -ne 124 ] || result="FAILED (stopped after $remaining s)"
        FAILED=1
    fi
    printf '| %s | %d | %s |\n' "$name" "$((SECONDS - began))" "$result" >>"$SCRATCH/results"
    printf '\n## %s\n\n' "$name" >>"$SCRATCH/pages"
    cat "$SCRATCH/page" >>"$SCRATCH/pages"
    write_page
}

# After every step, so that a run that is cut short leaves what it has found.
write_page() {
    {
        printf '# %s, %s, %s\n\n' "$NAME" "$DEVICE" "$(date -u '+%Y-%m-%d %H:%M UTC')"
        [ "$DEVICE" = cuda ] || printf 'A rehearsal at tiny size: it shows that the script runs, its numbers mean nothing.\n\n'
        printf '| step | seconds | result |\n|---|---:|---|\n'
        cat "$SCRATCH/results" "$SCRATCH/pages"
    } >"$PAGE.part"
    mv "$PAGE.part" "$PAGE"
}

finish() {
    write_page
    cat "$SCRATCH/results" >&2
    echo "$PAGE" >&2
    exit "$FAILED"
}
