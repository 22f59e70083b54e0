"""Predict the time of a training step on a GPU from the kernels that it launches, their bytes and their FLOPs, without a GPU.

The real step (model, criterion, backward pass, clipping, optimizer) runs on the FakeTensors of
:mod:`amos_fairseq.measure.fake_cuda`. Every operator that would start a kernel counts as one kernel, except operators on lists
of tensors (:func:`kernels_of`). Its predicted time is

    matrix product   max(FLOPs / (share * peak), bytes / (share * bandwidth))
    fused attention  FLOPs / (share * attention rate) + bytes of the mask, of its gradient and of scratch memory / bandwidth
    anything else    bytes / (share * bandwidth)

and at least :data:`SHORTEST_KERNEL` for each kernel. The peak is that of a large square product, the bandwidth that of a large
copy. The share of them that a class of operators reaches is assumed: an expected value, a slow and a fast one
(:class:`Share`). The sum of the expected times is the prediction; those of the slow and of the fast shares, all at once, are
its range. It holds for layers as written, without torch.compile, and for a host that launches kernels faster than the device
runs them. It is meant to be compared with a measurement, part by part.
"""

import contextlib
import dataclasses
import math
from collections import ChainMap, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from amos_fairseq.measure import step_profile
from amos_fairseq.measure.configuration import BenchSettings, BenchSetup, build_task, set_up
from amos_fairseq.measure.fairseq_step import FairseqStep, random_batch
from amos_fairseq.measure.fake_cuda import FakeCuda, fake_cuda
from amos_fairseq.measure.flops import training_flops

aten = torch.ops.aten

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

# A part of the measured profile is one row of the table, or two: its matrix products, and everything else.
PRODUCTS, REST = "matrix products", "the rest"
SPLIT_PARTS = (step_profile.ATTENTION, step_profile.FFN, step_profile.OUTPUT)
TABLE_ORDER = tuple(
    row
    for part in step_profile.PARTS
    for row in ((f"{part}: {PRODUCTS}", f"{part}: {REST}") if part in SPLIT_PARTS else (part,))
)


def table_row(part: str, is_product: bool) -> str:
    return f"{part}: {PRODUCTS if is_product else REST}" if part in SPLIT_PARTS else part


# By name, because this package's operators exist only where Triton was imported.
FUSED_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": ("flash", 0),
    "aten::_scaled_dot_product_flash_attention_backward": ("flash", 1),
    "aten::_scaled_dot_product_cudnn_attention": ("cudnn", 0),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("cudnn", 1),
    "aten::_scaled_dot_product_efficient_attention": ("efficient", 0),
    "aten::_scaled_dot_product_efficient_attention_backward": ("efficient", 1),
    "amos_fairseq::attention": ("triton", 0),
    "amos_fairseq::attention_backward": ("triton", 1),
}
# FLOPs by arguments and result. PyTorch's table, which operators extend later, has no matrix-vector products.
FLOPS = ChainMap({aten.mv: lambda matrix, vector, out_val: 2 * matrix.numel()}, flop_registry)
# Operators that only allocate.
ALLOCATE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Operators that overwrite their first argument without reading it.
OVERWRITE = {
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.exponential_,
    aten.random_,
    aten.uniform_,
    aten.normal_,
    aten.bernoulli_,
    aten._foreach_copy_,
    aten._foreach_zero_,
}
# Operators that read as much of their first argument as they return.
GATHER = {aten.embedding, aten.gather, aten.index_select, aten.index}
# Operators that change as much of their first argument as they are given values; the second set also reads it.
ACCUMULATE = {aten.scatter_add_, aten.index_add_}
SCATTER = {aten.index_put_, aten._index_put_impl_, aten.scatter_, aten.index_copy_, *ACCUMULATE}
# Operators whose share of a copy's bandwidth is not STREAM_SHARE.
SHARES = {
    **dict.fromkeys((aten.gelu, aten.gelu_backward), ERF_SHARE),
    **dict.fromkeys(
        (aten.native_dropout, aten.exponential_, aten.uniform_, aten.normal_, aten.random_, aten.bernoulli_, aten.rand),
        RANDOM_SHARE,
    ),
    **dict.fromkeys((aten.native_layer_norm_backward, aten.sum), COLUMNS_SHARE),
    **dict.fromkeys(
        (aten.native_layer_norm, aten._softmax, aten._log_softmax, aten.logsumexp, aten.amax, aten.cumsum), ROWS_SHARE
    ),
    **dict.fromkeys((*GATHER, *SCATTER, aten.embedding_dense_backward, aten.scatter_add), INDEXED_SHARE),
}
# Operators of this package that read given blocks of rows of the logits [K,n,V], their first argument.
READ_BLOCKS = {"amos_fairseq::pick_rows", "amos_fairseq::summarize_blocks"}


