#!/usr/bin/env bash
# bash tests/run.sh [PYTEST ARGUMENTS]: makes the environment, checks the style, runs the tests (all of them by default).
# Example: bash tests/run.sh -m "not slow" tests/unit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/environment.sh
source examples/environment.sh
prepare_environment test

python -m ruff check .
python -m ruff format --check .

# Two test processes, one thread each: more threads than cores make small tensors slower, not faster.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# The slow tests stand together: whoever has nothing left takes them from the other.
exec python -m pytest -n "${PYTEST_PROCESSES:-2}" --dist worksteal "$@"
