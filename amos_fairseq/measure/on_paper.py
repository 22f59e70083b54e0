"""Predict the time of a training step on a GPU from the kernels that it launches, their bytes and their FLOPs, without a GPU.

The real step (model, criterion, backward pass, clipping, optimizer) runs on the FakeTensors of
:mod:`amos_fairseq.measure.fake_cuda`. Every operator that would start a kernel counts as one kernel, except operators on lists
of tensors (:func:`kernels_of`). Its predicted time is

    matrix product   max(FLOPs / (share * peak), bytes / (share * bandwidth))
    fused attention  FLOPs / (share * attention rate) + bytes of the mask, of its gradient and of scratch memory / bandwidth
    anything else    bytes / (share * bandwidth)

and at least SHORTEST_KERNEL for each kernel. The peak is that of a large square product, the bandwidth that of a large copy.
The share of them that a class of operators reaches is assumed: an expected value, a slow and a fast one
(:mod:`amos_fairseq.measure.gpu_rates`). The sum of the expected times is the prediction; those of the slow and of the fast
shares, all at once, are its range. It holds for layers as written, without torch.compile, and for a host that launches kernels
faster than the device runs them. It is meant to be compared with a measurement, part by part.
"""

import contextlib
import dataclasses
import math
from collections import ChainMap, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
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
from amos_fairseq.measure.gpu_rates import (
    ATTENTION_SHARE,
    COLUMNS_SHARE,
    DEVICES,
    ERF_SHARE,
    INDEXED_SHARE,
    LOGITS_SHARE,
    PRODUCT_SHARE,
    RANDOM_SHARE,
    ROWS_SHARE,
    SHORTEST_KERNEL,
    STREAM_SHARE,
    TRITON_SHARE,
    GpuRates,
    Seconds,
)
from amos_fairseq.measure.measurement import LiveBytes, held_bytes

aten = torch.ops.aten

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
    "torch_attn::_varlen_attn": ("flash", 0),
    "torch_attn::_varlen_attn_backward": ("flash", 1),
    "amos_fairseq::attention": ("triton", 0),
    "amos_fairseq::attention_backward": ("triton", 1),
}
# FLOPs by arguments and result. PyTorch's table, which operators extend later, has no matrix-vector products.
FLOPS = ChainMap({aten.mv: lambda matrix, vector, out_val: 2 * matrix.numel()}, flop_registry)
# Rows and columns of the scores that FlashAttention computes at once, for heads of 64.
FLASH_TILE = 128
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
        created: the memory of what :func:`trace_step` creates, counted by operators: FakeTensors are not in CUDA's.
    """

    def __init__(self, device: GpuRates) -> None:
        super().__init__()
        self.device = device
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.operators: dict[tuple[str, str], Cost] = defaultdict(Cost)
        self.created = LiveBytes()
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
        if function.namespace == "torch_attn":
            flops = varlen_flops(dict(zip((each.name for each in function._schema.arguments), args, strict=False)))
        else:
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


def varlen_flops(arguments: dict[str, Any]) -> int:
    """Return the FLOPs of attention in packed sequences, as if all were as long as the longest; with a window, of whole tiles.

    A backward pass has five products, a forward pass two (PyTorch's count for its other kernels).
    """
    tokens, heads, width = arguments["query"].shape
    sides = [side if side >= 0 else arguments["max_k"] for side in arguments["window_size"] or (-1, -1)]
    tiles = 1 + sum(math.ceil(side / FLASH_TILE) for side in sides)
    keys = min(arguments["max_k"], tiles * FLASH_TILE)
    return 2 * tokens * heads * width * keys * (5 if "grad_out" in arguments else 2)


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
        held_bytes: of weights, gradients, master weights and moments.
        peak_bytes: these and the largest sum of other tensors in the step, without scratch memory inside operators.
    """

    setup: BenchSetup
    device: GpuRates
    tokens: int
    model_flops: float
    held_bytes: int
    peak_bytes: int
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
        step = FairseqStep(setup, task)
        trace, held = trace_step(step, cuda, batch, device), held_bytes(*step.state())
    tokens = batch["ntokens"]
    model_flops = training_flops(setup.cfg, setup.vocabulary_size, reference=True).per_token * tokens
    return StepPrediction(setup, device, tokens, model_flops, held, held + trace.created.peak, dict(trace.costs))


def trace_step(step: FairseqStep, cuda: FakeCuda, batch: dict[str, Any], device: GpuRates) -> Trace:
    """Trace one update after a first one, which creates the optimizer's moments."""
    step.step(cuda.fake(batch))
    trace = Trace(device)
    with (
        mock.patch.object(torch.autograd.profiler, "record_function", trace.range),
        mock.patch.object(step_profile, "record_function", trace.range),
        step_profile.marked_parts(step),
        step_profile.as_written(),
        trace.created,
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
            f"memory: {prediction.held_bytes / 1e9:.1f} GB of weights, gradients and moments; with activations "
            f"{prediction.peak_bytes / 1e9:.1f} GB",
        ]
    )
