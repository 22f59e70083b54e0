#!/usr/bin/env bash
# GLUE to what fairseq's sentence_prediction reads: prepare.sh GLUE_DIR TASK|ALL TOKENIZER_DIR OUT [flags]; --help tells them.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
run_module preprocess.glue.prepare "$@"
