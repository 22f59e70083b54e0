# shellcheck shell=bash
# Sourced by the other scripts: run_module MODULE [ARGUMENTS...] runs in the active environment, or else in that of the checkout;
# with $PYTHON where that is given (another version than that of the checkout is refused).
run_module() {
    local checkout python=python
    checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
    if [[ "${AMOS_ENVIRONMENT:-}" == active ]]; then
        # shellcheck source=examples/environment.sh
        source "$checkout/examples/environment.sh"
        prepare_environment
        python="$AMOS_PYTHON"
    elif [[ -n "${PYTHON:-}" ]]; then
        # shellcheck source=examples/environment.sh
        source "$checkout/examples/environment.sh"
        python="$(python_of_environment)" || exit 1
    elif [[ -z "${VIRTUAL_ENV:-}" && -x "$checkout/.venv/bin/python" ]]; then
        python="$checkout/.venv/bin/python"
    fi
    # Not "python -m": it would import a folder named "preprocess" in the user's current directory ("-P" needs Python 3.11).
    PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -c '
import sys
sys.path[0] = sys.argv.pop(1)
import amos_start, runpy
amos_start.start()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)' "$checkout" "$@"
}
