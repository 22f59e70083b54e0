#!/usr/bin/env bash
# Convert raw text to a binarized corpus: prepare.sh TEXT... --out DIR [flags]; see --help.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
amos_prepare text "$@"
