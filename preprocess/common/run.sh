# shellcheck shell=bash
# Sourced by the other scripts: amos_prepare KIND [ARGUMENTS...] runs amos prepare in the active environment, or else in that of the
# checkout; with $PYTHON where that is given (another version than that of the checkout is refused).
amos_prepare() {
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
    # Not "python -m": it would import an "amos_start.py" of the user's current directory ("-P" needs Python 3.11).
    PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -c '
import sys
sys.path[0] = sys.argv.pop(1)
import amos_start
sys.exit(amos_start.main())' "$checkout" prepare "$@"
}
