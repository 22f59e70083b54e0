"""Tile sizes, warps and stages of the kernels: defaults, and what a sweep chose for a device.

``examples/benchmark/gpu/sweep.py`` measures the candidates and writes ``tuned_launches.json``, which replaces the file of
that name in this folder: {name of the device: {kernel: {"width 64": launch}}}. The width is that of a head; of
``block_summary`` and ``pick`` it is the number of samples of a program, and of the other kernels of the output layer 0. A
launch changes the order of sums, so results are the same bits only with the same table.
"""

import functools
import json
from pathlib import Path

import torch
import triton

from amos_fairseq.functional.cuda.attention_kernels import IS_INTERPRETED

TUNED_LAUNCHES = Path(__file__).with_name("tuned_launches.json")

ATTENTION = ("attention_forward", "attention_backward_query", "attention_backward_key")
# Kernels of the output layer (logits.py). What fixes the shape of a result is not a part of their launches.
OUTPUT_LAYER = ("summary", "block_summary", "pick", "gradient")
KERNELS = (*ATTENTION, *OUTPUT_LAYER)


def default_launch(kernel: str, width: int) -> dict[str, int]:
    """Return the launch constants of ``kernel``, one of :data:`KERNELS`, for a ``width``.

    Chosen by the machine code for sm_80 and sm_90, not by times on a GPU: tiles of few instructions per pair of query and key,
    whose registers and shared memory let two programs run on a multiprocessor. A warp group of four warps computes 64 rows of
    a product, so with eight warps a tile of 64 rows would be computed twice. Triton's interpreter gets small tiles, so that
    small inputs have several of them.
    """
    return {**_sizes(kernel, width), "enable_fp_fusion": True}  # Triton's default until 3.9; it will be False


def _sizes(kernel: str, width: int) -> dict[str, int]:
    if kernel in ATTENTION:
        block_d = max(16, triton.next_power_of_2(width))
        # Each of the four warps has 16 of the 64 queries, the rows of one product of the tensor cores, and all keys of a tile:
        # the largest score and the sum over the keys of a query need no exchange between warps. 64 x 64 scores in float32 take
        # 32 registers of each of the 128 threads, and so does the result at width 64. Of two stages, one loads the next tile
        # of keys and values while the other is computed.
        block = 16 if IS_INTERPRETED else 64
        is_wide = block_d > 64
        launch = {"BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": block_d, "num_warps": 4, "num_stages": 2}
        if kernel == "attention_backward_query":  # its tiles are square
            launch = {"BLOCK": block, "BLOCK_D": block_d, "num_warps": 4, "num_stages": 1 if is_wide else 2}
        elif kernel == "attention_backward_key" and is_wide:
            # dk and dv take 64 registers of a thread each; scores and dS of 32 queries take half of those of 64.
            launch["BLOCK_M"] = min(block, 32)
        return launch
    return {
        # 2,048 logits of a depth, 16 for each of 128 threads.
        "summary": {"num_warps": 4},
        # 64 logits of a depth for each sample.
        "block_summary": {"num_warps": 4 if width >= 16 else 1},
        "pick": {"num_warps": 4 if width >= 16 else 1},
        # A tile of 2,048 logits is 16 for each of 128 threads. 256 rows are contiguous, four cache lines of 16-bit logits, and
        # 8 positions are enough loads under way while the sum over positions stays in registers.
        "gradient": {"TILE": 8, "ROWS": 256, "num_warps": 4},
    }[kernel]


@functools.cache
def tuned_launches() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    return json.loads(TUNED_LAUNCHES.read_text(encoding="utf-8"))


@functools.cache
def launch_of(kernel: str, width: int, device: torch.device) -> dict[str, int]:
    """Return the launch constants of ``kernel`` for a ``width`` on ``device``: the tuned ones, or the default."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    tuned = tuned_launches().get(name, {}).get(kernel, {}).get(f"width {width}", {})
    return default_launch(kernel, width) | tuned
