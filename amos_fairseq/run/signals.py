"""SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C end a run after the present update, with a checkpoint and an exit code.

Slurm sends SIGTERM before the time limit and at preemption, and ``--signal=USR1@300`` earlier; submitit requests SIGUSR2. All
of them reach every process of a job step. A rank records the signal, and all ranks agree on the update after which they stop
(three numbers summed over the ranks after each update, only if there are several). Rank 0 saves ``checkpoint_last.pt`` with the
exact position in the epoch, and all ranks exit with :data:`amos_fairseq.errors.REQUEUE`: submitit's own handlers, which these
replace, save nothing, so the batch script requeues on the exit code. Before fairseq launches its ranks (under Hydra: before it
creates its trainer) a signal kills the process as usual: there is nothing to save.

Ctrl-C (SIGINT) does the same with the exit code :data:`amos_fairseq.errors.INTERRUPTED`, because such a run must not be started
again automatically. Before the first update it ends the run at once, and so does a second Ctrl-C; within
:data:`SAME_PRESS_SECONDS` it counts once, because a launcher sends it to its ranks again.

``checkpoint_last.pt`` is also written every ``task.save_interval_minutes``: an update may take a minute on a CPU.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from amos_fairseq.errors import INTERRUPTED, REQUEUE
from amos_fairseq.run.hook import Hook
from amos_fairseq.run.resume import DEFAULT_FILE
from amos_fairseq.setting_checks import setting

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
SAME_PRESS_SECONDS = 1.0

_received: list[int] = []
_interrupted_at: list[float] = []
_trains = threading.Event()


def note_signal(number: int, frame: FrameType | None) -> None:
    """Handler: record the signal, and forward it to spawned ranks if this process only launches them."""
    ranks = [child for child in multiprocessing.active_children() if not child.daemon]  # loader processes are daemons
    for rank in ranks:
        os.kill(rank.pid, number)
    if number == signal.SIGINT:
        _interrupt(launches=bool(ranks))
    _received.append(number)


def _interrupt(launches: bool) -> None:
    """Note Ctrl-C and say what happens; end this process at a second one, and where it neither trains nor has ranks."""
    if not (launches or _trains.is_set()):
        raise KeyboardInterrupt
    now = time.monotonic()
    if _interrupted_at and now - _interrupted_at[0] > SAME_PRESS_SECONDS:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if not _interrupted_at and not launches and distributed_utils.get_global_rank() == 0:
        # Not through a logger, which the signal may have interrupted.
        os.write(2, b"\nCtrl-C: finishing this update and saving; press it again to stop at once\n")
    _interrupted_at.append(now)


def install_handlers() -> None:
    """Handle the signals from now on, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        signal.signal(number, note_signal)
        signal.siginterrupt(number, False)  # system calls of NCCL and gloo must not fail with EINTR


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle the signals while ranks run, in the process that launches them, and forget afterwards what was received."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    install_handlers()
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
        _received.clear()
        _interrupted_at.clear()
        _trains.clear()


@dataclass
class SaveSettings(FairseqDataclass):
    save_interval_minutes: float = setting(
        30.0,
        "write checkpoint_last.pt when the last checkpoint is older than this (0: only at --save-interval and "
        "--save-interval-updates; ours)",
        "0 or more",
    )


class Signals(Hook):
    """Stop the run, or save it, after an update that is complete and, where due, validated and saved."""

    def __init__(self) -> None:
        self.time_of_save = time.monotonic()  # at first: of the start
        self.saved_update: int | None = None

    def before_trainer(self, cfg: Any) -> None:
        install_handlers()

    def before_epoch(self, cfg: Any, trainer: Trainer) -> None:
        _trains.set()

    def after_save(self, trainer: Trainer) -> None:
        self.saved_update, self.time_of_save = trainer.get_num_updates(), time.monotonic()

    def update_completed(self, cfg: Any, trainer: Trainer, epoch_itr: Any, is_last: bool) -> None:
        code, save_is_due = self.due(trainer)
        if code is not None and not is_last:
            self.save_and_exit(cfg, trainer, epoch_itr, code)
        if save_is_due and not (is_last or cfg.checkpoint.no_save):
            self.save(cfg, trainer, epoch_itr)

    def due(self, trainer: Trainer) -> tuple[int | None, bool]:
        """Return INTERRUPTED if any rank has received Ctrl-C, REQUEUE if another signal, else None; and whether to save now.

        All ranks call it after the same update and get the same answer. The clock is that of the first rank.
        """
        minutes = getattr(trainer.task.cfg, "save_interval_minutes", 0)
        is_late = 0 < 60 * minutes < time.monotonic() - self.time_of_save
        save_is_due = is_late and distributed_utils.get_global_rank() == 0
        flags = [float(flag) for flag in (bool(_received), signal.SIGINT in _received, save_is_due)]
        if trainer.data_parallel_world_size > 1:
            on_device = torch.tensor(flags, device=trainer.device)
            distributed_utils.all_reduce(on_device, group=trainer.data_parallel_process_group)
            flags = on_device.tolist()
        stop, interrupted, save = map(bool, flags)
        return INTERRUPTED if interrupted else REQUEUE if stop else None, save

    def save_and_exit(self, cfg: Any, trainer: Trainer, epoch_itr: Any, code: int) -> NoReturn:
        updates = trainer.get_num_updates()
        name = signal.Signals(_received[0]).name if _received else "a signal to another rank"
        if cfg.checkpoint.no_save:
            logger.warning(f"{name}: stopping after update {updates}; nothing is saved (--no-save)")
        else:
            self.save(cfg, trainer, epoch_itr)
        if trainer.data_parallel_world_size > 1:
            torch.distributed.barrier()  # a launcher kills the other ranks as soon as the first one exits
        # A branch has its restore_file from run/resume.py: its command is repeated as it is.
        goes_back = cfg.checkpoint.restore_file != DEFAULT_FILE and not OmegaConf.select(cfg, "lr_scheduler.decay_from")
        command = "the same command without --restore-file and --reset-*" if goes_back else "the same command"
        logger.info(f"{name}: stopped after update {updates}, exit code {code}; start {command} again to continue")
        sys.exit(code)

    def save(self, cfg: Any, trainer: Trainer, epoch_itr: Any) -> None:
        """Write ``checkpoint_last.pt`` unless this update has been saved there."""
        if self.saved_update != trainer.get_num_updates() or cfg.checkpoint.no_last_checkpoints:
            checkpoint = OmegaConf.merge(cfg.checkpoint, {"no_last_checkpoints": False})
            checkpoint_utils.save_checkpoint(checkpoint, trainer, epoch_itr, None)


def handle_in_loader_process(set_worker_signal_handlers: Callable[..., Any]) -> None:
    """In a loader process, exit on SIGTERM from its own rank and ignore signals from other processes.

    The signal of a job step would kill it before its rank, which waits for a batch and would end with it. A rank sends SIGTERM
    to a loader process that does not respond.
    """
    set_worker_signal_handlers()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    rank = os.getppid()

    def listen() -> None:
        while True:
            info = signal.sigwaitinfo(SIGNALS)
            if info.si_pid == rank and info.si_signo == signal.SIGTERM:
                os._exit(0)  # as PyTorch's own handler does

    threading.Thread(target=listen, daemon=True, name="signals").start()
