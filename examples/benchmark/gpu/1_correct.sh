#!/usr/bin/env bash
# OUT=FOLDER bash examples/benchmark/gpu/1_correct.sh [--device cpu]
#
# Does it work on this GPU? The fast tests of tests/gpu, two updates of every base recipe in bf16, a resume to the same bits
# in bf16 and fp16, and what the GPU multiplies and copies. Writes 1_correct.md and 1_correct.log to OUT (default: a new
# folder in /tmp); a failure does not stop what follows. LIMIT_SECONDS=570: what it may take in all.
# --device cpu: a rehearsal at tiny size on a machine without a GPU.
set -euo pipefail

# shellcheck source=examples/benchmark/gpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin "${BASH_SOURCE[0]}" "$@"

# First what the others are judged by; the tests take longest.
step "peak and bandwidth" python "$GPU_SCRIPTS/correct.py" peaks --device "$DEVICE"
step "two updates of every base recipe" python "$GPU_SCRIPTS/correct.py" updates --device "$DEVICE"
step "resume to the same bits in bf16" python "$GPU_SCRIPTS/correct.py" resume bf16 --device "$DEVICE"
# fairseq's fp16 does not run on a CPU.
[ "$DEVICE" = cpu ] || step "resume to the same bits in fp16" python "$GPU_SCRIPTS/correct.py" resume fp16 --device "$DEVICE"
step "fast tests of tests/gpu" bash -c "cd '$CHECKOUT' && python -m pytest tests/gpu -m 'not slow' -q -p no:cacheprovider --tb=short --color=no"
finish
