#!/usr/bin/env bash
# bash tests/reliability/run.sh [ARGUMENTS of pytest]: create the environment and run the long tests: those of this folder (machine
# code of the Triton kernels, scripts of examples/benchmark, accidents of runs, files of strangers) and those with the marker
# by_hand. AMOS_TRIES (default: 100) is the number of accidents and attacks of each kind; a test names the seed of each.
# By hand and before a release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/environment.sh
source examples/environment.sh
prepare_environment test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH="$PWD"
export AMOS_RELIABILITY=1 AMOS_TRIES="${AMOS_TRIES:-100}"
python -m pytest tests/reliability -q -p no:cacheprovider -n 2 "$@"
python -m pytest tests -m by_hand -q -p no:cacheprovider "$@"
