"""Run code on device "cuda" without a GPU, to check what CUDA would refuse and to count its work.

Tensors are PyTorch's FakeTensors: they have a shape, strides, a dtype and a device, but no values. Operators compute only
shapes, so a step of a base model takes seconds and no memory. Code that fails here also fails on a GPU: an operator with
tensors of different devices, an argument that a fused attention kernel does not accept, a read of a value by the host.
Values, speed and memory limits are not checked.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fairseq import utils
from fairseq.trainer import Trainer
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from amos_fairseq.compat import device_reads
from amos_fairseq.files import whole_file
from amos_fairseq.functional import attention

aten = torch.ops.aten
# Operators whose CUDA kernels require floating point operands of one dtype.
ONE_DTYPE = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.mv,
    aten.addmv,
    aten.native_layer_norm,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten.index_add,
    aten.index_add_,
}
# Operators that PyTorch refuses on CUDA under torch.use_deterministic_algorithms: those of its documentation's list (torch
# 2.13) that a model of text could use, and cuDNN's attention, which PyTorch then leaves out when it chooses a kernel.
NOT_DETERMINISTIC = {
    aten.bincount,
    aten.cumsum,
    aten.cumsum_,
    aten.histc,
    aten.median,
    aten.nll_loss2d_forward,
    aten.put_,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
GUARD_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
# Properties of an H200.
PROPERTIES = SimpleNamespace(
    name="fake CUDA device", major=9, minor=0, total_memory=141 * 10**9, multi_processor_count=132
)


class CudaRuleError(Exception):
    """On a GPU, a fused kernel of PyTorch would refuse its arguments, or the host would wait for the device."""


class FakeCuda:
    """The context that :func:`fake_cuda` returns.

    Attributes:
        host_reads: how often the host has waited for a value of the device.
        uploads: how many tensors were copied to the device.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.host_reads = self.uploads = 0

    def fake(self, batch: Any) -> Any:
        """Replace the CPU tensors in nested lists and dictionaries by FakeTensors on device "cpu"."""
        return utils.apply_to_sample(self.mode.from_tensor, batch)

    def fetch(self, values: Tensor) -> Tensor:
        """Return real ones of the same shape; replaces :func:`amos_fairseq.compat.device_reads.fetch`."""
        self.host_reads += values.device.type == "cuda"
        with unset_fake_temporarily():
            return torch.ones(values.shape, dtype=values.dtype)


class CudaRules(TorchDispatchMode):
    """Refuse what a GPU would refuse or wait for but FakeTensors accept; count copies to the device.

    That is also a boolean index, because the host needs its positions, and a target of a loss that is not int64.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile works although this mode is active."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = function.overloadpacket
        if packet in ONE_DTYPE:
            operands = [arg for arg in args if isinstance(arg, Tensor) and arg.device.type == "cuda"]
            dtypes = sorted({str(operand.dtype) for operand in operands if operand.is_floating_point()})
            require(len(dtypes) <= 1, f"{packet.__name__} takes operands of one dtype, not of {dtypes}")
        if packet in NOT_DETERMINISTIC and torch.are_deterministic_algorithms_enabled():
            operands = [leaf for leaf in tree_iter((args, kwargs)) if is_floating_point(leaf)]
            require(
                all(operand.device.type != "cuda" for operand in operands),
                f"{packet.__name__} has no deterministic kernel for floating point numbers",
            )
        if packet in INDEXING and args[0].device.type == "cuda":
            self._check_indices(index for index in args[1] if isinstance(index, Tensor))
        if packet is aten.nll_loss_forward and args[0].device.type == "cuda":
            require(args[1].dtype == torch.int64, f"the targets of a loss are {args[1].dtype}, not torch.int64")
        if function is aten._fused_adamw_.tensor_lr:
            return None  # in place; PyTorch has a fake kernel for rates that are numbers alone
        result = function(*args, **(kwargs or {}))
        if packet in (aten._to_copy, aten.copy_):
            source = args[1] if packet is aten.copy_ else args[0]
            route = source.device.type, result.device.type
            require(
                route != ("cuda", "cpu"),
                f"a tensor of shape {list(source.shape)} is copied to the host, which waits for it",
            )
            self.cuda.uploads += route == ("cpu", "cuda")
        return result

    def _check_indices(self, indices: Iterator[Tensor]) -> None:
        for index in indices:
            require(
                index.dtype not in (torch.bool, torch.uint8),
                "a boolean index: the host waits for the number of its positions; use where or an index tensor",
            )
            self.cuda.uploads += index.device.type == "cpu"


@contextlib.contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[FakeCuda]:
    """Make every new tensor fake, let ``torch.cuda`` report one GPU, and check the arguments of fused attention.

    The GPU is an H200, or has another compute ``capability``.

    The one planned device read of the trainer (:mod:`amos_fairseq.compat.device_reads`) returns ones and is counted. Every
    other read raises PyTorch's ``DataDependentOutputException`` or :class:`CudaRuleError`.

    Raises:
        CudaRuleError: raised inside the context, see :func:`check_fused_attention` and :class:`CudaRules`.
    """
    mode = FakeTensorMode()  # created first: it imports torch._dynamo, which inspects torch.cuda
    cuda = FakeCuda(mode)

    def on_real_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
        """For statistics, which are computed on the host from fetched values."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:

        def patch(*target: Any, **settings: Any) -> None:
            stack.enter_context(mock.patch.object(*target, **settings))

        # Backward passes run in the calling thread, where they can be observed, and which needs no device of its own.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if not torch.cuda.is_available():
            stack.enter_context(device_guard())
        properties = SimpleNamespace(**vars(PROPERTIES) | {"major": capability[0], "minor": capability[1]})
        for name, answer in TORCH_CUDA.items():
            patch(torch.cuda, name, answer)
        patch(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch(torch.cuda, "get_device_properties", lambda device=None: properties)
        # If it is True, torch.compile asks the driver for streams.
        patch(torch.accelerator, "is_available", return_value=False)
        # PyTorch joins the kernels of many tensors for certain classes only; on a GPU these would be plain tensors.
        patch(_foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, FakeTensor])
        patch(nn.Module, "_apply", replace_tensors)
        patch(attention, "fused_attention", fake_fused_attention)
        if attention.has_varlen():
            from torch.nn.attention import varlen  # from PyTorch 2.10 on

            patch(varlen, "varlen_attn", functools.partial(checked_varlen_attention, varlen.varlen_attn))
        patch(device_reads, "fetch", cuda.fetch)
        patch(device_reads, "split", on_real_numbers(device_reads.split))
        patch(Trainer, "_reduce_and_log_stats", on_real_numbers(Trainer._reduce_and_log_stats))
        stack.enter_context(mode)
        stack.enter_context(CudaRules(cuda))
        # A constant made inside the mode keeps its value, so fairseq can test it without a device.
        patch(device_reads, "NOT_READ_YET", torch.tensor(0.0))
        yield cuda


