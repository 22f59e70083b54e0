#!/usr/bin/env bash
# bash examples/quickstart.sh [TEXT_FILE] [OUT_DIR] [KEY=VALUE...]
#
# Pretrain an AMOS from scratch: create the environment, learn a small vocabulary, binarize the text, pretrain `amos_tiny`,
# and show what it learned on held-out text. Takes about nine minutes on two cores after the installation. Started again,
# it continues where it stopped and skips what is done.
#
# TEXT_FILE  UTF-8 text, documents separated by blank lines (.txt .gz .xz .zst .jsonl); by default, or if "": the English
#            prose of the documentation in the environment, about 11 MB
# OUT_DIR    directory of all output (default: quickstart_out)
# KEY=VALUE  settings of amos_tiny to change, for example optimization.max_update=700
set -euo pipefail

EXAMPLES="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/environment.sh
source "$EXAMPLES/environment.sh"

# Small, so that the model sees each piece often enough in minutes of training. Chosen by measurement for amos_tiny.
VOCABULARY_SIZE=400

absolute_path() {
    case "$1" in
        /*) echo "$1" ;;
        *) echo "$PWD/$1" ;;
    esac
}

# Prints what identifies the text, so that a second run with another text is noticed.
text_identity() {
    local python
    if [ -z "$TEXT_FILE" ]; then
        echo "documentation"
    else
        python="$(python_of_environment)" || exit 1
        "$python" "$EXAMPLES/quickstart_text.py" "$TEXT_FILE"
    fi
}

# Check everything that the user typed before anything is written.
check_arguments() {
    case "${1:-}" in
        -h | --help)
            help_of "${BASH_SOURCE[0]}"
            exit 0
            ;;
    esac
    TEXT_FILE="${1:+$(absolute_path "$1")}"
    OUT_DIR="$(absolute_path "${2:-quickstart_out}")"
    OVERRIDES=("${@:3}")
    local override
    for override in ${OVERRIDES[@]+"${OVERRIDES[@]}"}; do
        [[ "$override" == *=* ]] || fail "'$override' is not KEY=VALUE; the arguments are TEXT_FILE, OUT_DIR, then settings"
    done
    IDENTITY="$(text_identity)"
    [[ "$OUT_DIR" != *:* ]] || fail "$OUT_DIR contains a colon, which separates shards in fairseq: give another OUT_DIR"
    [ ! -e "$OUT_DIR" ] || [ -d "$OUT_DIR" ] || fail "$OUT_DIR is not a folder: give another OUT_DIR"
    if [ -f "$OUT_DIR/text.identity" ] && [ "$(cat "$OUT_DIR/text.identity")" != "$IDENTITY" ]; then
        fail "$OUT_DIR was made from another text: give another OUT_DIR, or remove that folder"
    fi
}

step() {
    echo
    echo "== $* ($((SECONDS / 60)) min $((SECONDS % 60)) s)"
}

make_text() {
    [ -z "$TEXT_FILE" ] || return 0
    TEXT_FILE="$OUT_DIR/documentation.txt"
    if [ ! -f "$TEXT_FILE" ]; then
        step "Collecting the prose of the installed documentation"
        python examples/documentation_corpus.py --out "$TEXT_FILE"
    fi
}

binarize() {
    [ ! -f "$DATA/corpus.json" ] || return 0
    step "Learning $VOCABULARY_SIZE word pieces and binarizing"
    preprocess/pretraining/prepare.sh "$TEXT_FILE" --out "$DATA" --vocab-size "$VOCABULARY_SIZE" \
        --workers "$(getconf _NPROCESSORS_ONLN)"
}

pretrain() {
    step "Pretraining amos_tiny (the same command continues a run that was stopped)"
    # One process on any machine: the settings of amos_tiny are for one. float32: as the numbers in docs/quickstart.md.
    amos train amos_tiny task.data="$DATA" checkpoint.save_dir="$RUN" \
        distributed_training.distributed_world_size=1 task.precision=float32 ${OVERRIDES[@]+"${OVERRIDES[@]}"}
}

show_results() {
    step "Showing the results"
    python examples/quickstart_report.py "$RUN"
    amos report "$RUN" --figures "$OUT_DIR/figures" --out "$OUT_DIR/report.html"
}

main() {
    check_arguments "$@"
    prepare_environment
    cd "$CHECKOUT"
    DATA="$OUT_DIR/data"
    RUN="$OUT_DIR/run"
    # More threads make it slower, because the matrices are small.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
    # Hydra and fairseq print deprecation warnings before the plugin is imported and silences them.
    export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::UserWarning,ignore::FutureWarning}"
    SECONDS=0
    mkdir -p "$OUT_DIR"
    echo "$IDENTITY" >"$OUT_DIR/text.identity.new" && mv "$OUT_DIR/text.identity.new" "$OUT_DIR/text.identity"
    make_text
    binarize
    pretrain
    show_results
    step "Done"
    echo "  text          $TEXT_FILE"
    echo "  binarized     $DATA  (input of fairseq-train)"
    echo "  run           $RUN  (checkpoints, metrics.jsonl, tensorboard/, tokenizer/)"
    echo "  curves        $OUT_DIR/figures/overview.png"
    echo "  report        $OUT_DIR/report.html  (open it in a browser)"
}

main "$@"
