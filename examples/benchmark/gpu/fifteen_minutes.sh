#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/fifteen_minutes.sh CARRY [cuda|cpu]
#
# Everything that one GPU can tell in fifteen minutes: is it right, how fast is it, does it learn. It ends by itself and writes
# OUT/report.md as it goes; the launch constants that its sweep finds go into the checkout, for what follows. cpu: a rehearsal at
# tiny size. CARRY: the folder that bring.sh made; its site.tar.xz may be missing where the Python has all packages. Settings, with
# their defaults:
#   PARTS="right fast learn"        what is run, each call with an OUT of its own; what fails in the first parts can be
#                                   corrected before the last one
#   PYTHON=python3                  the machine's Python
#   LIMIT=575                       seconds until the end; 290 for a rehearsal
#   OBJECTIVES="mlm electra amos"   those that learn, all at the same time
#   LEARNED=modern_mini             the second part of the names of their recipes
#   LEARN=                          more settings of these runs, such as model.cuda_graphs=true
#   WORK=                           folder for unpacked packages, text and runs (default: a new one in /tmp)
set -uo pipefail

case "${1:---help}" in
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
        exit
        ;;
esac
fail() { echo "amos_fairseq: error: $*" >&2; exit 1; }
[ -d "$1" ] || fail "CARRY=$1 is no folder: make it with bring.sh"
CARRY="$(cd "$1" && pwd)"
DEVICE="${2:-cuda}"
case "$DEVICE" in cuda | cpu) ;; *) fail "the device $DEVICE is not known: give cuda or cpu" ;; esac
[ -f "$CARRY/data.tar.xz" ] || fail "$CARRY has no data.tar.xz: give bring.sh a text"
: "${OUT:?names the folder of the report}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$HERE/../../.." && pwd)"
WORK="${WORK:-$(mktemp -d)}"
PYTHON="$(command -v "${PYTHON:-python3}")" || fail "PYTHON does not run"
STARTED=$SECONDS
SIZE=base MOST=100 ON_CPU=()
if [ "$DEVICE" = cpu ]; then
    SIZE=tiny MOST=400 ON_CPU=(common.cpu=true) # few cores need longer
    : "${LIMIT:=290}"
fi
: "${LIMIT:=575}" "${PARTS:=right fast learn}" "${OBJECTIVES:=mlm electra amos}"
runs() { [[ " $PARTS " == *" $1 "* ]]; }
mkdir -p "$WORK/site" "$OUT" || fail "OUT=$OUT cannot be made"
OUT="$(cd "$OUT" && pwd)"
[ ! -e "$OUT/report.md" ] || fail "OUT=$OUT has a report: give another OUT"
[ ! -f "$CARRY/site.tar.xz" ] || tar xJf "$CARRY/site.tar.xz" -C "$WORK/site"
tar xJf "$CARRY/data.tar.xz" -C "$WORK" &
export PYTHONPATH="$WORK/site:$ROOT:$ROOT/examples/benchmark:$HERE" AMOS_PYTHON="$PYTHON" PATH="$ROOT/examples/commands:$PATH"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TRITON_CACHE_DIR="$WORK/triton" ROOT HERE WORK OUT

# part NAME SECONDS COMMAND...: the end of its output goes to report.md at once, everything to all.log (at most 1.5 MB a part).
part() {
    local name="$1" most="$2" status=0 began=$SECONDS left=$((LIMIT - SECONDS + STARTED))
    shift 2
    [ "$left" -ge "$most" ] || most=$left
    if [ "$most" -lt 10 ]; then
        printf '\n## %s: no time left\n' "$name" >>"$OUT/report.md"
        return
    fi
    timeout -k 5 "$most" "$@" >"$WORK/$name.txt" 2>"$WORK/$name.err" </dev/null || status=$?
    {
        printf '\n## %s: status %s, %s s, ends at %s s\n\n' "$name" "$status" $((SECONDS - began)) $((SECONDS - STARTED))
        tail -n 45 "$WORK/$name.txt" | cut -c1-400
        [ "$status" -eq 0 ] || tail -n 12 "$WORK/$name.err" | cut -c1-400
    } >"$WORK/$name.md"
    # Several parts run at the same time.
    flock "$WORK" bash -c 'cat "$1" >>"$2"; cat "$3" "$4" | tail -c 1500000 >>"$5"' _ \
        "$WORK/$name.md" "$OUT/report.md" "$WORK/$name.txt" "$WORK/$name.err" "$OUT/all.log"
    tail -n 8 "$WORK/$name.md"
}

# train RECIPE SAVE_DIR SETTINGS...
train() {
    amos train "$1" "checkpoint.save_dir=$2" "task.data=$WORK/data" distributed_training.distributed_world_size=1 "${@:3}"
}

# smoke SETTINGS... -- RECIPE...: six updates of each by the real command, a line of metrics each.
smoke() {
    local settings=() recipe status=0
    while [ "$1" != -- ]; do settings+=("$1"); shift; done
    shift
    for recipe in "$@"; do
        if train "$recipe" "$WORK/smoke_$recipe" optimization.max_update=6 'optimization.update_freq=[1]' dataset.batch_size=8 \
            common.log_interval=3 dataset.disable_validation=true ${settings[@]+"${settings[@]}"} >"$WORK/$recipe.log" 2>&1; then
            echo "$recipe: $(tail -n 1 "$WORK/smoke_$recipe/metrics.jsonl" | cut -c1-220)"
        else
            echo "$recipe FAILED: $(grep -v '^ ' "$WORK/$recipe.log" | tail -n 1 | cut -c1-300)"
            status=1
        fi
    done
    return "$status"
}
export -f train smoke

