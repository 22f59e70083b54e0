# shellcheck shell=bash
# Sourced by the scripts beside: run_module MODULE [ARGUMENTS...] in the active environment, else in the checkout's own.
run_module() {
    local checkout python=python
    checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
    if [[ -z "${VIRTUAL_ENV:-}" && -x "$checkout/.venv/bin/python" ]]; then
        python="$checkout/.venv/bin/python"
    fi
    # -P: a directory named "preprocess" where the user stands must not be taken for ours.
    PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -P -m "$@"
}
