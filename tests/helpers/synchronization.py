"""Operations that make the host wait for the device: on a CPU none waits, so they are recognized by their names."""

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

READ = "aten::_local_scalar_dense"
# A value that is read, a shape that depends on values, values that are copied to the device.
SYNCHRONIZING = {READ, "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::lift_fresh"}


class Operations(TorchDispatchMode):
    """The names of all operations, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.name().partition(".")[0])
        return function(*args, **(kwargs or {}))


class Synchronizations(TorchDispatchMode):
    """The calls at which the host would wait if all tensors were on a device, except those made of tensors on the host.

    A copy whose only change is ``device="cpu"`` brings its result to the host and is such a call itself.

    Attributes:
        places: "operation file:line function" of each call, in order.
    """

    def __init__(self, *on_host: torch.Tensor) -> None:
        super().__init__()
        self.places: list[str] = []
        self._on_host = {id(tensor): tensor for tensor in on_host}  # the references keep the identities unique

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.name().partition(".")[0], kwargs or {}
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        is_on_host = bool(tensors) and all(id(tensor) in self._on_host for tensor in tensors)
        is_transfer = name == "aten::_to_copy" and only_moves(tensors[0], kwargs)
        if not is_on_host and (is_transfer or name in SYNCHRONIZING):
            self.places.append(f"{name} {caller()}")
        made = function(*args, **kwargs)
        if is_on_host or is_transfer:
            self._on_host |= {id(tensor): tensor for tensor in tree_iter(made) if isinstance(tensor, torch.Tensor)}
        return made


def only_moves(tensor: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether a copy changes the device only; the backward pass also passes the device when it changes the dtype."""
    return options.get("device") == torch.device("cpu") and options.get("dtype") in (None, tensor.dtype)


def caller() -> str:
    """The innermost line outside PyTorch and this file."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    frame = next(frame for frame in reversed(frames) if frame.filename != __file__)
    return f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno} {frame.name}"
