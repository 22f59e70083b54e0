#!/usr/bin/env bash
# Continue the pretraining of a released model on your own text: import, binarize with its tokenizer, train.
#
#   bash examples/hugging_face/continue.sh MODEL TEXT OUT UPDATES [FLAG...]
#
# MODEL    folder of an ELECTRA discriminator, BERT, DistilBERT, RoBERTa, XLM-R, MPNet or ModernBERT, as downloaded from the hub
# TEXT     UTF-8 text: a line is a paragraph, an empty line separates documents
# OUT      directory to write: imported/, data/ and run/ (SAVE_DIR of the run)
# UPDATES  number of updates; the learning rate rises for a tenth of them and then falls to 0
# FLAG     of fairseq-train, after the defaults below and instead of them, for example --lr 1e-4 or --batch-size 64
#
# GENERATOR=DIR names the folder of ELECTRA's generator; without it the generator starts from random values. ARCH=electra_base, or
# another arch of this package, continues with another objective than the folder's own; its sizes stay those of the folder.
# TOKENIZER=DIR names the folder of the tokenizer, where MODEL has none that can be read. PREPARE="--document line" gives flags,
# separated by blanks, to amos prepare.
# The same command continues an interrupted run, and does nothing when it is finished.
set -euo pipefail

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=examples/environment.sh
source "$checkout/examples/environment.sh"
case "${1:-}" in
    -h | --help)
        help_of "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
if [ $# -lt 4 ]; then
    echo "usage: continue.sh MODEL TEXT OUT UPDATES [FLAG...]; see --help" >&2
    exit 2
fi
model="$1" text="$2" out="$3" updates="$4"
flags=("${@:5}")
read -r -a of_prepare <<<"${PREPARE:-}"
[[ "$updates" =~ ^[1-9][0-9]*$ ]] || fail "UPDATES '$updates' is not an integer above 0"
[ -f "$model/config.json" ] || fail "$model/config.json is missing: give the folder of a Hugging Face model"
[ -f "$text" ] || fail "$text is not a file: give a UTF-8 text"
prepare_active_environment

imported="$out/imported"
if [ ! -f "$imported/flags.txt" ]; then
    # Only an import of this script that was interrupted is replaced: it has flags.new.
    [ ! -e "$imported" ] || [ -f "$imported/flags.new" ] || fail "$imported is not from this command: give another OUT"
    rm -rf "$imported"
    mkdir -p "$imported"
    : >"$imported/flags.new"
    report="$(amos import "$model" "$imported/model.pt" ${ARCH:+--arch "$ARCH"} ${GENERATOR:+--generator "$GENERATOR"} \
        ${TOKENIZER:+--tokenizer "$TOKENIZER"})"
    echo "$report"
    sed -n 's/^flags of fairseq-train that build this model: //p' <<<"$report" >"$imported/flags.new"
    mv "$imported/flags.new" "$imported/flags.txt"
fi
read -r -a of_model <"$imported/flags.txt" # --arch ARCH, and what differs from ARCH
objective="${of_model[1]%%_*}"

"$checkout/preprocess/pretraining/prepare.sh" "$text" --out "$out/data" --tokenizer "$imported/tokenizer" \
    ${of_prepare[@]+"${of_prepare[@]}"}

# A tenth of the rates of pretraining: the weights are near a minimum. Ours; not compared with others.
fairseq-train "$out/data" --user-dir "$checkout/amos_fairseq" --task text_pretraining --criterion "$objective" \
    --finetune-from-model "$imported/model.pt" "${of_model[@]}" --save-dir "$out/run" \
    --optimizer grouped_adam --weight-decay 0.01 --clip-norm 1.0 --lr 5e-5 --lr-scheduler polynomial_decay \
    --warmup-updates "$((updates / 10))" --total-num-update "$updates" --max-update "$updates" \
    --tokens-per-sample 128 --batch-size 32 --save-interval-updates 1000 --keep-interval-updates 1 --no-epoch-checkpoints \
    --best-checkpoint-metric num_updates --maximize-best-checkpoint-metric \
    --precision auto ${flags[@]+"${flags[@]}"}
echo "run: $out/run; amos export $(printf %q "$out/run") FOLDER writes it for Hugging Face's libraries"
