"""SAVE_DIR belongs to one run at a time: two runs would replace each other's checkpoints."""

import functools
import os
from typing import Any

from fairseq import checkpoint_utils
from fairseq.logging import progress_bar
from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from amos_fairseq.compat.collectives import on_first_rank
from amos_fairseq.errors import save_dir_not_writable
from amos_fairseq.files import take_lock
from amos_fairseq.run.hook import Hook

_locks: dict[str, FileLock] = {}  # held until this process ends


class SaveDir(Hook):
    """Lock SAVE_DIR before anything in it is read or repaired."""

    def before_load(self, cfg: Any, trainer: Any) -> None:
        on_first_rank(functools.partial(claim_save_dir, cfg.save_dir))


def claim_save_dir(save_dir: str) -> None:
    """Create SAVE_DIR and lock it until this process ends. It may have several runs in it, one after the other."""
    path = os.path.join(os.path.abspath(save_dir), ".lock")
    if path in _locks:
        return
    try:
        os.makedirs(save_dir, exist_ok=True)
        advice = "wait for it, stop it, or give another --save-dir"
        _locks[path] = take_lock(path, f"{save_dir} is in use by another run", advice)
    except OSError as error:
        raise save_dir_not_writable(save_dir, error) from error


def leave_to_claim(verify_checkpoint_directory: Any, save_dir: str) -> None:
    """Replace fairseq's test, which raises OSError on the first rank only: :func:`claim_save_dir` tests the directory."""


def separate_jobs(cfg: Any) -> None:
    """Set the SAVE_DIR of a job of a sweep to its own folder: the jobs would continue and overwrite each other's run."""
    if not HydraConfig.initialized() or OmegaConf.is_missing(HydraConfig.get().job, "num"):
        return
    folder = HydraConfig.get().sweep.subdir
    # Hydra's own launcher runs the jobs in one process, in which fairseq keeps the writers and the best score of a run.
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    if folder not in ("", ".") and not cfg.checkpoint.save_dir.endswith(f"/{folder}"):
        cfg.checkpoint.save_dir = f"{cfg.checkpoint.save_dir}/{folder}"
