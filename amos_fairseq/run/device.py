"""On a CPU, the memory of a rank and its threads beside other programs."""

import logging
import os
from typing import Any

import torch

from amos_fairseq.compat.distribution import visible_gpus
from amos_fairseq.process_settings import OPENMP_VARIABLES, keep_freed_memory

logger = logging.getLogger(__name__)


def advise_passive_threads(cfg: Any) -> None:
    """Log how the threads of a run leave a busy machine to others."""
    if cfg.distributed_training.distributed_rank != 0 or visible_gpus(cfg) > 0 or torch.get_num_threads() == 1:
        return
    if not any(name in os.environ for name in OPENMP_VARIABLES):
        logger.info("on a busy machine, set OMP_WAIT_POLICY=passive before this command: threads that wait then sleep")


def keep_memory(cfg: Any) -> None:
    """Let glibc keep what a rank frees."""
    if visible_gpus(cfg) == 0:
        keep_freed_memory()