def check_fused_attention(
    backend: attention.Backend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0
) -> None:
    """Raise :class:`CudaRuleError` if PyTorch's fused attention would refuse its arguments, or copy the mask first.

    The rules of PyTorch 2.6 to 2.13 for devices of compute capability 8.0 and above
    (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``attention.cu``, ``mem_eff_attention/kernel_forward.h``):

    - query, key and value are [B,H,T,d] of one dtype and one head width, with ``stride(-1) == 1``;
    - ``flash`` takes float16 and bfloat16, head widths up to 256, and no mask;
    - ``cudnn`` takes float16 and bfloat16, head widths up to 128 that are multiples of 8, more than one key, and dropout of a
      multiple of 1/16; a mask, which it also takes, is refused here because its backward pass may give NaN;
    - ``efficient`` also takes float32; d is a multiple of 8 (of 4 in float32);
    - a mask has the dtype of the query, ``stride(-1) == 1``, and can be expanded to [B,H,T,T]. Its other strides are
      multiples of 8 elements; otherwise PyTorch pads, that is copies, the mask at every call;
    - a mask may require a gradient only with ``efficient``, which then writes a gradient of [B,H,T,T].
    """
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        require(tensor.ndim == 4, f"{name} has {tensor.ndim} dimensions, not 4")
        require(tensor.stride(-1) == 1, f"{name}.stride(-1) is {tensor.stride(-1)}, not 1")
        require(tensor.dtype == query.dtype, f"{name} is {tensor.dtype}, query is {query.dtype}")
        require(tensor.size(-1) == query.size(-1), f"{name} has heads of {tensor.size(-1)}, query of {query.size(-1)}")
    half = query.dtype in (torch.float16, torch.bfloat16)
    if backend == "flash":
        require(half, f"flash attention takes no {query.dtype}")
        require(query.size(-1) <= attention.FLASH_MAX_HEAD_WIDTH, f"flash attention takes no head of {query.size(-1)}")
        require(mask is None, "flash attention takes no mask")
        return
    if backend == "cudnn":
        width, most = query.size(-1), attention.CUDNN_MAX_HEAD_WIDTH
        require(half, f"cuDNN's attention takes no {query.dtype}")
        require(width % 8 == 0 and width <= most, f"cuDNN's attention takes no head of {width}")
        require(key.size(2) > 1, "cuDNN's attention takes no single key")
        require((16 * dropout).is_integer(), f"cuDNN's attention rounds dropout {dropout} to a multiple of 1/16")
        require(mask is None, "cuDNN's attention may give NaN in the backward pass with a mask")
        return
    require(half or query.dtype == torch.float32, f"memory-efficient attention takes no {query.dtype}")
    multiple = 8 if half else 4
    require(query.size(-1) % multiple == 0, f"the head width {query.size(-1)} is not a multiple of {multiple}")
    if mask is not None:
        shape = (query.size(0), query.size(1), query.size(2), key.size(2))
        fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
        require(fits, f"a mask of shape {list(mask.shape)} cannot be expanded to {list(shape)}")
        require(mask.dtype == query.dtype, f"the mask is {mask.dtype}, query is {query.dtype}")
        require(mask.stride(-1) == 1, f"mask.stride(-1) is {mask.stride(-1)}, not 1")
        require(
            all(stride % attention.MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]),
            f"the strides of the mask are {mask.stride()}: all but the last must be multiples of {attention.MASK_ALIGNMENT}",
        )


