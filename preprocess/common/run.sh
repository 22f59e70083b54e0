# shellcheck shell=bash
# Sourced by the scripts beside: run_module MODULE [ARGUMENTS...] in the active environment, else in the checkout's own.
run_module() {
    local checkout python=python
    checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
    if [[ "${AMOS_ENVIRONMENT:-}" == active ]]; then
        # shellcheck source=examples/environment.sh
        source "$checkout/examples/environment.sh"
        prepare_environment
        python="$AMOS_PYTHON"
    elif [[ -z "${VIRTUAL_ENV:-}" && -x "$checkout/.venv/bin/python" ]]; then
        python="$checkout/.venv/bin/python"
    fi
    # Not "python -m": a folder named "preprocess" in the user's current one would be taken for ours ("-P" needs Python 3.11).
    PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -c '
import sys
sys.path[0] = sys.argv.pop(1)
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)' "$checkout" "$@"
}
