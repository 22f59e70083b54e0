#!/usr/bin/env bash
# bash tests/reliability/run.sh [--tries N] [--seed S] [--table FILE] [--processes P]: create the environment, run the long tests of
# this folder (machine code of the Triton kernels, scripts of examples/benchmark, what some objectives learn, some attacks of each
# kind) and those with the marker by_hand, and attack runs and commands: N kills, N damaged files of runs, N raw files, 6 N / 10
# hostile checkpoints, 3 N imported folders and N / 2 compression bombs.
# Prints a table in Markdown; exit code 1 if an attack succeeds.
# By hand and before a release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/environment.sh
source examples/environment.sh
prepare_environment test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH="$PWD:$PWD/tests/helpers:$PWD/tests/reliability"
export AMOS_RELIABILITY=1
python -m pytest tests/reliability -q -p no:cacheprovider
python -m pytest tests -m by_hand -q -p no:cacheprovider
exec python -m attacks "$@"