@dataclass
class Cost:
    """Kernels, bytes and FLOPs of a part, and the seconds predicted for it."""

    launches: int = 0
    bytes: float = 0
    flops: float = 0
    range: Seconds = Seconds()

    @property
    def seconds(self) -> float:
        """The expected duration."""
        return self.range.expected

    def add(self, other: "Cost") -> None:
        self.launches += other.launches
        self.bytes += other.bytes
        self.flops += other.flops
        self.range = self.range.plus(other.range)


class Trace(TorchDispatchMode):
    """Sum the costs of all operators by row of the table, in forward and backward passes.

    An operator belongs to the part of the innermost module or range in which it runs, also when a layer is recomputed in the
    backward pass. Other operators of a backward pass belong to the part of the operator that created the autograd node.

    Attributes:
        costs: by row of the table.
        operators: by row and name of the operator.
    """

    def __init__(self, device: GpuRates) -> None:
        super().__init__()
        self.device = device
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.operators: dict[tuple[str, str], Cost] = defaultdict(Cost)
        self._ranges: list[str] = []
        self._part_of_node: dict[int, str] = {}

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Replacement for ``record_function``."""
        self._ranges.append(name)
        try:
            yield
        finally:
            self._ranges.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "prim":  # queries of a tensor's device: frequent, and no work
            return function(*args, **kwargs)
        part = self._current_part()
        result = function(*args, **kwargs)
        if starts_kernel(function, args, kwargs, result):
            self._add(part, function, args, kwargs, result)
        return result

    def _current_part(self) -> str:
        node = torch._C._current_autograd_node()
        is_in_module = any(name.startswith(step_profile.PREFIX) for name in self._ranges)
        if node is not None and not is_in_module:
            return self._part_of_node.get(node._sequence_nr(), step_profile.OTHER)
        parts = (part_of_range(name) for name in reversed(self._ranges))
        part = next((part for part in parts if part is not None), step_profile.OTHER)
        # The first operator dispatched after a node was created is the one that the node belongs to.
        self._part_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, part)
        return part

    def _add(self, part: str, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = function.overloadpacket
        fused = FUSED_ATTENTION.get(packet._qualified_op_name)
        is_product = packet in FLOPS and fused is None
        flops = FLOPS[packet](*args, **kwargs, out_val=result) if packet in FLOPS else 0
        moved = traffic(function, args, kwargs, result)
        bandwidth = self.device.bandwidth
        if fused is not None:
            kernel, is_backward = fused
            rate = self.device.attention[kernel].of(is_backward, drops_weights(function, args, kwargs))
            seconds = (TRITON_SHARE if kernel == "triton" else ATTENTION_SHARE).seconds(flops, rate)
            seconds = seconds.plus(STREAM_SHARE.seconds(extra_bytes(packet, args, result), bandwidth))
        elif is_product:
            dtype = next(leaf.dtype for leaf in tree_iter(args) if isinstance(leaf, Tensor))
            seconds = PRODUCT_SHARE.seconds(flops, self.device.peak[dtype])
            seconds = seconds.at_least(STREAM_SHARE.seconds(moved, bandwidth))
        else:
            is_ours = function.namespace == "amos_fairseq"
            share = LOGITS_SHARE if is_ours else SHARES.get(packet, STREAM_SHARE)
            seconds = share.seconds(moved, bandwidth)
        launches = kernels_of(function, args)
        seconds = seconds.at_least(Seconds(*3 * [launches * SHORTEST_KERNEL]))
        row = table_row(part, is_product)
        for cost in (self.costs[row], self.operators[row, packet.__name__]):
            cost.add(Cost(launches, moved, flops, seconds))


def part_of_range(name: str) -> str | None:
    """Return the part of the profile for a module's mark or a range of fairseq's trainer."""
    if name.startswith(step_profile.PREFIX):
        return name.removeprefix(step_profile.PREFIX)
    # In the range "backward", outside of autograd, the trainer copies gradients to the float32 master weights.
    return step_profile.OPTIMIZER if name == "backward" else step_profile.PART_OF_FAIRSEQ.get(name)


def starts_kernel(function: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Return whether a CUDA device would do any work: false for views, allocations and work on the CPU."""
    if function.overloadpacket in ALLOCATE:
        return False
    results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
    inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(tensor.device.type == "cuda" for tensor in results + inputs):
        return False
    if function._schema.is_mutable:
        return True
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return not results or any(tensor.untyped_storage()._cdata not in storages for tensor in results)


