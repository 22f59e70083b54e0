"""``--deterministic`` (``model.deterministic``): the same seed gives the same bits on a GPU, at the cost of speed.

Some CUDA kernels add numbers with atomic operations, in an order that changes from run to run. ``--deterministic`` turns on
``torch.use_deterministic_algorithms``, under which PyTorch replaces such a kernel by one with a fixed order, or raises a
``RuntimeError`` where it has none. What this means for the operations of this package (sources: the documentation of
``torch.use_deterministic_algorithms``, and PyTorch's ``attention_backward.cu`` and ``sdp_utils.cpp``):

    attention, flash                backward pass without atomic additions
    attention, memory-efficient     keys are not split between programs, also for the gradient of a bias
    attention, cuDNN                refused, so :func:`~amos_fairseq.functional.attention.choose_backend` leaves it out
    this package's Triton kernels   unchanged: every sum has a fixed order
    scatter_add, index_add, and the gradients of gather and of indexing by tensors
                                    sorted by index first, then added
    cumsum of floating point numbers
                                    refused, so sampling sums integers: :func:`~amos_fairseq.functional.sampling.running_sums`
    matrix products                 cuBLAS needs a fixed workspace, by an environment variable

On a CPU nothing changes: every kernel has a fixed order for a given number of threads.
"""

import logging
import os
from typing import Any

import torch
from omegaconf import OmegaConf

from amos_fairseq.compat.distribution import visible_gpus
from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)

# cuBLAS reads it when it starts in a process; PyTorch refuses matrix products under any other value than these.
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")


def use_deterministic_kernels(cfg: Any) -> None:
    """Apply ``--deterministic`` to this process, before its first matrix product on a GPU.

    Raises:
        UserError: the environment sets a workspace of cuBLAS with which products are not deterministic.
    """
    if not OmegaConf.select(cfg, "model.deterministic") or visible_gpus(cfg) == 0:
        return
    workspace = os.environ.setdefault(WORKSPACE_VARIABLE, WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise UserError(
            f"--deterministic does not work with {WORKSPACE_VARIABLE}={workspace}: unset it, or set it to {WORKSPACES[0]}"
        )
    torch.use_deterministic_algorithms(True)
    # By default PyTorch then also fills all new memory, for programs that read it before they write it. This one does not.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if cfg.distributed_training.distributed_rank == 0:
        logger.info("only kernels that add in a fixed order run: the same seed gives the same bits, more slowly")