def checked_varlen_attention(
    varlen_attn: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Call PyTorch's ``varlen_attn``, whose fake kernel accepts everything.

    The rules of PyTorch 2.11 to 2.13 (``mha_varlen_fwd`` in ``flash_attn/flash_api.cpp``): query, key and value are [N,H,d] of
    one dtype, float16 or bfloat16, with ``stride(-1) == 1`` and a width of up to 256 that is a multiple of 8; the starts of the
    sequences are int32, contiguous, on the same device.
    """
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        require(tensor.shape == query.shape and tensor.ndim == 3, f"{name} is {list(tensor.shape)}, not [N,H,d]")
        require(tensor.stride(-1) == 1, f"{name}.stride(-1) is {tensor.stride(-1)}, not 1")
        require(tensor.dtype == query.dtype, f"{name} is {tensor.dtype}, query is {query.dtype}")
    width = query.size(-1)
    require(query.dtype in attention.HALF_PRECISION, f"flash attention takes no {query.dtype}")
    require(width % 8 == 0 and width <= attention.FLASH_MAX_HEAD_WIDTH, f"flash attention takes no head of {width}")
    for starts in args[:2]:
        require(starts.dtype == torch.int32, f"the starts are {starts.dtype}, not torch.int32")
        require(starts.is_contiguous() and starts.device == query.device, "the starts are not contiguous on the device")
    return varlen_attn(query, key, value, *args, **kwargs)


def is_floating_point(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def require(condition: bool, message: str) -> None:
    if not condition:
        raise CudaRuleError(message)


def fake_fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, backend: attention.Backend
) -> Tensor:
    """Run :func:`amos_fairseq.functional.attention.fused_attention` by the operator that CUDA's dispatcher would choose."""
    if backend == "math":
        return aten._scaled_dot_product_attention_math(query, key, value, mask, dropout)[0]
    check_fused_attention(backend, query, key, value, mask, dropout)
    if backend == "flash":
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout)[0]
    needs_grad = torch.is_grad_enabled()
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(query, key, value, None, needs_grad, dropout)[0]
    if mask is not None:
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, needs_grad, dropout)[0]


def replace_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace ``nn.Module._apply`` (used by ``to``, ``half``, ``cuda``): PyTorch cannot change a FakeTensor in place.

    A tensor that several modules share stays shared and keeps the attributes that were set on it.
    """
    converted: dict[Tensor, Tensor] = {}

    def replacement(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if tensor not in converted:
            with torch.no_grad():
                new = convert(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
                vars(new).update({name: mark for name, mark in vars(tensor).items() if not hasattr(new, name)})
            converted[tensor] = new
        return converted[tensor]

    for part in module.modules() if recurse else [module]:
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: replacement(tensor) for name, tensor in tensors.items()})
    return module


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing; for functions that only call the driver."""


# Results of the torch.cuda functions that this package, fairseq and PyTorch's optimizers call, as on a machine with one GPU.
TORCH_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "is_bf16_supported": lambda *args, **kwargs: True,
    "is_current_stream_capturing": lambda: False,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8),
    **dict.fromkeys(("set_rng_state", "manual_seed", "manual_seed_all"), _nothing),
    **dict.fromkeys(("empty_cache", "synchronize", "reset_peak_memory_stats"), _nothing),
}


@contextlib.contextmanager
def device_guard() -> Iterator[None]:
    """Let the autograd engine use device "cuda" on a machine without a GPU."""
    library = load_guard()
    library.begin_fake_cuda()
    try:
        with (
            # If torch.cuda reports a GPU, the first FakeTensor creates a real tensor on it,
            mock.patch.object(fake_tensor, "init_gpu_context", _nothing),
            # and torch.tensor(..., device="cuda") makes a real copy.
            mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        ):
            yield
    finally:
        library.end_fake_cuda()


@functools.cache
def load_guard() -> ctypes.CDLL:
    """Compile ``fake_cuda.cpp`` against the installed PyTorch, once for each version of both (about five seconds)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amos_fairseq"
    key = hashlib.sha256(GUARD_SOURCE.read_bytes() + torch.__version__.encode() + torch.__file__.encode()).hexdigest()
    library, installed = cache / f"fake_cuda_{key[:16]}.so", Path(torch.__file__).parent
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        flags = f"-std=c++20 -O1 -shared -fPIC -D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}".split()
        folders = [f"-I{installed / 'include'}", f"-L{installed / 'lib'}", "-ltorch_cpu", "-lc10"]
        with whole_file(str(library)) as unfinished:
            command = [*os.environ.get("CXX", "g++").split(), *flags, str(GUARD_SOURCE), "-o", unfinished, *folders]
            subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
