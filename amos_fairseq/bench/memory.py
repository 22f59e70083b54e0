"""Peak memory of a step."""

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from amos_fairseq.bench.timing import wait_for


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators make while this is on, as long as they live.

    PyTorch keeps no count of a CPU's memory. Scratch space inside an operator is not seen, nor what was there before.

    Attributes:
        now: bytes alive.
        peak: the most that ``now`` has been.
        largest: of one tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_iter((args, kwargs)):  # what was there before is not ours, also where it is returned
            if isinstance(given, Tensor):
                self._note(given.untyped_storage(), is_new=False)
        made = function(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage(), is_new=True)
        return made

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
    """The most bytes that ``step`` holds beyond what is held before it."""
    if device.type == "cuda":
        wait_for(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        # fairseq's trainer starts the count anew at the end of each step, before anybody here could read it.
        with mock.patch.object(torch.cuda, "reset_peak_memory_stats"):
            step()
            wait_for(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        step()
    return live.peak


def held_bytes(*tensors: Tensor) -> int:
    """Bytes of the storages behind tensors, each once."""
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
