#!/usr/bin/env bash
# Two-stage training of ELECTRA (Clark, thesis 2021, section 5.3.3): a generator alone, then a discriminator that starts from
# its weights and learns from its samples, while the generator stays as it is.
#
#   bash examples/pretraining/two_stage.sh SIZE DATA SAVE_DIR UPDATES [KEY=VALUE...]
#
# SIZE      tiny, small, base or large: mlm_SIZE.yaml is the first stage, electra_SIZE.yaml the second
# DATA      what preprocess/pretraining/prepare.sh wrote; several shards with : between
# SAVE_DIR  SAVE_DIR/generator and SAVE_DIR/discriminator are two whole runs; the second one is to be kept
# UPDATES   of each stage; each has a fresh Adam, its own warm-up and its own decay to the end of its updates
# KEY=VALUE settings of both stages, for example dataset.batch_size=32 or optimization.lr=[0.001]
#
# The same command continues whichever stage was stopped, and does nothing when both are finished.
set -euo pipefail

case "${1:-}" in
    -h | --help)
        sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
esac
if [ $# -lt 4 ]; then
    echo "usage: two_stage.sh tiny|small|base|large DATA SAVE_DIR UPDATES [KEY=VALUE...]; --help tells what they are" >&2
    exit 2
fi
size="$1" data="$2" save_dir="$3" updates="$4"
overrides=("${@:5}")
examples="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=examples/hydra_quoting.sh
source "$examples/hydra_quoting.sh"
# shellcheck source=examples/environment.sh
source "$examples/environment.sh"

# Everything that can be wrong with what the user typed, before the first byte is written.
check_arguments() {
    [ -f "$examples/pretraining/config/electra_$size.yaml" ] || fail "there is no size '$size': give tiny, small, base or large"
    [[ "$updates" =~ ^[1-9][0-9]*$ ]] || fail "UPDATES '$updates' is no number of updates: give a whole number above 0"
    local override first_shard="${data%%:*}"
    [ -f "$first_shard/dict.txt" ] || fail "$first_shard holds no binarized corpus (dict.txt): give the DIR of prepare.sh"
    for override in ${overrides[@]+"${overrides[@]}"}; do
        [[ "$override" == *=* ]] || fail "'$override' is not KEY=VALUE; what is given is SIZE, DATA, SAVE_DIR, UPDATES, then settings"
    done
    # A longer first stage would change the generator under a second one that has begun.
    if [ -f "$save_dir/two_stage.txt" ] && [ "$(cat "$save_dir/two_stage.txt")" != "$size $updates" ]; then
        fail "$save_dir was begun with SIZE and UPDATES $(cat "$save_dir/two_stage.txt"): give these, or another SAVE_DIR"
    fi
}

# stage CONFIG DIR [KEY=VALUE...]: one run of fairseq-hydra-train; a run that is finished ends at once.
stage() {
    fairseq-hydra-train --config-dir "$examples/pretraining/config" --config-name "$1" task.data="$(quoted "$data")" \
        checkpoint.save_dir="$(quoted "$2")" common.user_dir="$(quoted "$examples/../amos_fairseq")" \
        optimization.max_update="$updates" task.mask_treatment=electra ${overrides[@]+"${overrides[@]}"} "${@:3}"
}

check_arguments
prepare_active_environment
mkdir -p "$save_dir"
echo "$size $updates" >"$save_dir/two_stage.txt.new" && mv "$save_dir/two_stage.txt.new" "$save_dir/two_stage.txt"

# Both stages mask as ELECTRA's generator does, and in both it is as large as the discriminator, whose weights it becomes.
echo "== stage 1 of 2: the generator, as a masked language model"
stage "mlm_$size" "$save_dir/generator"
echo "== stage 2 of 2: the discriminator, from its weights"
stage "electra_$size" "$save_dir/discriminator" model.generator_size=1 model.share_weights=none model.frozen_generator=true \
    checkpoint.finetune_from_model="$(quoted "$save_dir/generator/checkpoint_last.pt")"
