"""Collective operations over the ranks of a run, each of which has to call them.

A problem that only the first rank finds, for example on disk, is broadcast, so that no other rank waits for it in a collective.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from fairseq.distributed import utils as distributed_utils
from torch import Tensor

from amos_fairseq.errors import UserError

Value = TypeVar("Value")


def from_first_rank(read: Callable[[], Value]) -> Value:
    """Return on every rank what ``read`` returns on the first one, which must be picklable.

    If ``read`` raises, so does the first rank; the others raise ``SystemExit`` with the same exit code, so that the message is
    printed once.
    """
    is_first = distributed_utils.get_global_rank() == 0
    value, error = None, None
    if is_first:
        try:
            value = read()
        except Exception as raised:
            error = raised
    if distributed_utils.get_global_world_size() > 1:
        # An exception of any library cannot always be pickled; the other ranks need its exit code alone.
        shared = [(value, None if error is None else getattr(error, "exit_code", 1))]
        torch.distributed.broadcast_object_list(shared, src=0)
        value, exit_code = shared[0]
        if exit_code is not None and not is_first:
            raise SystemExit(exit_code)
    if error is not None:
        raise error
    return value


def raise_on_every_rank(problem: str | None, error_class: type[UserError] = UserError) -> None:
    """End all ranks if the first rank has a ``problem``, a message for the user; the class determines the exit code."""

    def report() -> None:
        if problem is not None:
            raise error_class(problem)

    from_first_rank(report)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all ranks, on the CPU. Every rank has to pass the same shape and dtype."""
    if distributed_utils.get_global_world_size() == 1:
        return values
    on_device = values.to("cuda" if torch.distributed.get_backend() == "nccl" else "cpu", copy=True)
    torch.distributed.all_reduce(on_device)
    return on_device.cpu()
