#!/usr/bin/env bash
# AMOS tiny as flags: the same settings as config/amos_tiny.yaml, which states the source of each value.
#
#   bash examples/pretraining/amos_tiny.sh DATA SAVE_DIR [flags of fairseq-train, which override those below]
#
# The same command continues the run. Change --max-update and --total-num-update (of the learning rate) together.
# Global batch 128: --batch-size x --update-freq x number of ranks.
set -euo pipefail
data="${1:?usage: amos_tiny.sh DATA SAVE_DIR [flags of fairseq-train]}"
save_dir="${2:?usage: amos_tiny.sh DATA SAVE_DIR [flags of fairseq-train]}"
checkout="$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/environment.sh
source "$checkout/examples/environment.sh"
prepare_active_environment

exec fairseq-train "$data" --save-dir "$save_dir" --user-dir "$checkout/amos_fairseq" \
    --task text_pretraining --tokens-per-sample 64 --sample-break-mode none --mask-prob 0.15 \
    --arch amos_tiny --max-positions 64 --dropout 0 --attention-dropout 0 \
    --criterion amos --discriminator-loss-weight 50 \
    --batch-size 128 --update-freq 1 --num-workers 1 \
    --max-update 1750 --clip-norm 2.0 \
    --lr 0.002 --lr-scheduler polynomial_decay --warmup-updates 100 --total-num-update 1750 --power 0.5 \
    --optimizer grouped_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 \
    --seed 1 --log-interval 50 --tensorboard-logdir "$save_dir/tensorboard" \
    --save-interval 1000000000 --save-interval-updates 400 --no-epoch-checkpoints \
    --validate-interval 1000000000 --validate-interval-updates 200 \
    --keep-interval-updates 2 \
    --best-checkpoint-metric num_updates --maximize-best-checkpoint-metric \
    "${@:3}"
