#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/4_train.sh DATA GLUE [--device cpu]
#
# Does it learn? MLM, ELECTRA and AMOS of small size, each for the same minutes on the text in DATA, and two GLUE tasks with
# what came out. DATA is what preprocess/pretraining/prepare.sh wrote, GLUE what preprocess/glue/prepare.sh wrote with
# DATA/tokenizer. Writes 4_train.md, 4_train.log, the curves of all three in one figure (curves.png), the scores
# (comparison.json, score_by_hours.png) to OUT (default: a new folder in /tmp). Settings, with their defaults:
#   MINUTES=2.1           of pretraining, for each
#   TASKS=MRPC,STS-B      two GLUE tasks
#   LIMIT_SECONDS=570     everything together
# --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"
[ "${#ARGUMENTS[@]}" -eq 2 ] || fail "give DATA and GLUE: see --help"
DATA="${ARGUMENTS[0]}" GLUE="${ARGUMENTS[1]}" MINUTES="${MINUTES:-2.1}" TASKS="${TASKS:-MRPC,STS-B}"
[ -f "${DATA%%:*}/dict.txt" ] || fail "DATA=$DATA holds no dict.txt: give what preprocess/pretraining/prepare.sh wrote"
[ -d "$GLUE" ] || fail "GLUE=$GLUE is not a folder: give what preprocess/glue/prepare.sh wrote"

FLAGS=(--size small --budget-minutes "$MINUTES" --seeds 1)
[ "$DEVICE" = cuda ] || FLAGS=(--size tiny --budget-updates 16 --seeds 1 --cpu --set dataset.batch_size=4 --set 'optimization.update_freq=[1]')
COMPARISON="$SCRATCH/comparison"
step "pretraining and fine-tuning" python "$GPU_SCRIPTS/../../comparison/compare.py" "$DATA" "$GLUE" "$COMPARISON" \
    --objectives mlm,electra,amos --tasks "$TASKS" --fine-tune-at 1 "${FLAGS[@]}"
step "curves" python -m amos_fairseq.cli.main plot "$COMPARISON"/{mlm,electra,amos}/pretraining --out "$SCRATCH/plots"
[ ! -f "$COMPARISON/comparison.md" ] || sed 's/^#/###/' "$COMPARISON/comparison.md" >>"$SCRATCH/pages"
[ ! -f "$SCRATCH/plots/overview.png" ] || cp "$SCRATCH/plots/overview.png" "$OUT/curves.png"
for file in comparison.json score_by_hours.png; do
    [ ! -f "$COMPARISON/$file" ] || cp "$COMPARISON/$file" "$OUT/$file"
done
finish
