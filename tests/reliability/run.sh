#!/usr/bin/env bash
# bash tests/reliability/run.sh [--tries N] [--seed S] [--table FILE]: create the environment and attack runs, files and settings
# with N kills, 3 N settings, N damaged files, 5 N damaged labels or features, N / 5 links and 6 N / 10 hostile files. Prints a
# table in Markdown; exit code 1 if an attack succeeds. --tries 100 takes about an hour on two cores;
# tests/reliability/test_attacks.py is the small version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/environment.sh
source examples/environment.sh
prepare_environment test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
PYTHONPATH="$PWD:$PWD/tests/helpers" exec python -m attacks "$@"
