"""The device of a run: its precision, and on a CPU the memory of a rank and its threads beside other programs.

Stock fairseq, as observed: ``--amp`` on a CPU silently trains in float32; ``--fp16`` on a CPU fails inside CUDA. Under
``--fp16`` fairseq merges all float32 master weights into one flat tensor, which cannot keep the parameter groups of this
package's optimizers, and asks the user for another flag.
"""

import logging
import os
from typing import Any

import torch
from fairseq.optim import OPTIMIZER_REGISTRY

from amos_fairseq.compat.distribution import visible_gpus
from amos_fairseq.errors import UserError
from amos_fairseq.process_settings import OPENMP_VARIABLES, keep_freed_memory

logger = logging.getLogger(__name__)


def choose_precision(cfg: Any, has_gpu: bool | None = None) -> None:
    """Complete ``cfg.common`` for the device.

    Args:
        has_gpu: whether the model is on a GPU; None for where ``cfg`` puts it on this machine.

    Raises:
        UserError: two precisions are set, or the device or the optimizer does not support the one that is set.
    """
    common = cfg.common
    if has_gpu is None:
        has_gpu = visible_gpus(cfg) > 0
    chosen = [name for name in ("fp16", "bf16", "amp") if getattr(common, name)]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other: choose one")
    if chosen and chosen[0] != "bf16" and not has_gpu:
        raise UserError(f"--{chosen[0]} needs a GPU: on a CPU use --bf16, or float32 without a flag")
    if "bf16" in chosen and has_gpu and not torch.cuda.is_bf16_supported():
        raise UserError("--bf16 is not supported by this GPU: use --fp16, or float32 without a flag")
    optimizer = OPTIMIZER_REGISTRY.get(getattr(cfg.optimizer, "_name", None))
    if optimizer is None or not optimizer.__module__.startswith("amos_fairseq."):
        return  # only this package's optimizers need parameter groups and float32 weights
    for name in ("memory_efficient_fp16", "memory_efficient_bf16"):
        if getattr(common, name):
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag} keeps no float32 weights, which --optimizer {cfg.optimizer._name} updates: "
                f"use --{flag.removeprefix('memory-efficient-')}"
            )
    if common.fp16:
        common.fp16_no_flatten_grads = True


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