def drops_weights(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator of fused attention drops weights."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return False


def kernels_of(function: Any, args: Any) -> int:
    """Return how many kernels CUDA starts for an operator that starts any: 1, or those of an operator on lists of tensors.

    ``torch._foreach_*`` starts one kernel per tensor unless all tensors have one dtype and those that belong together equal
    sizes and strides without gaps. Only the lists of ``_foreach_copy_`` may differ in dtype, each with one of its own
    (``can_use_fast_route`` in PyTorch's ``ForeachUtils.h``, ``ForeachBinaryOpList.cu``). Lists that are processed together
    count as one kernel, which is a lower bound: up to 320 blocks of 65,536 values and 64 pairs of tensors fit into one.
    """
    if not function.overloadpacket.__name__.startswith("_foreach_"):
        return 1
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
    groups = list(zip(*lists, strict=True))
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    if function.overloadpacket is not aten._foreach_copy_:
        dtypes = [set.union(*dtypes)]
    layouts = ({(tensor.shape, tensor.stride()) for tensor in group} for group in groups)
    is_joint = (
        all(len(kinds) == 1 for kinds in dtypes)
        and all(len(kinds) == 1 for kinds in layouts)
        and all(has_no_gaps(tensor) for tensor in lists[0])
    )
    return 1 if is_joint else len(groups)


def has_no_gaps(tensor: Tensor) -> bool:
    """Return whether the values fill a range of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def traffic(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that a kernel has to read and write at least; a broadcast tensor is read once.

    The copy of the batch to the device counts as a copy on the device.
    """
    packet = function.overloadpacket
    arguments = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)} | kwargs
    returned = total_bytes(result)
    if packet is aten.index_fill_:
        target, dimension, index = args[:3]
        return num_bytes(index) + num_bytes(target) // target.size(dimension) * index.numel()
    if packet in SCATTER:
        others = cuda_tensors([value for name, value in arguments.items() if name != "self"])
        indices = sum(num_bytes(tensor) for tensor in others if not tensor.is_floating_point())
        values = sum(num_bytes(tensor) for tensor in others if tensor.is_floating_point())
        return indices + (3 if packet in ACCUMULATE else 2) * values
    if packet._qualified_op_name in READ_BLOCKS:
        from amos_fairseq.functional.cuda.logits import BLOCK_ROWS  # needs Triton, as the operator does

        logits, *others = cuda_tensors(args)
        read = arguments["blocks"].numel() * BLOCK_ROWS * len(logits) * logits.element_size()
        return read + sum(map(num_bytes, others)) + returned
    if packet in GATHER:
        return 2 * returned + total_bytes(args[1:])
    written_names = [a.name for a in function._schema.arguments if a.is_write and a.name in arguments]
    if packet is aten._fused_adamw_ and arguments.get("grad_scale") is None:
        written_names.remove("grads")  # written only when the operator unscales the gradients
    unread = {"out"} | ({"self"} if packet in OVERWRITE else set())
    read = total_bytes([value for name, value in arguments.items() if name not in unread])
    if not written_names:
        return read + returned
    written = cuda_tensors([arguments[name] for name in written_names])
    changed = {tensor.untyped_storage()._cdata for tensor in written}
    new = (tensor for tensor in cuda_tensors(result) if tensor.untyped_storage()._cdata not in changed)
    return read + sum(map(num_bytes, [*written, *new]))


def cuda_tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(nest) if isinstance(leaf, Tensor) and leaf.device.type == "cuda"]


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; expanded dimensions (stride 0) count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * tensor.element_size()


def total_bytes(nest: Any) -> int:
    return sum(map(num_bytes, cuda_tensors(nest)))


