#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/3_kernels.sh [--device cpu]
#
# Find the fastest kernels: attention of amos_base (64 sequences of 512 tokens, 12 heads of 64, bf16) by every backend, with and
# without dropout and the gradient of a learned bias; and the output layer in chunks of several sizes and by the package's
# own kernels. Forward and backward pass, FLOP/s and bytes/s. Writes 3_kernels.md and 3_kernels.log to OUT (default: a
# new folder in /tmp). LIMIT_SECONDS=560: time limit of the script.
# --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"

step "attention" 280 python "$GPU_SCRIPTS/kernels.py" attention --device "$DEVICE"
step "output layer" 280 python "$GPU_SCRIPTS/kernels.py" output_layer --device "$DEVICE"
finish
