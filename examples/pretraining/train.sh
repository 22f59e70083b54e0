#!/usr/bin/env bash
# Pretrain AMOS with flags of fairseq-train. The values are those of the recipe's YAML, which names their sources.
#
#   bash examples/pretraining/train.sh RECIPE DATA SAVE_DIR [flags of fairseq-train, which override those below]
#
# RECIPE: amos_tiny, amos_mini, amos_small, amos_base, amos_base_pp or amos_large; with ModernBERT's encoder amos_modern_mini,
# amos_modern_small, amos_modern_base or amos_modern_large.
# The same command continues the run. Change --max-update and --total-num-update (of the learning rate) together.
# Global batch: --batch-size x --update-freq x number of GPUs. These values are for ONE GPU.
set -euo pipefail
checkout="$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/environment.sh
source "$checkout/examples/environment.sh"
case "${1:-}" in
    -h | --help)
        help_of "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
[ $# -ge 3 ] || fail "usage: train.sh RECIPE DATA SAVE_DIR [flags of fairseq-train]"
recipe="$1" data="$2" save_dir="$3"

# What a size changes in the flags of amos_base below: the last value of a flag counts.
case "$recipe" in
    amos_tiny) size=(--arch amos_tiny --kernels fast --tokens-per-sample 64 --max-positions 64 --dropout 0 --attention-dropout 0
        --batch-size 128 --update-freq 1 --num-workers 1 --log-interval 50
        --max-update 1750 --total-num-update 1750 --lr 0.002 --warmup-updates 100 --power 0.5
        --save-interval-updates 400 --validate-interval-updates 200
        --keep-interval-updates 2 --keep-interval-updates-pattern -1) ;;
    amos_mini | amos_modern_mini) size=(--arch "$recipe" --kernels fast --tokens-per-sample 128 --max-positions 128
        --dropout 0 --attention-dropout 0
        --update-freq 1 --num-workers 1
        --max-update 16000 --total-num-update 16000 --lr 0.001 --warmup-updates 500
        --keep-interval-updates 2 --keep-interval-updates-pattern -1)
        [ "$recipe" = amos_modern_mini ] || size+=(--discriminator-lr-scale 0.05) ;;
    amos_small) size=(--arch amos_small --kernels fast --tokens-per-sample 128 --max-positions 128
        --batch-size 128 --update-freq 1 --max-update 1000000 --total-num-update 1000000 --adam-betas '(0.9, 0.999)'
        --save-interval-updates 5000 --validate-interval-updates 5000 --keep-interval-updates-pattern 100000) ;;
    amos_base) size=() ;;
    amos_base_pp) size=(--max-update 1950000 --total-num-update 1950000 --lr 0.0002
        --save-interval-updates 2000 --validate-interval-updates 10000 --keep-interval-updates-pattern 250000) ;;
    amos_large) size=(--arch amos_large --batch-size 16 --update-freq 128
        --max-update 400000 --total-num-update 400000 --lr 0.0002 --adam-betas '(0.9, 0.999)'
        --keep-interval-updates-pattern 50000) ;;
    amos_modern_small) size=(--arch amos_modern_small --kernels fast --max-positions 8192
        --batch-size 64 --update-freq 4 --max-update 500000 --total-num-update 500000
        --save-interval-updates 5000 --validate-interval-updates 5000 --keep-interval-updates-pattern 100000) ;;
    amos_modern_base) size=(--arch amos_modern_base --kernels fast --max-positions 8192) ;;
    amos_modern_large) size=(--arch amos_modern_large --kernels fast --max-positions 8192 --batch-size 16 --update-freq 128
        --max-update 400000 --total-num-update 400000 --lr 0.0002 --adam-betas '(0.9, 0.999)'
        --keep-interval-updates-pattern 50000) ;;
    *) fail "there are no flags for '$recipe': give amos_tiny, amos_mini, amos_small, amos_base, amos_base_pp, amos_large, amos_modern_mini, amos_modern_small, amos_modern_base or amos_modern_large" ;;
esac
prepare_active_environment

exec fairseq-train "$data" --save-dir "$save_dir" --user-dir "$checkout/amos_fairseq" \
    --task text_pretraining --tokens-per-sample 512 --sample-break-mode none --mask-prob 0.15 \
    --arch amos_base --max-positions 512 --kernels triton \
    --criterion amos --discriminator-loss-weight 50 \
    --batch-size 32 --update-freq 64 --num-workers 2 \
    --max-update 125000 --clip-norm 2.0 \
    --lr 0.0005 --lr-scheduler warmup_stable_decay --warmup-updates 10000 --total-num-update 125000 \
    --optimizer grouped_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 \
    --seed 1 --log-interval 100 --tensorboard-logdir "$save_dir/tensorboard" \
    --save-interval 1000000000 --save-interval-updates 1000 --no-epoch-checkpoints \
    --validate-interval 1000000000 --validate-interval-updates 1000 \
    --keep-interval-updates 3 --keep-interval-updates-pattern 25000 \
    --best-checkpoint-metric num_updates --maximize-best-checkpoint-metric \
    --precision auto ${size[@]+"${size[@]}"} "${@:4}"
