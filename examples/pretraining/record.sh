#!/usr/bin/env bash
# Pretrain for a time, fine-tune and score: one row of docs/records.md. The same command continues after a stop.
#
#   bash examples/pretraining/record.sh RECIPE MINUTES DATA TASKS OUT [KEY=VALUE...]
#
# RECIPE     such as mlm_modern_mini
# DATA       output directory of amos prepare text
# TASKS      directory with upos (of amos prepare tagging), glue (of amos prepare glue, with CoLA and SST-2), both made with
#            DATA/tokenizer, and blimp.jsonl
# OUT        OUT/run is the save directory of the run, OUT/scores has the results, OUT/record.md is the row
# KEY=VALUE  settings of the run, for example common.seed=2
set -euo pipefail

examples="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=examples/environment.sh
source "$examples/environment.sh"
case "${1:-}" in
    -h | --help)
        help_of "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
[ $# -ge 5 ] || fail "usage: record.sh RECIPE MINUTES DATA TASKS OUT [KEY=VALUE...]; see --help"
recipe="$1" minutes="$2" data="$3" tasks="$4" out="$5"
for needed in "$data/dict.txt" "$tasks/upos" "$tasks/glue/CoLA" "$tasks/glue/SST-2" "$tasks/blimp.jsonl"; do
    [ -e "$needed" ] || fail "$needed is missing: see --help"
done
prepare_active_environment

amos train "$recipe" task.data="$data" checkpoint.save_dir="$out/run" --minutes "$minutes" "${@:6}"
# The same fine-tuning for every model, with a rate for the width of the mini recipes.
settings=(--checkpoint "$out/run" --recipe electra --size small --lr 1e-3 --cpu)
amos tag "${settings[@]}" --data "$tasks/upos" --out "$out/scores/upos" --seeds 3 --epochs 5 --batch-size 16
amos glue "${settings[@]}" --data "$tasks/glue" --out "$out/scores/glue" --tasks CoLA,SST-2 --seeds 1 --epochs 3 --pooling mean
amos score "$out/run" --pairs "$tasks/blimp.jsonl" --out "$out/scores/blimp.json"
python "$examples/pretraining/record.py" "$recipe" "$minutes" "$out" | tee "$out/record.md"
