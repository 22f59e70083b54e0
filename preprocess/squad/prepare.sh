#!/usr/bin/env bash
# SQuAD to what the task squad reads: prepare.sh TRAIN_JSON DEV_JSON TOKENIZER_DIR OUT [flags]; --help tells them.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
run_module preprocess.squad.prepare "$@"
