#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/1_correct.sh [--device cpu]
#
# Check that the defaults of this package are right on this GPU: the fast tests of tests/gpu, two updates of every base recipe in
# bf16, `amos train amos_base` with a resume, another resume in fp16, whether attention gives the same bits twice, and the rates
# of products and copies. 2_triton.sh checks this package's own kernels. Writes 1_correct.md and 1_correct.log to OUT (default: a
# new folder in /tmp); a failed step does not stop the next ones. The last lines say what was decided.
# LIMIT_SECONDS=560: time limit of the script; the most important steps come first.
# --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin_with_tests "${BASH_SOURCE[0]}" "$@"

step "two updates of every recipe" 150 python "$GPU_SCRIPTS/correct.py" updates --device "$DEVICE"
step "fast tests of tests/gpu, without Triton" 240 "${TESTS[@]}" -k "not triton"
step "amos train with a resume, bf16" 200 python "$GPU_SCRIPTS/correct.py" resume --device "$DEVICE"
step "attention twice" 60 python "$GPU_SCRIPTS/correct.py" bits --device "$DEVICE"
# fairseq's fp16 does not run on a CPU.
[ "$DEVICE" = cpu ] || step "amos train with a resume, fp16" 100 python "$GPU_SCRIPTS/correct.py" resume --recipe amos_tiny --precision fp16
step "rates of products and copies" 60 python "$GPU_SCRIPTS/correct.py" peaks --device "$DEVICE"
decide_whether_right "the defaults"
finish
