#!/usr/bin/env bash
# Raw text to a binarized corpus: prepare.sh TEXT... --out DIR [flags]; prepare.sh --help tells them.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
run_module preprocess.pretraining.prepare "$@"
