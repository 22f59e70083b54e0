#!/usr/bin/env bash
# Convert labeled words to the input of the task sequence_tagging: prepare.sh TRAIN DEV TOKENIZER_DIR OUT [flags]; see --help.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
amos_prepare tagging "$@"
