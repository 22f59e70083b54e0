#!/usr/bin/env bash
# Convert SQuAD to the input of the task squad: prepare.sh TRAIN_JSON DEV_JSON TOKENIZER_DIR OUT [flags]; see --help.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
amos_prepare squad "$@"
