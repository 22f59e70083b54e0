#!/usr/bin/env bash
# Two-stage training of ELECTRA (Clark, thesis 2021, section 5.3.3): first a generator alone, then a discriminator that is
# initialized with its weights and trained on its samples. The generator is frozen in the second stage.
#
#   bash examples/pretraining/two_stage.sh SIZE DATA SAVE_DIR UPDATES [KEY=VALUE...]
#
# SIZE      tiny, small, base or large: mlm_SIZE.yaml is the first stage, electra_SIZE.yaml the second
# DATA      output directory of preprocess/pretraining/prepare.sh; several shards are separated by :
# SAVE_DIR  directory of two runs, SAVE_DIR/generator and SAVE_DIR/discriminator, the result
# UPDATES   number of updates of each stage; each stage has its own Adam state, warm-up and learning rate decay
# KEY=VALUE settings of both stages, for example dataset.batch_size=32 or optimization.lr=[0.001]
#
# The same command continues an interrupted stage, and does nothing when both are finished.
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
if [ $# -lt 4 ]; then
    echo "usage: two_stage.sh tiny|small|base|large DATA SAVE_DIR UPDATES [KEY=VALUE...]; see --help" >&2
    exit 2
fi
size="$1" data="$2" save_dir="$3" updates="$4"
overrides=("${@:5}")

# Check the arguments before anything is written.
check_arguments() {
    [ -f "$examples/pretraining/config/electra_$size.yaml" ] || fail "there is no size '$size': give tiny, small, base or large"
    [[ "$updates" =~ ^[1-9][0-9]*$ ]] || fail "UPDATES '$updates' is not an integer above 0"
    local override first_shard="${data%%:*}"
    [ -f "$first_shard/dict.txt" ] || fail "$first_shard contains no binarized corpus (dict.txt): give the output directory of prepare.sh"
    for override in ${overrides[@]+"${overrides[@]}"}; do
        [[ "$override" == *=* ]] || fail "'$override' is not KEY=VALUE; the arguments are SIZE, DATA, SAVE_DIR, UPDATES, then settings"
    done
    # A longer first stage would change the generator of a second stage that has already started.
    if [ -f "$save_dir/two_stage.txt" ] && [ "$(cat "$save_dir/two_stage.txt")" != "$size $updates" ]; then
        fail "$save_dir was started with SIZE and UPDATES $(cat "$save_dir/two_stage.txt"): give these, or another SAVE_DIR"
    fi
}

# stage CONFIG DIR [KEY=VALUE...]: one run of amos train; a finished run exits at once.
stage() {
    amos train "$1" task.data="$data" checkpoint.save_dir="$2" \
        optimization.max_update="$updates" task.mask_treatment=electra ${overrides[@]+"${overrides[@]}"} "${@:3}"
}

check_arguments
prepare_active_environment
mkdir -p "$save_dir"
echo "$size $updates" >"$save_dir/two_stage.txt.new" && mv "$save_dir/two_stage.txt.new" "$save_dir/two_stage.txt"

# Both stages use ELECTRA's mask treatment. The generator has the discriminator's size, which is initialized with its weights.
echo "== stage 1 of 2: the generator, as a masked language model"
stage "mlm_$size" "$save_dir/generator"
echo "== stage 2 of 2: the discriminator, initialized with the weights of the generator"
stage "electra_$size" "$save_dir/discriminator" model.generator_checkpoint="$save_dir/generator/checkpoint_last.pt" \
    checkpoint.finetune_from_model="$save_dir/generator/checkpoint_last.pt"
