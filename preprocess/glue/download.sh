#!/usr/bin/env bash
# Download GLUE's official files: download.sh OUT [TASK...] [flags]; see --help.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
amos_prepare glue-download "$@"
