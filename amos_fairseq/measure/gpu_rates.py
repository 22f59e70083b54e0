"""Rates of GPUs for :mod:`amos_fairseq.measure.on_paper`, and the shares of them that classes of operators reach.

Peaks and bandwidths are from data sheets or measured with other programs. The shares, and the rates of this package's
attention, are arguments with a range, and not measurements.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

# Seconds. The shortest kernels of a Hopper or Ampere GPU take 2 to 3 microseconds (assumption).
SHORTEST_KERNEL = 2.5e-6


class Share(NamedTuple):
    """A fraction of a rate that a class of operators reaches: expected, and in a slow and in a fast case."""

    slow: float
    expected: float
    fast: float

    def seconds(self, work: float, rate: float) -> "Seconds":
        """Return how long ``work`` takes at these shares of ``rate``."""
        return Seconds(*(work / (rate * share) for share in self))


class Seconds(NamedTuple):
    """Durations at the slow, the expected and the fast shares."""

    slow: float = 0.0
    expected: float = 0.0
    fast: float = 0.0

    def plus(self, other: "Seconds") -> "Seconds":
        return Seconds(*(one + another for one, another in zip(self, other, strict=True)))

    def at_least(self, other: "Seconds") -> "Seconds":
        return Seconds(*map(max, self, other))


# Shares of a rate. None was measured with this package: each is argued from counted work, and its range is a guess.

# Matrix products of an encoder, of the peak of a large square product. 64 x 512 tokens and widths of 768 to 3,072 are 768 to
# 3,072 tiles of 128 x 256, that is 5.8 to 23.3 rounds of 132 multiprocessors: 3 % are lost in the last round. With an inner
# size of 768 a tile computes for 8.3 us (50.3 MFLOP at a 132nd of 798 TFLOP/s), and writing its 64 KB takes 2.9 us at a 132nd
# of 3.0 TB/s, besides about 0.7 us until its first operands have arrived: 0.97 * 8.3 / 11.9 = 0.68 if nothing overlaps, 0.9
# if the next tile's products hide all of it, as persistent kernels do in part. Inner sizes of 3,072 and of 32,768 (gradients
# of weights) have longer loops, but the latter only 18 to 72 tiles, which are divided and summed again.
PRODUCT_SHARE = Share(0.65, 0.72, 0.80)
# Element-wise kernels that read and write once, of a copy's bandwidth: a copy is one of them, with one operand less.
STREAM_SHARE = Share(0.85, 0.95, 1.0)
# gelu needs erf, its gradient also exp: 30 to 45 instructions a value. Copying 2 + 2 bytes at 4.3 TB/s leaves 29 of them (132
# multiprocessors, 128 a clock, 1.83 GHz), and 43 for the gradient's 2 + 2 + 2; 3.0 TB/s leave 41 and 62.
ERF_SHARE = Share(0.50, 0.70, 0.90)
# Random numbers: Philox takes 10 rounds of some 6 instructions for four of them.
RANDOM_SHARE = Share(0.55, 0.75, 0.95)
# Sums over columns: the gradient of LayerNorm's weights is a kernel of its own that reads both operands again, 5 tensors
# instead of the 3 counted, and the gradient of a bias is summed in two passes.
COLUMNS_SHARE = Share(0.35, 0.55, 0.80)
# Kernels that reduce a row before they write it: LayerNorm, softmax.
ROWS_SHARE = Share(0.70, 0.85, 1.0)
# Rows or values at places that an index gives, and this package's Triton kernels on the logits, which hash and add.
INDEXED_SHARE = Share(0.40, 0.60, 0.90)
LOGITS_SHARE = Share(0.50, 0.70, 0.90)
# Of the published rates of PyTorch's attention, for the difference between machines and shapes.
ATTENTION_SHARE = Share(0.85, 1.0, 1.10)
# Of the ceiling of this package's attention (:func:`ceilings`), where one of two units is busy in every clock. The two or three
# programs on a multiprocessor wait for loads, exponentials and each other's products. A half is 300 TFLOP/s for a forward pass
# without dropout on Hopper; cuDNN, written for it, reaches 335 without a bias, and FlashAttention-2 282.
TRITON_SHARE = Share(0.40, 0.50, 0.65)


class AttentionRates(NamedTuple):
    """FLOP/s of fused attention, without and with dropout. A backward pass has 2.5 times the FLOPs of a forward pass."""

    forward: float
    backward: float
    forward_with_dropout: float
    backward_with_dropout: float

    def of(self, is_backward: bool, has_dropout: bool) -> float:
        return self[2 * has_dropout + is_backward]

    def scaled(self, factor: float) -> "AttentionRates":
        return AttentionRates(*(rate * factor for rate in self))


@dataclass(frozen=True)
class GpuRates:
    """Rates of a GPU.

    Attributes:
        peak: FLOP/s of a large square product, by dtype.
        attention: rates of ``flash``, ``cudnn``, ``efficient`` and ``triton``.
        bandwidth: bytes/s read and written by a large copy.
        capability: the compute capability, by which PyTorch and this package choose kernels.
    """

    name: str
    peak: dict[torch.dtype, float]
    attention: dict[str, AttentionRates]
    bandwidth: float
    capability: tuple[int, int] = (9, 0)


def peaks(half: float, single: float, measured: float = 788 / 989) -> dict[torch.dtype, float]:
    """Scale peaks of a data sheet by a measured share: on an H200, 788 (bf16, 8192^3, random; another program) of 989."""
    return {torch.bfloat16: half * measured, torch.float16: half * measured, torch.float32: single * measured}


# The clocks of the data sheets' bfloat16 peaks: 989 = 132 x 4,096 x 1.83 and 312 = 108 x 2,048 x 1.41 GFLOP/s. Kernels without
# instructions newer than the A100's are assumed to be faster on Hopper in proportion to multiprocessors and clock.
FROM_A100_TO_HOPPER = (132 * 1.83) / (108 * 1.41)
# FlashAttention-2 and cuDNN on an H100, d = 64, T = 512, without dropout: https://arxiv.org/abs/2407.08608, figures 5 and 6.
# Dropout in FlashAttention-2: one Philox number of 7 rounds for 16 weights and a comparison, some 8 instructions a weight. 282
# TFLOP/s are 28 instructions a weight (256 FLOPs), 198 are 100 (640 FLOPs): 28 / 36 and 100 / 108. cuDNN runs without dropout.
FLASH_ON_HOPPER = AttentionRates(282e12, 198e12, 282e12 * 28 / 36, 198e12 * 100 / 108)
CUDNN_ON_HOPPER = AttentionRates(335e12, 266e12, 335e12, 266e12)
# Memory-efficient attention, d = 64: 72 TFLOP/s backward on an A100 with dropout 0.3 (8 x 512 tokens, 64 heads, 1.2 ms,
# without a mask: https://github.com/facebookresearch/xformers/pull/587), 114 in proportion to the clocks. Forward, 164 are
# published for a length of 1,024 without dropout (260 on Hopper); 178 is the assumption for 512 tokens with dropout and a
# mask.
EFFICIENT_ON_HOPPER = AttentionRates(178e12, 114e12, 178e12, 114e12)


class Instructions(NamedTuple):
    """Instructions of a thread of a kernel for a tile of 64 x 64 pairs of query and key, and outside of the loop over tiles."""

    of_tile: int
    outside: int


# This package's kernels with a bias, heads of 64, bf16, without dropout and with it, as Triton 3.6 compiles them
# (tests/cuda/compile_kernels.py does so with the installed version).
ON_SM_90 = {
    "forward": (Instructions(355, 533), Instructions(516, 588)),
    "queries": (Instructions(344, 968), Instructions(510, 1042)),
    "keys": (Instructions(386, 598), Instructions(607, 633)),
}
ON_SM_80 = {
    "forward": (Instructions(416, 528), Instructions(580, 572)),
    "queries": (Instructions(470, 970), Instructions(672, 1016)),
    "keys": (Instructions(533, 587), Instructions(811, 645)),
}
# Matrix products of 64 x 64 x 64 in a tile; the sums of dS by cells are one of 64 x 16 x 64.
PRODUCTS_OF_TILE = {"forward": 2, "queries": 3.25, "keys": 4}
TILES = 8  # of a program at T = 512; shorter texts have a larger part of the instructions outside of the loop


def ceilings(
    counted: dict[str, tuple[Instructions, Instructions]], multiprocessors: int, clock: float, flops_per_clock: int
) -> AttentionRates:
    """Return the FLOP/s at which the busiest unit of a multiprocessor works in every clock.

    It issues 4 instructions a clock, one for each warp of a program, and its tensor cores compute ``flops_per_clock``.
    """
    product = 2 * 64**3

    def clocks(kernel: str, has_dropout: bool) -> float:
        instructions = counted[kernel][has_dropout]
        issued = instructions.of_tile + instructions.outside / TILES
        return max(issued, PRODUCTS_OF_TILE[kernel] * product / flops_per_clock)

    def rate(products: int, has_dropout: bool, *kernels: str) -> float:
        return products * product / sum(clocks(kernel, has_dropout) for kernel in kernels) * multiprocessors * clock

    forward, backward = (
        [rate(2, d, "forward") for d in (False, True)],
        [rate(5, d, "queries", "keys") for d in (False, True)],
    )
    return AttentionRates(forward[0], backward[0], forward[1], backward[1])


TRITON_ON_HOPPER = ceilings(ON_SM_90, 132, 1.83e9, 4096)
TRITON_ON_A100 = ceilings(ON_SM_80, 108, 1.41e9, 2048)
ON_HOPPER = {
    "flash": FLASH_ON_HOPPER,
    "cudnn": CUDNN_ON_HOPPER,
    "efficient": EFFICIENT_ON_HOPPER,
    "triton": TRITON_ON_HOPPER,
}
ON_A100 = {kernel: rates.scaled(1 / FROM_A100_TO_HOPPER) for kernel, rates in ON_HOPPER.items() if kernel != "cudnn"}
ON_A100["triton"] = TRITON_ON_A100

DEVICES = {
    "h200": GpuRates(
        "H200",
        peaks(989e12, 67e12),  # data sheet; float32 without TF32
        ON_HOPPER,
        bandwidth=4.3e12,  # a copy on the device, measured on an H200 with another program
    ),
    "h100": GpuRates(
        "H100",
        # 798: 8192^3 in bf16 of random data; 3.0: a copy on the device; both measured on an H100 with another program.
        peaks(989e12, 67e12, measured=798 / 989),
        ON_HOPPER,
        bandwidth=3.0e12,
    ),
    "a100": GpuRates(
        "A100 80GB",
        peaks(312e12, 19.5e12),  # data sheet
        ON_A100,
        bandwidth=2.039e12 * 4.3 / 4.8,  # data sheet, times the measured share of the data sheet's 4.8 on an H200
        capability=(8, 0),
    ),
}
