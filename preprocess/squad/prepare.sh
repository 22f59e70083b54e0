#!/usr/bin/env bash
# SQuAD to what the task squad reads: prepare.sh TRAIN_JSON DEV_JSON TOKENIZER_DIR OUT [flags]; --help tells them.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python=python
if [[ -z "${VIRTUAL_ENV:-}" && -x "$checkout/.venv/bin/python" ]]; then
    python="$checkout/.venv/bin/python"
fi
# -P: a directory named "preprocess" where the user stands must not be taken for ours.
PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -P -m preprocess.squad.prepare "$@"
