"""Operations for which the host would wait for an accelerator, found on a CPU by their names."""

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

READ = "aten::_local_scalar_dense"
# A value that is read, a shape that depends on values, values that are copied to the device.
WAITING = {READ, "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::lift_fresh"}


class Waits(TorchDispatchMode):
    """Record where the host would wait if all tensors were on an accelerator, except ``on_host`` and what is computed of them.

    A copy to "cpu" that changes nothing else brings its result to the host and is a wait itself.

    Attributes:
        places: "operation file:line function" of each wait, in order.
    """

    def __init__(self, *on_host: torch.Tensor) -> None:
        super().__init__()
        self.places: list[str] = []
        self._on_host = {id(tensor): tensor for tensor in on_host}  # kept, so that no other gets their identity

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.name().partition(".")[0], kwargs or {}
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        is_on_host = bool(given) and all(id(tensor) in self._on_host for tensor in given)
        is_transfer = name == "aten::_to_copy" and moves_only(given[0], kwargs)
        if not is_on_host and (is_transfer or name in WAITING):
            self.places.append(f"{name} {caller()}")
        made = function(*args, **kwargs)
        if is_on_host or is_transfer:
            self._on_host |= {id(tensor): tensor for tensor in tree_iter(made) if isinstance(tensor, torch.Tensor)}
        return made


def moves_only(tensor: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether a copy was asked for its device; the backward pass names it where it changes the dtype."""
    return options.get("device") == torch.device("cpu") and options.get("dtype") in (None, tensor.dtype)


def caller() -> str:
    """The line outside of PyTorch and this file that called an operation."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    frame = next(frame for frame in reversed(frames) if frame.filename != __file__)
    return f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno} {frame.name}"
