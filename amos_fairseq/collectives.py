"""Collective operations over the ranks of a run: end all of them together, and add up their counts.

A problem that only one rank finds, for example on disk, is broadcast, so that no other rank waits for it in a collective.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from fairseq.distributed import utils as distributed_utils
from torch import Tensor

from amos_fairseq.errors import UserError

Value = TypeVar("Value")


def from_first_rank(read: Callable[[], Value]) -> Value:
    """Return on every rank what ``read`` returns on the first one, which must be picklable. Every rank has to call this."""
    shared = [read() if distributed_utils.get_global_rank() == 0 else None]
    if distributed_utils.get_global_world_size() > 1:
        torch.distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def raise_on_every_rank(problem: str | None, kind: type[UserError] = UserError) -> None:
    """End all ranks if the first rank has found a problem. Every rank has to call this at the same point.

    Args:
        problem: the message for the user, or None. Only the first rank's value is used.
        kind: what is raised; it determines the exit code.

    Raises:
        UserError: on the first rank. The others raise ``SystemExit``, so that the message is printed once.
    """
    shared = from_first_rank(lambda: problem)
    if shared is not None:
        raise kind(shared) if distributed_utils.get_global_rank() == 0 else SystemExit(kind.exit_code)


def on_first_rank(action: Callable[[], object]) -> None:
    """Call ``action`` on the first rank; if it raises :class:`UserError`, end all ranks. Every rank has to call this."""
    problem = None
    if distributed_utils.get_global_rank() == 0:
        try:
            action()
        except UserError as error:
            problem = str(error)
    raise_on_every_rank(problem)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all ranks, on the CPU. Every rank has to pass the same shape and dtype."""
    if distributed_utils.get_global_world_size() == 1:
        return values
    on_device = values.to("cuda" if torch.distributed.get_backend() == "nccl" else "cpu", copy=True)
    torch.distributed.all_reduce(on_device)
    return on_device.cpu()
