#!/usr/bin/env bash
# bash examples/comparison/run.sh DATA GLUE OUT --budget-updates N|--budget-flops F|--budget-minutes M [FLAGS]
#
# Compare the objectives with one encoder, one text and one budget; --help lists the flags.
set -euo pipefail

EXAMPLES="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=examples/environment.sh
source "$EXAMPLES/environment.sh"
prepare_environment
# Hydra and fairseq print deprecation warnings before the plugin can silence them.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::UserWarning,ignore::FutureWarning}"
exec python "$EXAMPLES/comparison/compare.py" "$@"
