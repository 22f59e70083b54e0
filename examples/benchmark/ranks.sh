#!/usr/bin/env bash
# bash examples/benchmark/ranks.sh [OUT_DIR] [CONFIG] [FLAGS]
#
# Trace the gradient exchange of two ranks on a CPU, and how much of it the backward pass hides: a page of Markdown, and a
# trace for each rank and number of micro-batches (open it in ui.perfetto.dev). It takes a minute or two; run nothing else
# meanwhile.
# OUT_DIR: output folder (default: ranks_out). CONFIG: default amos_small. FLAGS: flags of rank_traces.py.
# Settings, with their defaults:
#   RANKS=2   processes on this machine, one thread each
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/environment.sh
source "$HERE/../environment.sh"
case "${1:-}" in
    -h | --help)
        help_of "${BASH_SOURCE[0]}"
        exit
        ;;
    -*) fail "$1 is in the place of OUT_DIR: see --help" ;;
esac
case "${2:-}" in -*) fail "$2 is in the place of CONFIG: see --help" ;; esac
OUT="${1:-ranks_out}"
CONFIG="${2:-amos_small}"
shift "$(($# < 2 ? $# : 2))"
prepare_environment

# No messages of the profiler; no GPU.
export KINETO_LOG_LEVEL=6 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
exec python "$CHECKOUT/amos_fairseq/process.py" torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "${RANKS:-2}" "$HERE/rank_traces.py" "$CONFIG" \
    --set dataset.batch_size=4 --out "$OUT" "$@"
