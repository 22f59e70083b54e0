#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/2_triton.sh [--device cpu]
#
# Check that this package's Triton kernels (model.kernels=triton) are right on this GPU: whether attention gives the same bits
# twice, the fast tests of tests/gpu, two updates of every base recipe in bf16, `amos train amos_base` with a resume to the same
# bits, and each kernel under compute-sanitizer where that is installed. Writes 2_triton.md and 2_triton.log to OUT
# (default: a new folder in /tmp); a failed step does not stop the next ones. The last lines say what was decided.
# LIMIT_SECONDS=560: time limit of the script; the most important steps come first.
# --device cpu: a rehearsal at tiny size on a machine without a GPU, in Triton's interpreter.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin_with_tests "${BASH_SOURCE[0]}" "$@"

# Triton's interpreter runs the kernels where there is no GPU.
INTERPRETED=()
[ "$DEVICE" = cuda ] || INTERPRETED=(env TRITON_INTERPRET=1)
step "attention twice" 60 ${INTERPRETED[@]+"${INTERPRETED[@]}"} python "$GPU_SCRIPTS/correct.py" bits --kernels triton --device "$DEVICE"
step "fast tests of tests/gpu of the Triton kernels" 240 "${TESTS[@]}" -k "triton"
# A CPU trains as with model.kernels=fast, which 1_correct.sh rehearses.
if [ "$DEVICE" = cuda ]; then
    step "two updates of every recipe" 150 python "$GPU_SCRIPTS/correct.py" updates --kernels triton
    step "amos train with a resume, bf16" 200 python "$GPU_SCRIPTS/correct.py" resume --kernels triton
fi
step "compute-sanitizer" 160 python "$GPU_SCRIPTS/sanitizer.py" --device "$DEVICE"
decide_whether_right "the Triton kernels"
finish
