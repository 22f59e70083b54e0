"""Time and memory of training steps, and the limits of the machine: its matrix product rate and memory bandwidth."""

import os
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from amos_fairseq.process import version_of

Batch = dict[str, Any]
Progress = Callable[[str], None]
# Duration of the calls that are timed together: long compared with a kernel launch (microseconds) and with a
# synchronization (tens of microseconds).
BURST_SECONDS = 0.03


class TrainingStep(Protocol):
    """A training step that is measured; ``module``: everything that is trained."""

    module: nn.Module

    def step(self, batch: Batch) -> None:
        """Update the parameters once with ``batch``, which is on the CPU as a data loader returns it."""

    def state(self) -> Iterable[Tensor]:
        """Return everything that is held between two steps: weights, gradients, master weights, moments."""


@dataclass(frozen=True)
class MedianAndRange:
    """Median, minimum and maximum of several values."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "MedianAndRange":
        return cls(statistics.median(values), min(values), max(values))


def tokens_per_second(seconds: Sequence[float], tokens_per_step: int) -> MedianAndRange:
    return MedianAndRange.of([tokens_per_step / second for second in seconds])


def speed_ratio(ours: Sequence[float], theirs: Sequence[float]) -> MedianAndRange:
    """Compute how many times as fast ``ours`` is, step by step: the i-th steps of both ran one after the other."""
    return MedianAndRange.of([their / our for our, their in zip(ours, theirs, strict=True)])


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def best_seconds(call: Callable[[], Any], device: torch.device, budget: float, min_repeats: int = 3) -> float:
    """Return the fastest of as many repetitions as fit into ``budget`` seconds, after one that is not timed."""
    call()
    best, spent, repeats = float("inf"), 0.0, 0
    while repeats < min_repeats or spent < budget:
        seconds = seconds_of(call, device)
        best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
    return best


def sustained_seconds(call: Callable[[], Any], device: torch.device, budget: float, min_bursts: int = 3) -> float:
    """Return the median seconds of one ``call`` when it is repeated without a pause for ``budget`` seconds.

    Calls are timed in bursts with one synchronization each. The first burst is one call; the size doubles while bursts are
    shorter than :data:`BURST_SECONDS`. Bursts that start in the first half of the budget do not count, because a processor
    lowers its clock to its power limit only after some hundred milliseconds. At least ``min_bursts`` count. The median does
    not depend on one burst that was too short or that another program slowed down.
    """
    call()
    counted: list[float] = []
    spent, repeats = 0.0, 1
    while spent < budget or len(counted) < min_bursts:
        seconds = seconds_of(lambda number=repeats: [call() for _ in range(number)], device)
        if spent >= budget / 2:
            counted.append(seconds / repeats)
        spent += seconds
        if seconds < BURST_SECONDS:
            repeats *= 2
    return statistics.median(counted)


def alternate(
    contestants: Sequence[TrainingStep], batches: Sequence[Batch], steps: int, device: torch.device, progress: Progress
) -> list[list[float]]:
    """Return the seconds of ``steps`` steps of each contestant, run in rounds of one step each: A B C A B C ...

    A disturbance that lasts longer than a step therefore affects all contestants alike. All use the same batch in a round.
    """
    seconds: list[list[float]] = [[] for _ in contestants]
    for number in range(steps):
        progress(f"step {number + 1} of {steps}")
        batch = batches[number % len(batches)]
        for own, contestant in zip(seconds, contestants, strict=True):
            own.append(seconds_of(lambda c=contestant, b=batch: c.step(b), device))
    return seconds


def print_progress(text: str) -> None:
    """Overwrite one line of a terminal; print nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that operators create while this mode is active, as long as the tensors live.

    PyTorch does not count CPU memory. Scratch memory inside an operator and older tensors are not counted.

    Attributes:
        now: bytes alive.
        peak: maximum of ``now``.
        largest: bytes of the largest tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_iter((args, kwargs)):  # an older tensor is not counted when an operator returns it
            if isinstance(given, Tensor):
                self._note(given.untyped_storage(), is_new=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage(), is_new=True)
        return result

    def _note(self, storage: torch.UntypedStorage, is_new: bool) -> None:
        if id(storage) in self._known:
            return
        size = storage.nbytes() if is_new else 0
        self._known.add(id(storage))
        weakref.finalize(storage, self._forget, id(storage), size).atexit = False
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.now -= size


def step_peak(step: Callable[[], None], device: torch.device) -> int:
    """Return the maximum number of bytes that ``step`` allocates in addition to those allocated before it."""
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        # fairseq's trainer resets the peak at the end of each step, before it could be read here.
        with mock.patch.object(torch.cuda, "reset_peak_memory_stats"):
            step()
            synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        step()
    return live.peak


def held_bytes(*tensors: Tensor) -> int:
    """Return the total bytes of the storages of the tensors; a shared storage counts once."""
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


# Sizes of the square products: the peak is the fastest of them, because the best size differs between machines.
MATMUL_EDGES = {"cpu": (1024, 2048, 4096), "cuda": (4096, 8192, 16384)}
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**31}  # much larger than every cache
SECONDS = {"cpu": 1.0, "cuda": 2.0}  # for each size and for the copy; a GPU reaches its power limit in the first half
PACKAGES = ("amos_fairseq", "torch", "fairseq-fixed", "transformers", "numpy")


def matmul_peak(device: torch.device, dtype: torch.dtype, edges: tuple[int, ...] | None = None) -> float:
    """Return the FLOP/s of the fastest square matrix product; a multiplication and an addition are two operations.

    This rate is an upper bound for a training step: the sustained median of products of random normal values. A product
    draws more power the more bits change between its operands, and a GPU at its power limit lowers its clock: an H200,
    measured with another program, multiplied 8192 x 8192 matrices in bf16 at 894 TFLOP/s if they were zeros and at 788 if
    they were random. Values in [0, 1) share their sign and most of their exponents. Short bursts end before the clock
    falls, and the best of many bursts is a rate that a training step cannot sustain. float32 is PyTorch's default float32
    (no TF32 unless the caller allowed it).
    """
    peak = 0.0
    for edge in edges or MATMUL_EDGES[device.type]:
        operations = 2 * edge**3
        if peak == 0 or operations / peak < SECONDS[device.type]:  # a slow CPU leaves out the largest product
            peak = max(peak, operations / matmul_seconds(edge, device, dtype))
    return peak


def matmul_seconds(edge: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    return sustained_seconds(lambda: torch.mm(left, right, out=product), device, SECONDS[device.type])


def memory_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Return the sustained bytes/s of a copy of ``size`` bytes (a multiple of 8), counting both reads and writes.

    The bytes are random for the same reason as the values of :func:`matmul_peak`.
    """
    source = torch.empty((size or COPIED_BYTES[device.type]) // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / sustained_seconds(lambda: target.copy_(source), device, SECONDS[device.type])


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the hardware for the report."""
    gpu = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": gpu,
    }


def processor_name() -> str:
    """Return the processor model as Linux reports it, or the architecture on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a step uses."""
    found = {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}
    return found | {"torch": torch.__version__}  # with the build, such as +cu130
