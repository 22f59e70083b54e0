#!/usr/bin/env bash
# Convert treebanks, chunks and relations to edge probing: prepare.sh OUT --treebank TRAIN DEV TEST ...; see --help.
set -euo pipefail
# shellcheck source=preprocess/common/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh"
amos_prepare probing "$@"
