#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/1_correct.sh [--device cpu]
#
# Check this package on this GPU: rates of products and copies, the fast tests of tests/gpu, two updates of every base recipe in
# bf16, and a resume to the same bits in bf16 and fp16; the steps that run this package's Triton kernels come last. Writes
# 1_correct.md and 1_correct.log to OUT (default: a new folder in /tmp); a failed step does not stop the next ones.
# LIMIT_SECONDS=560: time limit of the script.
# --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "${AMOS_ENVIRONMENT:-}" = active ] || EXTRA=test
begin "${BASH_SOURCE[0]}" "$@"
(cd "$CHECKOUT" && python -c 'import pytest, xdist') 2>>"$LOG" || fail "this environment has no pytest or no pytest-xdist: install both"

# After an interrupt pytest still prints the failures. Several processes compile kernels.
TESTS=(env -C "$CHECKOUT" timeout -s INT -k 20 240 python -m pytest tests/gpu -q -rf -p no:cacheprovider --tb=short --color=no)
[ "$DEVICE" = cpu ] || TESTS+=(-n 8)
step "peak and bandwidth" 100 python "$GPU_SCRIPTS/correct.py" peaks --device "$DEVICE"
step "fast tests of tests/gpu, without Triton" 270 "${TESTS[@]}" -m "not slow" -k "not triton"
step "two updates of every base recipe" 150 python "$GPU_SCRIPTS/correct.py" updates --device "$DEVICE"
step "resume to the same bits in bf16" 120 python "$GPU_SCRIPTS/correct.py" resume bf16 --device "$DEVICE"
# fairseq's fp16 does not run on a CPU.
[ "$DEVICE" = cpu ] || step "resume to the same bits in fp16" 120 python "$GPU_SCRIPTS/correct.py" resume fp16 --device "$DEVICE"
step "two updates with model.kernels=triton" 150 python "$GPU_SCRIPTS/correct.py" updates --kernels triton --device "$DEVICE"
step "fast tests of tests/gpu of the Triton kernels" 270 "${TESTS[@]}" -m "not slow" -k "triton"
finish
