#!/usr/bin/env bash
# GLUE's official files: download.sh OUT [TASK...] [flags]; --help tells them.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python=python
if [[ -z "${VIRTUAL_ENV:-}" && -x "$checkout/.venv/bin/python" ]]; then
    python="$checkout/.venv/bin/python"
fi
# -P: a directory named "preprocess" where the user stands must not be taken for ours.
PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -P -m preprocess.glue.download "$@"
