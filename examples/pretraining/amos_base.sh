#!/usr/bin/env bash
# AMOS base as flags: the same settings as config/amos_base.yaml, which states the source of each value.
#
#   bash examples/pretraining/amos_base.sh DATA SAVE_DIR [flags of fairseq-train, which override those below]
#
# The same command continues the run. Change --max-update and --total-num-update (of the learning rate) together.
# Global batch 2048: --batch-size x --update-freq x number of GPUs. These values are for ONE GPU.
set -euo pipefail
data="${1:?usage: amos_base.sh DATA SAVE_DIR [flags of fairseq-train]}"
save_dir="${2:?usage: amos_base.sh DATA SAVE_DIR [flags of fairseq-train]}"
checkout="$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/environment.sh
source "$checkout/examples/environment.sh"
prepare_active_environment

exec fairseq-train "$data" --save-dir "$save_dir" --user-dir "$checkout/amos_fairseq" \
    --task text_pretraining --tokens-per-sample 512 --sample-break-mode none --mask-prob 0.15 \
    --arch amos_base --max-positions 512 \
    --criterion amos --discriminator-loss-weight 50 \
    --batch-size 32 --update-freq 64 --num-workers 2 \
    --max-update 125000 --clip-norm 2.0 \
    --lr 0.0005 --lr-scheduler polynomial_decay --warmup-updates 10000 --total-num-update 125000 \
    --optimizer grouped_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 \
    --bf16 --seed 1 --log-interval 100 --tensorboard-logdir "$save_dir/tensorboard" \
    --save-interval 1000000000 --save-interval-updates 1000 --no-epoch-checkpoints \
    --validate-interval 1000000000 --validate-interval-updates 1000 \
    --keep-interval-updates 3 --keep-interval-updates-pattern 25000 \
    --best-checkpoint-metric num_updates --maximize-best-checkpoint-metric \
    "${@:3}"
