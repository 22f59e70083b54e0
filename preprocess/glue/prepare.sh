#!/usr/bin/env bash
# Convert GLUE to the input of sentence_prediction: prepare.sh GLUE_DIR TASK|ALL TOKENIZER_DIR OUT [flags]; see --help.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
amos_prepare glue "$@"
