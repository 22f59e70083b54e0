#!/usr/bin/env bash
# Download GLUE as the tables that prepare.sh reads: download.sh OUT [TASK...]; see --help.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
amos_prepare glue-download "$@"
