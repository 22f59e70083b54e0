#!/usr/bin/env bash
# bash tests/run.sh [PYTEST ARGUMENTS]: create the environment, check the style, and run the tests (by default all).
# Example: bash tests/run.sh -m "not slow" tests/models
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/environment.sh
source examples/environment.sh
prepare_environment test

python -m ruff check .
python -m ruff format --check .

# One thread in each test process: more threads than cores are slower on small tensors. A process more than there are cores
# (here two), because tests of interrupted runs and of several ranks wait a lot.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# The slow tests come first (tests/conftest.py), and an idle process takes over tests from the other.
exec python -m pytest -n "${PYTEST_PROCESSES:-3}" --dist worksteal "$@"