part versions 60 "$PYTHON" -c '
import fairseq, numpy, tokenizers, torch, transformers
print(torch.__version__, transformers.__version__, tokenizers.__version__, numpy.__version__, end=" ")
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
wait
grep -q '^## versions: status 0' "$OUT/report.md" || exit 1 # the time that is left is for another try

# Is it right? All at the same time: they wait for imports and compilers more than for the GPU.
if runs right; then
    part updates "$MOST" "$PYTHON" "$HERE/correct.py" updates --device "$DEVICE" &
    part train "$MOST" bash -c 'smoke "$@"' _ ${ON_CPU[@]+"${ON_CPU[@]}"} -- "amos_$SIZE" "electra_$SIZE" \
        "electra_modern_${SIZE/tiny/mini}" &
    part resume $((MOST + 60)) "$PYTHON" "$HERE/correct.py" resume --device "$DEVICE" &
    part graphs "$MOST" "$PYTHON" "$HERE/correct.py" graphs --device "$DEVICE" &
    if [ "$DEVICE" = cuda ]; then
        # Interrupted before its time is over, pytest prints the failures so far.
        part tests "$MOST" timeout -s INT $((MOST - 10)) env --default-signal=INT "$PYTHON" -m pytest "$ROOT/tests/gpu" -n 6 -q \
            -p no:cacheprovider --tb=short -rfE --color=no &
        part triton_updates "$MOST" "$PYTHON" "$HERE/correct.py" updates --kernels triton &
    fi
fi
if runs fast && [ "$DEVICE" = cuda ]; then
    for number in 0 1 2 3; do
        "$PYTHON" "$HERE/sweep.py" compile --until $(($(date +%s) + 70)) --part "$number" --parts 4 >/dev/null 2>&1 &
    done
fi
wait

# How fast? Alone on the GPU; the contests have the launch constants that the sweep found.
if runs fast; then
    if [ "$DEVICE" = cuda ]; then
        part sweep 60 "$PYTHON" "$HERE/sweep.py" sweep --out "$WORK" --until $(($(date +%s) + 45))
        if [ -f "$WORK/tuned_launches.json" ]; then
            cp "$WORK/tuned_launches.json" "$ROOT/amos_fairseq/functional/cuda/"
            cp "$WORK/tuned_launches.json" "$OUT"
        fi
    fi
    part speed 160 "$PYTHON" "$HERE/contests.py" "$OUT/speed.jsonl" "$DEVICE" 145
fi

# Does it learn, or does its discriminator die? Recipes of a time budget, all at the same time, until the end.
LEFT=$((LIMIT - SECONDS + STARTED))
if runs learn && [ "$LEFT" -lt 100 ]; then
    printf '\n## learn: no time left\n' >>"$OUT/report.md"
elif runs learn; then
    SETTINGS=("lr_scheduler.minutes=$(awk "BEGIN { print ($LEFT - 70) / 60 }")" common.log_interval=100
        checkpoint.save_interval_updates=0 task.save_interval_minutes=0 dataset.validate_interval_updates=2000)
    : "${LEARNED:=modern_mini}"
    if [ "$DEVICE" = cuda ]; then
        # Small updates would leave the GPU idle: eight times the batch of the recipe, twice its rate.
        SETTINGS+=(dataset.batch_size=256 'optimization.lr=[0.002]' dataset.num_workers=2)
    else
        LEARNED=tiny SETTINGS+=("${ON_CPU[@]}" lr_scheduler.minutes=0.3 dataset.num_workers=0 dataset.batch_size=4)
    fi
    SETTINGS+=(${LEARN:-})
    for objective in $OBJECTIVES; do
        part "learn_$objective" 560 bash -c 'train "$@"' _ "${objective}_$LEARNED" "$WORK/run_$objective" "${SETTINGS[@]}" &
    done
    wait
    for objective in $OBJECTIVES; do
        part "weights_$objective" 40 "$PYTHON" "$HERE/correct.py" weights --run "$WORK/run_$objective" \
            --out "$OUT/$objective.pt" &
    done
    for objective in $OBJECTIVES; do # without the checkpoints, which a report would evaluate
        [ -f "$WORK/run_$objective/metrics.jsonl" ] || continue
        mkdir -p "$WORK/curves/$objective"
        cp "$WORK/run_$objective/metrics.jsonl" "$WORK/curves/$objective"
    done
    part curves 40 amos report "$WORK"/curves/* --out "$WORK/curves.html" --figures "$WORK/figures"
    wait
    # Those of a run that failed are missing.
    (cd "$WORK" && tar czf "$OUT/runs.tar.gz" --ignore-failed-read figures run_*/metrics.jsonl)
fi
! grep -Eq '^## .*(status [1-9]|no time left)' "$OUT/report.md"
