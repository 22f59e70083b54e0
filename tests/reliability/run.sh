#!/usr/bin/env bash
# bash tests/reliability/run.sh [--tries N] [--seed S] [--table FILE] [--processes P]: create the environment, run the long tests of
# this folder (machine code of the Triton kernels, scripts of examples/benchmark, what some objectives learn, some attacks of each
# kind) and those with the marker by_hand, and attack runs, commands, files and settings: N kills, 3 N settings of a training and
# N of other commands, N damaged files of runs, N tables to label, N raw files, 6 N / 10 hostile checkpoints,
# 3 N imported folders, N / 2 compression bombs, N / 2 consoles and disks, N / 5 folders with planted modules and N / 20 signals to
# commands that train in another process.
# Prints a table in Markdown; exit code 1 if an attack succeeds. --tries 100 takes half an hour on two cores.
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
