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

# The tests start hundreds of processes: the first one stores the compiled modules for the others.
unset PYTHONDONTWRITEBYTECODE
# Two test processes with one thread each: more threads than cores are slower on small tensors.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# The slow tests come first (tests/conftest.py), and an idle process takes over tests from the other.
exec python -m pytest -n "${PYTEST_PROCESSES:-2}" --dist worksteal "$@"
