"""Ranks end together: what one of them finds on disk alone is told to all, so that none waits for it in a collective. And
what each has counted of its part is added up.
"""

from collections.abc import Callable

import torch
from fairseq.distributed import utils as distributed_utils
from torch import Tensor

from amos_fairseq.errors import UserError


def raise_on_every_rank(problem: str | None) -> None:
    """End all ranks with what the first has found. Every rank has to call this at the same place.

    Args:
        problem: the line for the user, or None; what other ranks than the first pass is ignored.

    Raises:
        UserError: on the first rank. The others raise ``SystemExit``: one line is enough.
    """
    rank = distributed_utils.get_global_rank()
    if distributed_utils.get_global_world_size() > 1:
        shared = [problem]
        torch.distributed.broadcast_object_list(shared, src=0)
        problem = shared[0]
    if problem is not None:
        raise UserError(problem) if rank == 0 else SystemExit(1)


def on_first_rank(action: Callable[[], object]) -> None:
    """Do ``action`` on the first rank, and end all ranks if it raises :class:`UserError`. Every rank has to call this."""
    problem = None
    if distributed_utils.get_global_rank() == 0:
        try:
            action()
        except UserError as error:
            problem = str(error)
    raise_on_every_rank(problem)


def sum_over_ranks(numbers: Tensor) -> Tensor:
    """The ``numbers`` of all ranks added up, on the CPU. Every rank has to call this, with as many of one type."""
    if distributed_utils.get_global_world_size() == 1:
        return numbers
    on_device = numbers.to("cuda" if torch.distributed.get_backend() == "nccl" else "cpu", copy=True)
    torch.distributed.all_reduce(on_device)
    return on_device.cpu()