def extra_bytes(packet: Any, args: Any, result: Any) -> int:
    """Return the bytes that a fused kernel moves beyond those included in its published rate.

    These are a mask and its gradient. Triton's backward pass also reads the output for dO . O, and writes and reads sums of dS
    by cells of 8 x 8, or, at given positions, dS.
    """
    if packet._qualified_op_name == "amos_fairseq::attention_backward":
        _, heads, bias, _, _, positions, out = args[:7]
        B, T, _, H, _ = heads.shape
        if bias is None:
            return num_bytes(out)
        blocks = math.ceil(T / 64)
        cells = B * H * blocks * (blocks + 1) * 8
        return num_bytes(out) + 2 * 4 * (64 * cells if positions is None else B * H * out.size(1) * T)
    masks: tuple = ()
    if packet is aten._scaled_dot_product_efficient_attention:
        masks = args[3:4]
    elif packet is aten._scaled_dot_product_efficient_attention_backward:
        masks = (args[4], result[3])
    return sum(num_bytes(mask) for mask in masks if isinstance(mask, Tensor))


@dataclass(frozen=True)
class StepPrediction:
    """The predicted costs of a step.

    Attributes:
        costs: by row of the table.
        tokens: number of tokens in the micro-batch.
        model_flops: forward and backward pass of the reference implementation.
    """

    setup: BenchSetup
    device: GpuRates
    tokens: int
    model_flops: float
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def total(self) -> Cost:
        total = Cost()
        for cost in self.costs.values():
            total.add(cost)
        return total


def predict_step(settings: BenchSettings, device_name: str) -> StepPrediction:
    """Trace the second update of ``settings`` and predict its time on a GPU of :data:`DEVICES`.

    Raises:
        UserError: the settings describe no pretraining step, or :func:`fake_cuda` has no compiler.
    """
    device = DEVICES[device_name]
    with fake_cuda(device.capability) as cuda:
        with unset_fake_temporarily():
            setup = set_up(dataclasses.replace(settings, device="cuda")).with_model(compile=False)
            task = build_task(setup.cfg.task, setup.vocabulary_size)
            batch = random_batch(task, setup.batch_size)
        trace = trace_step(FairseqStep(setup, task), cuda, batch, device)
    tokens = batch["ntokens"]
    model_flops = training_flops(setup.cfg, setup.vocabulary_size, reference=True).per_token * tokens
    return StepPrediction(setup, device, tokens, model_flops, dict(trace.costs))


def trace_step(step: FairseqStep, cuda: FakeCuda, batch: dict[str, Any], device: GpuRates) -> Trace:
    """Trace one update after a first one, which creates the optimizer's moments."""
    step.step(cuda.fake(batch))
    trace = Trace(device)
    with (
        mock.patch.object(torch.autograd.profiler, "record_function", trace.range),
        mock.patch.object(step_profile, "record_function", trace.range),
        step_profile.marked_parts(step),
        step_profile.as_written(),
        trace,
    ):
        step.step(cuda.fake(batch))
    return trace


def as_text(prediction: StepPrediction) -> str:
    """Return a table of parts, and the total."""
    setup, total, peak = prediction.setup, prediction.total, prediction.device.peak[prediction.setup.dtype]
    rows = [
        f"{name:<52}{cost.launches:>9,}{cost.bytes / 1e9:>9.1f}{cost.flops / 1e12:>9.2f}{cost.seconds * 1e3:>9.1f}"
        for name in TABLE_ORDER
        if (cost := prediction.costs.get(name))
    ]
    return "\n".join(
        [
            f"predicted, not measured: {setup.cfg.criterion._name} on one {prediction.device.name}, {setup.precision}, "
            f"{setup.batch_size} sequences of {setup.cfg.task.tokens_per_sample} tokens, layers as written",
            "",
            f"{'part':<52}{'kernels':>9}{'GB':>9}{'TFLOP':>9}{'ms':>9}",
            *rows,
            "",
            f"total {total.seconds * 1e3:.1f} ms ({total.range.fast * 1e3:.1f} to {total.range.slow * 1e3:.1f}), "
            f"{total.launches:,} kernels, {total.bytes / 1e9:.0f} GB, {total.flops / 1e12:.1f} TFLOP",
            f"{prediction.tokens / total.seconds:,.0f} tokens/s ({prediction.tokens / total.range.slow:,.0f} to "
            f"{prediction.tokens / total.range.fast:,.0f}); model FLOPs are "
            f"{prediction.model_flops / total.seconds / peak:.0%} of the peak of {peak / 1e12:.0f} TFLOP/s",
        ]
    )
