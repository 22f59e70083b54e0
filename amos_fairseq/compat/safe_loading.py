"""Checkpoints are loaded as data: tensors, plain containers and the one foreign class that fairseq writes.

torch >= 2.6 refuses unknown classes unless ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` says otherwise; a checkpoint is a pickle,
so loading one with other classes runs its author's code. fairseq needs exactly ``argparse.Namespace`` (old checkpoints,
and ``cfg`` of tasks and models that have no dataclass). On several ranks rank 0 loads and broadcasts: the message is
unpickled by the same strict loader, which meets ``_TensorPlaceholder`` (fairseq's stand-in for a tensor that follows) and
the classes of ``omegaconf`` inside ``cfg``. The first is allowed; ``cfg`` stays on rank 0, since nobody reads it elsewhere.
"""

import argparse
import errno
import functools
import logging
import os
import pickle
import re
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils

from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)

OVERRIDE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class DamagedCheckpoint(UserError):
    """The file is no whole checkpoint: cut short, empty, or something else."""


def read_header(path: str) -> dict[str, Any]:
    """A checkpoint whose tensors are mapped, not read: fast however large the file is.

    Raises:
        DamagedCheckpoint: the file is cut short or is no checkpoint.
        UserError: it holds a class that is not allowed, or it cannot be read.
    """
    try:
        with explained(path), open(path, "rb"):  # torch says of a file that it may not read that it is no archive
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DamagedCheckpoint as error:
        if "mmap can only be used" not in str(error.__cause__):
            raise
    with explained(path):  # the format before torch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


class explained:
    """Context manager: what ``torch.load`` says about the file ``path``, in one line for its user."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return
        # torch looks for the end of an archive where a file cut short has none: EINVAL. Any other is the disk's.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise UserError(
                f"{self.path} cannot be read ({error.strerror}): permit reading it, or give another file"
            ) from error
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and foreign:
            raise UserError(
                f"{self.path} holds an object of class {foreign.group(1)}, which is not loaded because it could run "
                "code of whoever wrote the file: keep tensors, numbers, strings, lists and dictionaries in it only"
            ) from error
        raise DamagedCheckpoint(
            f"{self.path} is no whole checkpoint (cut short, or not written by fairseq): give another file"
        ) from error


def without_config(state: Any) -> Any:
    """``state`` without ``cfg`` and ``args``, if it is a checkpoint; anything else as it is."""
    if not isinstance(state, dict) or "optimizer_history" not in state:
        return state
    return {**state, "cfg": None, "args": None}


def ignore_override() -> None:
    """torch reads the variable at each load; fairseq's calls leave the choice to it."""
    if os.environ.pop(OVERRIDE, None) is not None:
        logger.warning("%s is ignored: checkpoints are loaded without running code from them", OVERRIDE)


def apply() -> None:
    """Allow two classes, broadcast no ``cfg``, say in one line what a file is that does not load."""
    ignore_override()
    torch.serialization.add_safe_globals([argparse.Namespace, distributed_utils._TensorPlaceholder])
    load_checkpoint_to_cpu = checkpoint_utils.load_checkpoint_to_cpu
    broadcast_object = distributed_utils.broadcast_object

    @functools.wraps(load_checkpoint_to_cpu)
    def load_explained(path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with explained(path), open(path, "rb"):
            return load_checkpoint_to_cpu(path, *args, **kwargs)

    @functools.wraps(broadcast_object)
    def broadcast_without_config(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return broadcast_object(without_config(obj), *args, **kwargs)

    checkpoint_utils.load_checkpoint_to_cpu = load_explained
    distributed_utils.broadcast_object = broadcast_without_config
